"""Calls of `LLM` that are interrupted: the next one is right, and a stream around it loses nothing."""

from __future__ import annotations

import pytest

from hybrid_jax import SamplingParams, completions
from hybrid_jax.text import IncrementalDecoder
from tests.surface.fake_engine import GREEDY, SCRIPT, texts


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("device lost")])
def test_after_an_interruption_the_next_call_is_right(llm, error):
    llm._engine.raises = error
    with pytest.raises(type(error)):
        llm.generate(["ab", "cd"], SamplingParams(max_tokens=100))
    assert not llm._engine.has_work
    assert llm._calls.num_unfinished == 0
    assert texts(llm.generate(["ab", "cd"], GREEDY)) == [SCRIPT[:12]] * 2


PLACES = ["step", "add", *(("push", k) for k in (1, 2, 5, 9, 14)), *(("delta", k) for k in (1, 4))]


def interrupt(monkeypatch, engine, place):
    """Makes Ctrl-C fall, once, after an engine call's work or before the k-th call of something else."""
    if isinstance(place, str):
        target, name, when = engine, place, 1
    elif place[0] == "push":
        target, name, when = IncrementalDecoder, "push", place[1]
    else:
        target, name, when = completions, "Delta", place[1]
    real, calls = getattr(target, name), []

    def call(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append(name)
        if len(calls) == when:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(target, name, call)
    return calls


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_an_interrupted_call_takes_nothing_from_a_stream_around_it(
    make_llm, monkeypatch, place, steps
):
    params = SamplingParams(max_tokens=23, logprobs=1, stop="lazy")
    expected = list(make_llm(steps_per_dispatch=steps).stream("ab", params))[-1].output.outputs
    llm = make_llm(steps_per_dispatch=steps)
    deltas = llm.stream("ab", params)
    found = [next(deltas)]
    with monkeypatch.context() as patch:
        calls = interrupt(patch, llm._engine, place)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(20):
                llm.generate(["cd", "ef"], SamplingParams(max_tokens=11))
        assert calls
    assert len(llm._engine.requests) <= 1
    found += deltas
    assert "".join(d.text for d in found) == expected[0].text
    assert sum((d.token_ids for d in found), ()) == expected[0].token_ids
    assert sum((d.logprobs for d in found), ()) == expected[0].logprobs
    assert [d.finished() for d in found] == [False] * (len(found) - 1) + [True]
    assert found[-1].output.outputs == expected
    assert not llm._engine.has_work
    assert llm._calls.num_unfinished == 0
    assert texts(llm.generate(["ab", "cd"], GREEDY)) == [SCRIPT[:12]] * 2


def test_an_interrupt_while_a_stop_string_ends_a_completion_ends_it_once(make_llm, monkeypatch):
    llm = make_llm(steps_per_dispatch=3)
    deltas = llm.stream("ab", SamplingParams(max_tokens=100, stop="brown"))
    found = [next(deltas)]
    real, calls = llm._engine.abort, []

    def abort(request_id):
        calls.append(request_id)
        if len(calls) == 1:
            raise KeyboardInterrupt  # before it does anything
        real(request_id)

    monkeypatch.setattr(llm._engine, "abort", abort)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("cd", SamplingParams(max_tokens=60))
    assert calls[0] == found[0].request_id
    llm.generate("ef", SamplingParams(max_tokens=9))
    assert not llm._engine.has_work
    found += deltas
    assert "".join(d.text for d in found) == "The quick "
    assert [d.finished() for d in found] == [False] * (len(found) - 1) + [True]

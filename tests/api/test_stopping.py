"""Where a completion ends: stop strings, stop tokens, the model's own end token."""

from __future__ import annotations

import pytest

from hybrid_jax import SamplingParams
from tests.api.fake_engine import EOS


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("include, text", [(False, "The quick "), (True, "The quick brown")])
def test_a_stop_string_ends_text_and_tokens_whatever_the_step_size(make_llm, steps, include, text):
    llm = make_llm(steps_per_dispatch=steps)
    params = SamplingParams(
        stop=["fox", "brown"], include_stop_str_in_output=include, logprobs=1, max_tokens=40
    )
    [output] = llm.generate("ab", params)
    [completion] = output.outputs
    assert completion.text == text
    assert completion.token_ids == tuple(b"The quick brown")
    assert len(completion.logprobs) == 15
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "brown")
    assert llm._engine.aborted == [output.request_id]
    assert not llm._engine.has_work


def test_a_stop_string_on_the_last_token_is_a_stop(make_llm):
    llm = make_llm()
    [output] = llm.generate("ab", SamplingParams(stop="quick", max_tokens=9))
    assert output.outputs[0].finish_reason == "stop"
    assert llm._engine.aborted == []


@pytest.mark.parametrize(("least", "length"), [(0, 4), (4, 4), (5, 49), (9, 49)])
def test_stop_strings_that_begin_within_the_least_length_pass(llm, least, length):
    params = SamplingParams(stop="quick", max_tokens=60, min_tokens=least)
    [output] = llm.generate("ab", params)
    assert output.outputs[0].text == (llm._engine.script.decode() * 2)[:length]
    assert output.outputs[0].stop_reason == "quick"


def test_a_held_back_start_of_a_stop_string_is_given_out_at_the_end(llm):
    [output] = llm.generate("ab", SamplingParams(stop="quicker", max_tokens=9))
    assert output.outputs[0].text == "The quick"
    assert output.outputs[0].finish_reason == "length"


def test_stop_tokens_stay_in_the_tokens_and_leave_the_text(llm):
    [output] = llm.generate("ab", SamplingParams(stop_token_ids=[ord("q")], max_tokens=40))
    [completion] = output.outputs
    assert (completion.text, completion.token_ids[-1]) == ("The ", ord("q"))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ord("q"))


@pytest.mark.parametrize("ignore, length", [(False, 3), (True, 6)])
def test_the_models_own_end_token(llm, monkeypatch, ignore, length):
    monkeypatch.setattr(type(llm._engine), "script", b"ab\x00cd")
    [output] = llm.generate("x", SamplingParams(max_tokens=6, ignore_eos=ignore))
    [completion] = output.outputs
    assert len(completion.token_ids) == length
    assert completion.stop_reason is None
    if not ignore:
        assert (completion.text, completion.token_ids[-1]) == ("ab", EOS)

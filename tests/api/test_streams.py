"""Streams that end early, and what an `LLM` says about itself then and after `close`; clocks of deliveries."""

from __future__ import annotations

import pytest

from hybrid_jax import SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.mark.parametrize("n", [1, 2])
def test_what_came_with_the_first_token_is_counted(make_llm, n):
    llm = make_llm(steps_per_dispatch=8)
    [output] = llm.generate("ab", SamplingParams(max_tokens=20, n=n))
    metrics = output.metrics
    assert (metrics.num_first_tokens, metrics.num_generation_tokens) == (8 * n, 20 * n)
    spent = metrics.finished_time - metrics.first_token_time
    assert metrics.decode_tokens_per_s == pytest.approx(12 * n / spent)
    [short] = llm.generate("ab", SamplingParams(max_tokens=8, n=n))
    assert short.metrics.decode_tokens_per_s is None
    assert short.metrics.tpot_s is None


def test_an_open_stream_ends_with_the_llm(make_llm):
    llm = make_llm()
    deltas = llm.stream(["ab", "cd"], LONG)
    next(deltas)  # one more is waiting to be read
    llm.close()
    with pytest.raises(RuntimeError, match="LLM: this object was closed"):
        next(deltas)
    with pytest.raises(StopIteration):
        next(deltas)


def test_nothing_is_explained_after_close(make_llm):
    llm = make_llm()
    [output] = llm.generate("ab", LONG)
    llm.close()
    for look in (llm.cache.describe, llm.stats, lambda: llm.cache.explain(output.request_id)):
        with pytest.raises(RuntimeError, match="LLM: this object was closed"):
            look()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_an_ended_stream_does_not_count_as_running(bundled, end):
    deltas = bundled.stream("def f(", LONG)
    next(deltas)
    assert bundled.stats()["running"] == 1
    if end == "close":
        deltas.close()
    del deltas
    assert bundled.stats()["running"] == bundled.stats()["waiting"] == 0

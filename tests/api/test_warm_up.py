"""Compiling everything before the first request: in threads, in a good order, and no further once somebody gave up."""

from __future__ import annotations

import logging
import threading

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api.threads.questions import WarmUpProgram
from hybrid_jax.api.warm_up import warm_up
from tests.tiny_models import tiny_model


def programs(names: str, ahead_of: str = "") -> list[WarmUpProgram]:
    """A program for each letter; those in `ahead_of` can be compiled ahead, in that order."""
    return [WarmUpProgram(name, name in ahead_of, (ahead_of.find(name),)) for name in names]


def nothing(*_) -> None:
    pass


def test_what_is_compiled_ahead_runs_once_it_is_ready():
    ahead, ran, reported = [], [], []
    report = lambda done, total: reported.append((done, total))  # noqa: E731
    seconds = warm_up(programs("abcd", "cb"), ahead.append, ran.append, 2, report)
    assert set(seconds) == set("abcd") and sorted(ran) == [0, 1, 2, 3]
    assert sorted(ahead) == [1, 2] and ran[:2] == [0, 3]
    assert reported == [(n, 4) for n in range(5)]


def test_one_thread_compiles_nothing_ahead():
    ahead, ran = [], []
    warm_up(programs("abcd", "cb"), ahead.append, ran.append, 1, nothing)
    assert ran == [0, 1, 2, 3] and not ahead


def test_several_threads_compile_at_the_same_time():
    together = threading.Barrier(3, timeout=30)
    warm_up(programs("abc", "abc"), lambda index: together.wait(), nothing, 3, nothing)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_error_no_further_program_is_begun(error):
    begun, go_on = [], threading.Event()

    def ahead(index: int) -> None:
        begun.append(index)
        go_on.wait(30)

    def run(index: int) -> None:
        raise error

    with pytest.raises(error):
        warm_up(programs("Xabcdefgh", "abcdefgh"), ahead, run, 2, nothing)
    go_on.set()
    assert len(begun) <= 2


@pytest.mark.parametrize("threads", [0, -1, 1.5, "two", True])
def test_a_number_of_threads_that_is_none_is_refused(make_llm, threads):
    with pytest.raises(ValueError, match="warmup: threads must be an integer of at least 1, got"):
        make_llm().warmup(threads=threads)


def test_after_a_warm_up_in_threads_nothing_is_traced_and_every_program_was_named(caplog):
    config, params = tiny_model("bamba", "float32")
    settings = {"max_rows": 2, "prefill_tokens": 64, "max_model_len": 128, "page_tokens": 64}
    with LLM.from_params(config, params, quiet=True, **settings) as llm:
        with caplog.at_level(logging.INFO, logger="hybrid_jax.compiling"):
            seconds = llm.warmup(threads=2)
        traced = llm.stats()["num_traces"]
        named = [record.getMessage() for record in caplog.records]
        assert len(seconds) == traced == len(named)
        assert all(message.startswith("compiled ") and message.endswith(" s") for message in named)
        prompts = [{"prompt_token_ids": list(range(1, n))} for n in (5, 20, 60)]
        llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0))
        assert llm.stats()["num_traces"] == traced

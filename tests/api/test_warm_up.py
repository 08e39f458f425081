"""Compiling everything before the first request: in threads, in a good order, and no further once somebody gave up."""

from __future__ import annotations

import logging
import threading

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api.warm_up import warm_up
from hybrid_jax.engine.programs.compiling import WarmUp
from tests.tiny_models import tiny_model


def programs(names: str, run, ahead=None, ahead_of: str = "") -> list[WarmUp]:
    """A program for each letter, which `run` and `ahead` are told; those in `ahead_of` can be compiled ahead."""
    return [
        WarmUp(
            name,
            lambda name=name: run(name),
            (lambda name=name: ahead(name)) if name in ahead_of else None,
            (ahead_of.find(name),),
        )
        for name in names
    ]


def test_what_is_compiled_ahead_runs_once_it_is_ready():
    ahead, ran, reported = [], [], []
    seconds = warm_up(
        *(programs("abcd", ran.append, ahead.append, "cb"), lambda call: call(), 2),
        lambda done, total: reported.append((done, total)),
    )
    assert set(seconds) == set("abcd") and sorted(ran) == list("abcd")
    assert sorted(ahead) == ["b", "c"] and ran[:2] == ["a", "d"]
    assert reported == [(n, 4) for n in range(5)]


def test_one_thread_compiles_nothing_ahead():
    ahead, ran = [], []
    warm_up(
        programs("abcd", ran.append, ahead.append, "cb"), lambda call: call(), 1, lambda *_: None
    )
    assert ran == list("abcd") and not ahead


def test_several_threads_compile_at_the_same_time():
    together = threading.Barrier(3, timeout=30)
    found = programs("abc", lambda name: None, lambda name: together.wait(), "abc")
    warm_up(found, lambda call: call(), 3, lambda *_: None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_error_no_further_program_is_begun(error):
    begun, go_on = [], threading.Event()

    def ahead(name: str) -> None:
        begun.append(name)
        go_on.wait(30)

    def in_engine(call) -> None:
        raise error

    found = programs("Xabcdefgh", lambda name: None, ahead, "abcdefgh")
    with pytest.raises(error):
        warm_up(found, in_engine, 2, lambda *_: None)
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

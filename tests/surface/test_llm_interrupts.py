"""Calls of `LLM` that are interrupted or fail: they end alone, the next one is right, and streams lose nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.engine_thread import EngineThread
from hybrid_jax.text import IncrementalDecoder
from tests.surface.fake_engine import GREEDY, SCRIPT, texts

PARAMS = SamplingParams(max_tokens=23, logprobs=1, stop="lazy")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("device lost")])
def test_a_call_is_told_what_ended_the_engines_turn_and_the_next_one_is_right(llm, error):
    llm._engine.raises = error
    with pytest.raises(type(error)):
        llm.generate(["ab", "cd"], SamplingParams(max_tokens=100))
    assert is_idle(llm)
    assert texts(llm.generate(["ab", "cd"], GREEDY)) == [SCRIPT[:12]] * 2


def is_idle(llm):
    """Nothing is left in the engine; the question comes after all that was given up before."""
    llm.stats()
    return not llm._engine.has_work


class Watched:
    """A stream that goes on around what is interrupted; its engine works slowly enough to be there still."""

    def __init__(self, make_llm, **options):
        self.expected = list(make_llm(**options).stream("ab", PARAMS))[-1].output.outputs
        self.llm = make_llm(**options)
        self.llm._engine.pause = 0.01
        self.deltas = self.llm.stream("ab", PARAMS)
        self.found = [next(self.deltas)]

    def check(self):
        self.llm._engine.pause = 0
        found = self.found + list(self.deltas)
        assert "".join(d.text for d in found) == self.expected[0].text
        assert sum((d.token_ids for d in found), ()) == self.expected[0].token_ids
        assert sum((d.logprobs for d in found), ()) == self.expected[0].logprobs
        assert [d.finished() for d in found] == [False] * (len(found) - 1) + [True]
        assert found[-1].output.outputs == self.expected
        assert is_idle(self.llm)
        assert texts(self.llm.generate(["ab", "cd"], GREEDY)) == [SCRIPT[:12]] * 2


def press_ctrl_c(delay):
    """Soon: a real signal, which Python hands to the main thread wherever it is."""
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("call", ["generate", "stream", "feed", "stats"])
def test_ctrl_c_ends_the_call_of_the_main_thread_alone(make_llm, call, delay):
    watched = Watched(make_llm, steps_per_dispatch=1)
    llm, long = watched.llm, SamplingParams(max_tokens=190)
    with pytest.raises(KeyboardInterrupt):
        timer = press_ctrl_c(delay)
        try:
            while call == "generate":
                llm.generate(["cd", "ef"], long)
            while call == "stats":
                llm.stats()
            while call == "stream":
                list(llm.stream("cd", long))
            with llm.feed() as feed:
                while True:
                    feed.add("cd", long)
                    feed.step()
        finally:
            timer.join()
    watched.check()


class AtLine:
    """Raises KeyboardInterrupt when the given line of a function is about to run in this thread."""

    def __init__(self, function, line):
        self.code, self.line, self.raised = function.__code__, line, False

    def __call__(self, frame, event, _):
        if frame.f_code is not self.code:
            return None
        return self.trace

    def trace(self, frame, event, _):
        if event == "line" and frame.f_lineno == self.line and not self.raised:
            self.raised = True
            raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        self.old = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self.old)


@pytest.mark.parametrize("function", [LLM.generate, EngineThread.run, EngineThread.submit])
def test_an_interrupt_at_any_line_of_a_call_leaves_nothing_behind(make_llm, function):
    first = function.__code__.co_firstlineno
    lines = sorted({n for *_, n in function.__code__.co_lines() if n and n > first})
    raised = 0
    for line in lines[:-1]:  # the last line of `run` leaves, and nothing can be done about that
        watched = Watched(make_llm)
        with AtLine(function, line) as tracer:
            try:
                watched.llm.generate(["cd", "ef"], SamplingParams(max_tokens=190))
            except KeyboardInterrupt:
                raised += tracer.raised
        watched.check()
    assert raised >= 2


def test_a_text_that_cannot_be_made_ends_its_call_alone(make_llm, monkeypatch):
    watched = Watched(make_llm)
    real, made, new = IncrementalDecoder.push, IncrementalDecoder.__init__, []

    def init(self, *arguments):
        made(self, *arguments)
        new.append(self)

    def push(self, token):
        if self in new[:1]:
            raise UnicodeError("no such token")
        return real(self, token)

    with monkeypatch.context() as patch:
        patch.setattr(IncrementalDecoder, "__init__", init)
        patch.setattr(IncrementalDecoder, "push", push)
        with pytest.raises(UnicodeError, match="no such token"):
            watched.llm.generate(["cd", "ef"], SamplingParams(max_tokens=50))
    assert len(new) == 2
    watched.check()


def test_a_turn_that_fails_ends_the_calls_that_are_new(make_llm):
    watched = Watched(make_llm)
    engine = watched.llm._engine
    engine.raises_for = b"cd", RuntimeError("no memory for such a program")
    with pytest.raises(RuntimeError, match="no memory for such"):
        watched.llm.generate("cd", SamplingParams(max_tokens=50))
    engine.raises_for = None
    watched.check()


def test_whoever_still_waits_is_told_when_the_thread_ends_by_a_mistake(make_llm, monkeypatch):
    llm = make_llm()
    llm._engine.pause = 0.01
    deltas = llm.stream("ab", SamplingParams(max_tokens=190))
    next(deltas)
    monkeypatch.setattr(type(llm._engine), "has_work", property(lambda self: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        list(deltas)
    with pytest.raises(ZeroDivisionError):
        llm.generate("ab", GREEDY)
    llm.close()


def test_calls_end_when_the_llm_is_closed_in_another_thread(make_llm):
    llm = make_llm()
    llm._engine.pause = 0.02
    threading.Timer(0.1, llm.close).start()
    with pytest.raises(RuntimeError, match="LLM: this object was closed"):
        llm.generate("ab", SamplingParams(max_tokens=190))


def test_an_llm_that_nobody_holds_ends_its_thread(make_llm):
    before = {thread for thread in threading.enumerate() if thread.name == "hybrid_jax"}
    llm = make_llm()
    llm.generate("ab", GREEDY)
    [thread] = {t for t in threading.enumerate() if t.name == "hybrid_jax"} - before
    del llm
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_stream_keeps_the_llm_that_nobody_else_holds(make_llm):
    deltas = make_llm().stream("ab", SamplingParams(max_tokens=60))
    time.sleep(0.01)
    assert "".join(delta.text for delta in deltas) == (SCRIPT * 2)[:60]

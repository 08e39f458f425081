"""Calls of `LLM` that are interrupted or fail: they end alone, the next one is right, and streams lose nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api import starting
from hybrid_jax.api.feed import Feed
from hybrid_jax.api.threads.calls import Call
from hybrid_jax.api.threads.commands import Command
from hybrid_jax.api.threads.engine_thread import EngineThread
from hybrid_jax.text.incremental import IncrementalDecoder
from tests.api.fake_engine import GREEDY, SCRIPT, texts

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


@pytest.mark.parametrize(
    "function", [LLM._generate, LLM._run, EngineThread.run, EngineThread.submit]
)
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


@pytest.mark.parametrize("function", [Feed.step, EngineThread.submit])
def test_an_interrupt_at_any_line_of_a_step_loses_no_ticket(make_llm, function):
    first = function.__code__.co_firstlineno
    lines = sorted({n for *_, n in function.__code__.co_lines() if n and n > first})
    raised = 0
    for line in lines:
        llm = make_llm()
        with llm.feed() as feed:
            tickets, steps = [feed.add("cd", GREEDY), feed.add("ef", GREEDY)], 0
            with AtLine(function, line) as tracer, suppress(KeyboardInterrupt):
                feed.step()
            raised += tracer.raised
            while not all(ticket.finished for ticket in tickets):
                feed.step()
                steps += 1
                assert steps < 50, line
            assert [texts(ticket.outputs()) for ticket in tickets] == [[SCRIPT[:12]]] * 2
        assert is_idle(llm)
    assert raised >= 4


def test_a_call_in_the_engines_own_thread_is_refused_where_it_would_wait_for_itself(make_llm):
    """The garbage collector may run a __del__ there."""
    watched = Watched(make_llm)
    llm, found = watched.llm, []

    class Careless:
        def __init__(self, does):
            self.does, self.itself = does, self

        def __del__(self):
            try:
                self.does()
            except RuntimeError as error:
                found.append(str(error))

    for does in (lambda: llm.generate("ab"), llm.stats, lambda: next(llm.stream("ab"))):
        gc.collect()
        gc.disable()
        Careless(does)
        llm._thread._do(lambda _: gc.collect())
        gc.enable()
    assert len(found) == 3
    assert all("LLM: called in the engine's own thread" in message for message in found)
    watched.check()
    llm._thread._do(lambda _: llm.close())
    with pytest.raises(RuntimeError, match="this object was closed"):
        llm.generate("ab")


def test_news_that_nobody_can_be_told_of_end_one_call(make_llm):
    watched = Watched(make_llm)

    async def breaks():
        deltas = watched.llm.astream("cd", SamplingParams(max_tokens=190))
        await anext(deltas)
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe = lambda *_: 1 / 0
        time.sleep(0.1)
        del loop.call_soon_threadsafe

    asyncio.run(breaks())
    watched.check()


EXITS = """
import os, signal, threading, time
from tests.api.fake_engine import CONFIG, FakeEngine
import hybrid_jax.api.llm
import hybrid_jax.api.starting
hybrid_jax.api.starting.Engine = FakeEngine
llm = hybrid_jax.api.llm.LLM.from_params(CONFIG, {}, quiet=True)
llm._thread._loop.engine.pause = 60  # like a program that takes a minute to compile
llm._thread.submit([hybrid_jax.api.llm.Call(llm._intake.jobs([65], None))])
time.sleep(0.2)
timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
timer.daemon = True
timer.start()
print("waits")
"""


POOL = """
import os, signal, threading, time
from hybrid_jax.process.ending import pool_of_threads
pool = pool_of_threads(1, "compiles")
pool.submit(time.sleep, 60)
pool.submit(print, "never")
timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
timer.daemon = True
timer.start()
print("waits")
"""


@pytest.mark.parametrize("program", [EXITS, POOL], ids=["a turn", "a program beside it"])
def test_ctrl_c_ends_a_program_that_waits_at_its_end(program):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "waits\n", "")


def test_ctrl_c_in_a_with_block_does_not_wait_for_the_turn(make_llm):
    llm = make_llm()
    llm._engine.pause = 1.5  # like a program that takes long to compile
    thread = llm._thread._thread
    with pytest.raises(KeyboardInterrupt), llm:
        llm._thread.submit([Call(llm._intake.jobs([65], None))])
        time.sleep(0.2)
        raise KeyboardInterrupt
    assert thread.is_alive() and llm._thread.closed
    thread.join(20)
    assert not thread.is_alive()


def test_a_new_llm_waits_for_the_memory_of_one_that_was_dropped(make_llm, monkeypatch):
    llm = make_llm()
    engine, freed = llm._engine, []
    monkeypatch.setattr(engine, "close", lambda: freed.append(time.sleep(0.2)))
    del llm
    choose = starting.choose_engine_config

    def asked(*args, **options):
        freed.append("asked")
        return choose(*args, **options)

    monkeypatch.setattr(starting, "choose_engine_config", asked)
    make_llm()
    assert freed == [None, "asked"]


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


def test_each_caller_gets_an_error_of_its_own(make_llm):
    llm = make_llm()
    feed, other = llm.feed(), llm.feed()
    llm._engine.raises_for = b"cd", RuntimeError("device lost")
    tickets = [feed.add("cd", GREEDY), other.add("cd", GREEDY)]
    errors = []
    for each in (feed, other):
        with pytest.raises(RuntimeError, match="device lost") as raised:
            each.step()
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert "raises_for" in str(raised.traceback[-1].statement)  # where the engine failed
    with pytest.raises(RuntimeError, match="device lost"):
        tickets[0].outputs()


def test_what_finished_beside_a_ticket_that_failed_is_not_lost(make_llm):
    llm = make_llm()
    with llm.feed() as feed:
        tickets = [feed.add(prompt, GREEDY) for prompt in ("ab", "cd")]
        step = llm._engine.step

        def ends_one():
            results = step()
            llm._thread._loop.end_call(tickets[1], RuntimeError("lost"), engine_failed=True)
            return results

        llm._engine.step = ends_one
        with pytest.raises(RuntimeError, match="lost"):
            while True:
                assert feed.step() == []
        llm._engine.step = step
        found = []
        while not found:
            found = feed.step()
    assert found == tickets[:1] and texts(tickets[0].outputs()) == [SCRIPT[:12]]


def test_an_engine_that_fails_when_prompts_are_added_has_failed(make_llm, monkeypatch):
    llm = make_llm()

    def fails(request):
        raise RuntimeError("no memory for a new arena")

    monkeypatch.setattr(llm._engine, "add", fails)
    with llm.feed() as feed:
        feed.add("ab", GREEDY)
        with pytest.raises(RuntimeError, match="no memory for a new arena"):
            feed.step()


def test_questions_do_not_keep_the_engine_from_its_turns(make_llm):
    """While one is answered the next is asked, so there is always one."""
    llm = make_llm(steps_per_dispatch=1)
    done, asked = threading.Event(), []

    def asks():
        while not done.is_set():
            asked.append(llm._thread._do(lambda _: time.sleep(0.005)))

    threads = [threading.Thread(target=asks, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    call = threading.Thread(target=llm.generate, args=("ab", GREEDY), daemon=True)
    call.start()
    call.join(timeout=20)
    done.set()
    assert not call.is_alive() and asked
    for thread in threads:
        thread.join()


def test_a_mistake_in_a_command_harms_no_other_call(make_llm):
    watched = Watched(make_llm)
    told = []
    watched.llm._thread._loop.give(Command(lambda: 1 / 0, told.append))
    watched.check()
    assert [type(error) for error in told] == [ZeroDivisionError]


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


def test_calls_end_when_the_llm_is_closed_in_another_thread(make_llm, monkeypatch):
    llm = make_llm()
    step = llm._engine.step
    closes = threading.Thread(target=llm.close)

    def closing():
        if not closes.ident:
            closes.start()
            while not llm._thread.closed:
                time.sleep(0.001)
        return step()

    monkeypatch.setattr(llm._engine, "step", closing)
    with pytest.raises(RuntimeError, match="LLM: this object was closed"):
        llm.generate("ab", SamplingParams(max_tokens=190))
    closes.join()


@pytest.mark.parametrize("failed", ["nothing", "a turn", "a question", "a prompt"])
def test_an_llm_that_nobody_holds_ends_its_thread(make_llm, failed):
    before = {thread for thread in threading.enumerate() if thread.name == "hybrid_jax"}
    llm = make_llm()
    llm.generate("ab", GREEDY)
    if failed == "a turn":
        llm._engine.raises_for = b"cd", RuntimeError("device lost")
        with pytest.raises(RuntimeError, match="device lost"):
            llm.generate("cd")
    elif failed == "a question":
        with pytest.raises(ZeroDivisionError):
            llm._thread._do(lambda _: 1 / 0)
    elif failed == "a prompt":
        with pytest.raises(ValueError, match="prompt 0: the engine refuses byte 255"):
            llm.generate({"prompt_token_ids": [255]})
    [thread] = {t for t in threading.enumerate() if t.name == "hybrid_jax"} - before
    del llm
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_stream_keeps_the_llm_that_nobody_else_holds(make_llm):
    deltas = make_llm().stream("ab", SamplingParams(max_tokens=60))
    time.sleep(0.01)
    assert "".join(delta.text for delta in deltas) == (SCRIPT * 2)[:60]

"""The thread that has an engine compute. Others send it commands, and each call gets news through its own queue."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from hybrid_jax.api.threads.call_loop import CallLoop
from hybrid_jax.api.threads.calls import Call, about_calls, own_error
from hybrid_jax.api.threads.commands import Command
from hybrid_jax.api.threads.front import Front
from hybrid_jax.api.threads.loop import Loop, settled
from hybrid_jax.api.threads.questions import Answer, Question
from hybrid_jax.config.mesh import MeshShape
from hybrid_jax.process.ending import wait_for
from hybrid_jax.schedule.request import Request

# The one that made an engine's thread, and with it jax's own threads.
_first_process: int | None = None
# Threads of dropped objects that still hold memory. The set belongs to the process, as the memory does.
_ending: set[threading.Thread] = set()


class EngineThread(Front):
    """An engine and its thread, as the threads that use it see it.

    The thread ends with `close`, with this object, or with the program.

    Args:
        loop: what the thread runs. If it leads to this object, as that of one of several replicas does, whoever drops
            this object must call `close` first, because the thread holds the loop while it runs.
    """

    def __init__(self, loop: CallLoop) -> None:
        global _first_process
        _first_process = _first_process or os.getpid()
        super().__init__(loop.facts)
        self._loop = loop
        self._thread = threading.Thread(target=loop.run, name="hybrid_jax", daemon=True)
        self._thread.start()
        # The garbage collector may drop this object in any thread, so that must not wait. Only the thread may hold the
        # loop, while it runs: a loop, or the error that ended it, may lead to this object.
        weakref.finalize(self, _drop, weakref.ref(self._loop), self._thread).atexit = False
        # What is registered later runs earlier: before jax closes its devices.
        self._loop.at_exit = functools.partial(_join_at_exit, self._loop, self._thread)
        atexit.register(self._loop.at_exit)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller's thread is the engine's."""
        return threading.current_thread() is self._thread

    @property
    def mesh(self) -> MeshShape:
        """One engine."""
        return MeshShape(tp=self._facts.engine_config.tp)

    @property
    def is_stepped(self) -> bool:
        """It is."""
        return True

    @property
    def compile_seconds(self) -> float:
        """Seconds of compiling so far; any thread may ask, also after `close`."""
        return self._loop.compile_seconds()

    def runs(self, loop: CallLoop) -> bool:
        """Whether it is the thread of this loop."""
        return self._loop is loop

    def submit(self, calls: Sequence[Call]) -> None:
        """Starts calls together, before the engine's next turn. Each must be ended with `leave`, whatever happens."""
        self._check_caller()
        compile_s = self.compile_seconds
        for call in calls:
            for job in call.jobs:
                job.arrive(compile_s)
        self.begin(calls)

    def begin(self, calls: Sequence[Call]) -> None:
        """As `submit`, for prompts that have arrived already. Any thread may do it, even after `close`."""

        def cancel(error: BaseException) -> None:
            for call in calls:
                call.lost(error, engine_failed=False)

        start = functools.partial(self._loop.start, calls)
        self._loop.give(Command(start, cancel, about=functools.partial(about_calls, calls)))

    def give_back(self, call: Call) -> None:
        """As `CallLoop.give_back`, soon. If the loop has ended, `Call.kept` is told, and perhaps `Call.lost`."""
        give_back = functools.partial(self._loop.give_back, call)
        self._loop.give(Command(give_back, lambda error: call.kept()))

    def leave(self, call: Call) -> None:
        """Ends a call unless it is over. Returns at once, so any thread may do it at any time."""
        if not call.over:
            end = functools.partial(self._loop.end_call, call)
            about = lambda: "" if call.over else f"the end of {about_calls([call])}"
            self._loop.give(Command(end, about=about))

    def ask(self, question: Question[Answer], *args: Any) -> Answer:
        """Has the engine answer a question, between two turns unless that is not needed; see `api.questions`.

        Returns or raises what the question does.
        """
        if not isinstance(question, Question):
            raise TypeError(f"ask: takes a question of api.questions, got {question!r}")
        if question.at_once:
            # An engine elsewhere answers through the thread.
            self._check_caller() if self._loop.where else self.check()
            return self._loop.now(question, args)
        return self._do(functools.partial(Loop.now, question=question, args=args))

    def _do(self, call: Callable[[Loop], Answer]) -> Answer:
        """Has the engine's loop make a call between two turns; returns or raises what it does."""
        self._check_caller()
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.later(call, lambda answer, error: answers.put((answer, error)))
        answer, error = answers.get()
        if error is not None:
            raise own_error(error)
        return answer

    def later(
        self, call: Callable[[Loop], Answer], tell: Callable[[Any, BaseException | None], object]
    ) -> None:
        """As `CallLoop.later`."""
        self._loop.later(call, tell)

    def compute_prefix(
        self, request: Request, promise: str, told: Callable[[BaseException | None], object]
    ) -> None:
        """As `CallLoop.compute_prefix`."""
        self._loop.give(
            Command(functools.partial(self._loop.compute_prefix, request, promise, told), told)
        )

    def drop_prefix(self, request_id: str) -> None:
        """As `CallLoop.drop_prefix`."""
        self._loop.give(Command(functools.partial(self._loop.drop_prefix, request_id)))

    def promise(self, tokens: np.ndarray, position: int) -> None:
        """As `CallLoop.promise`."""
        self._loop.give(Command(functools.partial(self._loop.promise, tokens, position)))

    def take_back(self, name: str) -> None:
        """As `CallLoop.take_back`."""
        self._loop.give(Command(functools.partial(self._loop.take_back, name)))

    def bring_part(self, name: str, found: Any) -> None:
        """As `CallLoop.bring_part`."""
        self._loop.give(Command(functools.partial(self._loop.bring_part, name, found)))

    def end_promise(self, name: str, state: str) -> None:
        """As `CallLoop.end_promise`."""
        self._loop.give(Command(functools.partial(self._loop.end_promise, name, state)))

    def turn(self) -> None:
        """Has the engine take one turn, for calls that are `stepped`, and waits for it."""
        self._do(Loop.turn)

    def settle(self) -> None:
        """Has the engine end what nobody waits for, so that its counters and its cache are up to date."""
        self._do(settled)

    def close(self, *, wait: bool = True) -> None:
        """Ends what still runs, closes the engine, and waits until that is done, or has it done soon."""
        self.closed = True
        if os.getpid() != self._pid:
            return
        if not wait:
            _drop(weakref.ref(self._loop), self._thread)
            return
        self.stop()
        if not self.is_own_thread:
            self.join()

    def stop(self) -> None:
        """Has the thread end after the engine's turn."""
        self._loop.stop()

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()


def check_process() -> None:
    """RuntimeError in a fork of a process that has run an engine, because jax would wait there for ever."""
    if _first_process not in (None, os.getpid()):
        raise RuntimeError(
            f"LLM: this process ({os.getpid()}) is a fork of process {_first_process}, which has used an LLM, and jax "
            "does not work in a fork; start workers by multiprocessing.get_context('spawn')"
        )


def _join_at_exit(loop: CallLoop, thread: threading.Thread) -> None:
    """Ends the thread with the program, and waits for that."""
    loop.stop()
    wait_for([thread])


def _drop(loop: weakref.ref[CallLoop], thread: threading.Thread) -> None:
    """Has the thread of a dropped object end soon."""
    _ending.add(thread)
    if (running := loop()) is not None:
        running.stop()


def wait_for_dropped(timeout: float) -> None:
    """Waits until dropped objects have freed their memory, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    for thread in list(_ending):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
        if not thread.is_alive():
            _ending.discard(thread)

"""What callers see of whatever computes: they give it calls, and wait for their news."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from typing import Any

from hybrid_jax.api.completions import Job
from hybrid_jax.api.outputs import Delta
from hybrid_jax.api.threads.calls import CLOSED, Call, News, own_error
from hybrid_jax.api.threads.questions import Answer, EngineFacts, Question
from hybrid_jax.config.mesh import MeshShape

MAX_WAITING = (
    16_384  # streams for `async for` without a token; nothing else limits how many there are
)


class Front(ABC):
    """Runs calls, whoever computes them. Any thread may use it.

    Attributes:
        closed: `close` was called.
    """

    closed: bool

    def __init__(self, facts: EngineFacts) -> None:
        self.closed = False
        self._facts, self._pid = facts, os.getpid()
        self._waiting: set[Call] = set()  # calls of `adeltas` without a token

    @property
    def facts(self) -> EngineFacts:
        """What never changes about the engine. For anything else use `ask`."""
        self.check()
        return self._facts

    def check(self) -> None:
        """RuntimeError if nothing can run: after `close`, and in a fork of the process that made this object."""
        if self.closed:
            raise RuntimeError(CLOSED)
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"LLM: made in process {self._pid}, of which this one ({os.getpid()}) is a fork: it has neither the "
                "engine's thread nor its device; start workers by multiprocessing.get_context('spawn') and make the "
                "LLM inside them"
            )

    def _check_caller(self) -> None:
        """As `check`. Also RuntimeError in a thread of its own."""
        self.check()
        if self.is_own_thread:
            raise RuntimeError(
                "LLM: called in the engine's own thread, where it would wait for itself: the garbage collector ran a "
                "__del__, or the finally of a generator, that calls the LLM; close such objects yourself"
            )

    @property
    @abstractmethod
    def is_own_thread(self) -> bool:
        """Whether the caller's thread is one that it has started."""

    @property
    @abstractmethod
    def mesh(self) -> MeshShape:
        """How many engines there are now, and devices of each."""

    @property
    def where(self) -> str:
        """Where engines are, in words, if they are not in this process."""
        return ""

    @property
    def is_stepped(self) -> bool:
        """Whether all that runs is one engine, which may wait for `turn`. Several go at their own pace."""
        return False

    @abstractmethod
    def submit(self, calls: Sequence[Call]) -> None:
        """Starts calls together, before the engine's next turn. Each must be ended with `leave`, whatever happens."""

    @abstractmethod
    def leave(self, call: Call) -> None:
        """Ends a call unless it is over. Returns at once, so any thread may do it at any time."""

    @abstractmethod
    def ask(self, question: Question[Answer], *args: Any) -> Answer:
        """Has the engine answer a question, between two turns unless that is not needed; see `api.threads.questions`.

        Returns or raises what the question does.
        """

    @abstractmethod
    def turn(self) -> None:
        """Has the engine take one turn, for calls that are `stepped`, and waits for it."""

    @abstractmethod
    def settle(self) -> None:
        """Has the engine end what nobody waits for, so that its counters and its cache are up to date."""

    @abstractmethod
    def close(self, *, wait: bool = True) -> None:
        """Ends what still runs, closes the engine, and waits until that is done, or has it done soon."""

    def run(self, call: Call) -> Generator[News, None, None]:
        """Runs a call and yields its news. Closing the generator ends the call.

        Raises:
            RuntimeError: the LLM was closed. Any other error that ended the call before its prompts were done.
        """
        try:
            self.submit([call])
            while True:
                self.check()
                news = call.news.get()
                if news.error is not None:
                    raise own_error(news.error)
                yield news
                if news.over:
                    return
        finally:
            self.leave(call)

    def deltas(self, jobs: list[Job]) -> Generator[Delta, None, None]:
        """Runs prompts and yields their deltas as they come. Closing the generator ends the prompts."""
        with closing(self.run(Call(jobs, streams=True))) as all_news:
            for news in all_news:
                for delta in news.deltas:
                    self.check()
                    yield delta

    async def adeltas(
        self, make: Callable[[], list[Job]], pool: Executor | None
    ) -> AsyncGenerator[Delta, None]:
        """`deltas` for `async for`. Other tasks go on while `make` makes the jobs in a thread of the pool.

        Raises:
            RuntimeError: as `deltas`, or too many other calls wait for their first token.
        """
        self.check()
        if len(self._waiting) >= MAX_WAITING:
            raise RuntimeError(
                f"LLM: {len(self._waiting)} streams wait for their first token, the most that may; begin more once "
                "some of them have one, as an asyncio.Semaphore does"
            )
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[News] = asyncio.Queue()

        def send(news: News) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, news)

        call = Call([], send=send, streams=True)
        self._waiting.add(call)
        try:
            call.jobs = await loop.run_in_executor(pool, make)
            self.submit([call])
            while True:
                news = await arrived.get()
                self._waiting.discard(call)
                if news.error is not None:
                    raise own_error(news.error)
                for delta in news.deltas:
                    self.check()
                    yield delta
                if news.over:
                    return
        finally:
            self._waiting.discard(call)
            self.leave(call)

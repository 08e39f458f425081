"""Progress where stderr is a file or a pipe: a plain line now and then, so that a log shows that work goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from hybrid_jax.process.streams import say

SPARSE = 30.0  # seconds between two lines of the process, and before the first one about a call
LONG_COMPILING = 1.0  # seconds; a program that is loaded from disk takes less


class Timed(Protocol):
    """What a line may be about. Its text is the line."""

    @property
    def since(self) -> float:
        """When it began, by the clock of the lines."""


@dataclass
class Work:
    """A long call.

    Attributes:
        what: it does.
        since: when it began. first: what was done by then.
        done, total: so far, and in all; the total is None while it is unknown.
        clock: tells the time.
    """

    what: str
    since: float
    first: float = 0
    done: float = 0
    total: float | None = None
    clock: Callable[[], float] = time.monotonic

    def report(self, done: float, total: float) -> None:
        """Takes a note of how far it is. Any thread may call this."""
        self.done, self.total = done, total

    def __str__(self) -> str:
        """As "generating: 34/200, 0.55/s, 1:02 elapsed, 5:02 left"."""
        elapsed = self.clock() - self.since
        parts = [] if self.total is None else [f"{self.done:.0f}/{self.total:.0f}"]
        rate = (self.done - self.first) / elapsed if elapsed > 0 else 0.0
        if rate > 0:
            parts.append(f"{rate:.3g}/s")
        parts.append(f"{duration(elapsed)} elapsed")
        if rate > 0 and self.total is not None:
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        return f"{self.what}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Seconds as minutes and seconds, with hours if there are any.

    Example:
        >>> duration(62.4), duration(3723)
        ('1:02', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class PlainLines:
    """The lines of one process. They tell of the latest call, and of what is being compiled. Threads share it.

    Args:
        repeat: calls a function again and again in another thread, and returns what stops that.
        clock: tells the time.
        write: writes a line.
    """

    def __init__(
        self,
        repeat: Callable[[Callable[[], object]], Callable[[], object]],
        *,
        clock: Callable[[], float] = lambda: time.monotonic(),
        write: Callable[[str], object] = say,
    ) -> None:
        self._repeat, self._clock, self._write = repeat, clock, write
        # With the seconds before its first line. The latest one is the last.
        self._shown: list[tuple[Timed, float]] = []
        self._stop: Callable[[], object] = lambda: None
        self._last: float | None = None  # when a line was written
        self._lock = threading.RLock()  # the first look comes while the watch begins

    @property
    def used(self) -> bool:
        """Whether lines tell of something."""
        return bool(self._shown)

    @contextmanager
    def about(
        self, what: str, *, done: float = 0, total: float | None = None, after: float = SPARSE
    ) -> Iterator[Work]:
        """Inside, lines tell of a call.

        Args:
            what: it does. done, total: at its beginning.
            after: seconds before its first line.
        """
        work = Work(what, self._clock(), done, done, total, self._clock)
        end = self.show(work, after)
        try:
            yield work
        finally:
            end()

    def show(self, thing: Timed, after: float) -> Callable[[], object]:
        """Has lines tell of something, `after` seconds from its beginning on; returns what ends that."""
        entry = thing, after
        with self._lock:
            self._shown.append(entry)
            if len(self._shown) == 1:
                self._stop = self._repeat(self.look)

        def end() -> None:
            with self._lock:
                self._shown.remove(entry)
                stop = (lambda: None) if self._shown else self._stop
            stop()  # which waits for a look

        return end

    def look(self) -> None:
        """Writes a line if it is time for one."""
        now = self._clock()
        with self._lock:
            if self._last is not None and now - self._last < SPARSE:
                return
            due = [str(thing) for thing, after in self._shown if now - thing.since >= after]
            if due:
                self._last = now
        if due:
            self._write("; ".join(due[-2:]))

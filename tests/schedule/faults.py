"""Memory that is refused where a test says: every call that asks for some is watched, and told by where it stands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

from hybrid_jax.cache.pools.frames import FrameAllocator, OutOfFrames
from hybrid_jax.cache.pools.slots import OutOfSlots, SlotTable
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.schedule.admission import Admission
from hybrid_jax.schedule.memory import Memory
from hybrid_jax.schedule.scheduler import Scheduler
from hybrid_jax.schedule.turn import Turn

ROOM = {(Memory, "make_room"): "room"}
ALLOCATIONS = ROOM | {
    (RadixTree, "make_room"): "eviction",
    (FrameAllocator, "allocate"): "frames",
    (SlotTable, "allocate"): "slot",
}
# A second hold takes nothing from the pools; these are all that preempting and finishing ask for.
EVERYTHING = ALLOCATIONS | {
    (FrameAllocator, "retain"): "holds on frames",
    (SlotTable, "retain"): "hold on slot",
}
ERRORS = (OutOfFrames, OutOfSlots, MemoryError)
REASON = "refused by the test"
Answer = Callable[[object, int], bool]

WORK = (
    Scheduler.add,
    Admission.admit,
    Admission.fork,
    Turn.chunk,
    Turn.decode,
    Turn.finish,
    Scheduler._preempt,
    Scheduler._finish,
    Scheduler.receive,
    Scheduler.restarted,
    Scheduler.abort,
)
WORK_NAMES = {method.__code__: method.__name__.lstrip("_") for method in WORK}
PARTS = {
    method.__code__: method.__name__
    for method in vars(Memory).values()
    if hasattr(method, "__code__") and method.__name__ not in ("make_room", "_take", "_start")
}


class Faults:
    """Notes every call that asks for memory, and refuses some.

    Args:
        watched: the calls, with a word for each: `ROOM`, `ALLOCATIONS` or `EVERYTHING`.
        answer: (pool, number of the call) -> what a refused call returns, if it does.
        refuse: numbers of the calls to refuse, counted from 0.

    Attributes:
        sites: of every call so far, as "work: part of `Memory` > what it asked for".
        num_refused: calls refused so far.
    """

    def __init__(self, watched: dict, answer: Answer | None = None, refuse: range = range(0)):
        self.watched, self.answer, self.refuse = watched, answer, refuse
        self.sites: list[str] = []
        self.num_refused = 0
        self._answering = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[Faults]:
        with contextlib.ExitStack() as stack:
            for (pool, name), word in self.watched.items():
                asking = self._asking(getattr(pool, name), word)
                stack.enter_context(mock.patch.object(pool, name, asking))
            yield self

    def _asking(self, real: Callable, word: str) -> Callable:
        def asking(pool, *args, **kwargs):
            if self._answering:
                return real(pool, *args, **kwargs)
            number = len(self.sites)
            self.sites.append(f"{_place()} > {word}")
            if number not in self.refuse:
                return real(pool, *args, **kwargs)
            self.num_refused += 1
            self._answering = True
            try:
                return self.answer(pool, number)
            finally:
                self._answering = False

        return asking


def _place() -> str:
    """What the scheduler is doing, and the part of `Memory` that it does it with, from the callers."""
    frame, part = sys._getframe(2), "nothing"
    while frame.f_code not in WORK_NAMES:
        part = PARTS.get(frame.f_code, part)
        frame = frame.f_back
    return f"{WORK_NAMES[frame.f_code]}: {part}"


def say_no(memory: Memory, number: int) -> bool:
    """There is no room, for once."""
    return False


def say_no_when_empty(memory: Memory, number: int) -> bool:
    """There is no room although all that can be evicted is gone."""
    if memory.tree is not None:
        memory.tree.make_room(memory.frames.num_frames)
    return False


def fail(pool: object, number: int) -> bool:
    """The pool, or the machine, is out of memory."""
    raise ERRORS[number % len(ERRORS)](REASON)


def is_ours(error: Exception) -> bool:
    return error.args == (REASON,)

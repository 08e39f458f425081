"""A link to a worker in an actor."""

from __future__ import annotations

import heapq
import os
import threading
from collections import defaultdict, deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from hybrid_jax.api.workers.link import Link, WorkerLost
from hybrid_jax.api.workers.process import FORCED, share_processors
from hybrid_jax.worker.serving import Worker

AHEAD = 2  # answers that are asked for before they are there, so that one is always waited for
Numbered = tuple[int, bytes]


class _InOrder:
    """Frames in the order of their numbers. Calls of an actor with several threads may come in another one."""

    def __init__(self) -> None:
        self._early: list[Numbered] = []
        self._next = 0

    def add(self, number: int, frame: bytes) -> list[bytes]:
        """Takes a frame, and returns those that are due; one that came before comes again, for `Frames` to find out."""
        if number < self._next:
            return [frame]
        heapq.heappush(self._early, (number, frame))
        due = []
        while self._early and self._early[0][0] == self._next:
            due.append(heapq.heappop(self._early)[1])
            self._next += 1
        return due


class _Stored(Link):
    """An end whose parts stay in Ray's object store.

    A reference does not travel inside of a frame, where Ray would not see it, but beside one: with the next that is
    sent. In the frame stands its name.
    """

    def __init__(self) -> None:
        self._leaving: SimpleQueue[ray.ObjectRef] = SimpleQueue()
        self._come: dict[str, list[ray.ObjectRef]] = defaultdict(list)

    def store(self, part: bytes) -> ray.ObjectRef:
        """As `Link.store`."""
        try:
            return ray.put(part)
        except RayError as error:  # it is full
            raise OSError(str(error)) from error

    def read(self, found: ray.ObjectRef) -> bytes:
        """As `Link.read`. Ray brings it from the machine that has it."""
        try:
            part: bytes = ray.get(found)
        except RayError as error:
            raise OSError(str(error)) from error
        return part

    def enclose(self, found: ray.ObjectRef) -> str:
        """As `Link.enclose`."""
        self._leaving.put(found)
        return str(found.hex())

    def disclose(self, enclosed: str) -> ray.ObjectRef:
        """As `Link.disclose`."""
        found = self._come[enclosed].pop()
        if not self._come[enclosed]:
            del self._come[enclosed]
        return found

    def along(self) -> list[ray.ObjectRef]:
        """The references that go with the next frame."""
        return [self._leaving.get() for _ in range(self._leaving.qsize())]

    def came(self, references: list[ray.ObjectRef]) -> None:
        """Takes those that came with a frame, before its messages are read."""
        for found in references:
            self._come[found.hex()].append(found)


class _SeatLink(_Stored):
    """The worker's end."""

    about = "the caller"

    def __init__(self) -> None:
        super().__init__()
        self.incoming: SimpleQueue[bytes] = SimpleQueue()
        self.outgoing: SimpleQueue[tuple[bytes | None, list[ray.ObjectRef]]] = SimpleQueue()

    def send(self, frame: bytes) -> None:
        self.outgoing.put((frame, self.along()))

    def receive(self, within: float | None = None) -> bytes:
        try:
            return self.incoming.get(timeout=within)
        except Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """The actor is ended by who made it."""

    def kill(self) -> None:
        """The actor is ended by who made it."""


class Seat:
    """What an actor is whose worker serves the process that made the actor. See `RayLink` for its methods."""

    def __init__(self) -> None:
        self._link, self._order = _SeatLink(), _InOrder()
        self._numbers, self._lock = 0, threading.Lock()

    def where(self) -> tuple[str, str, int, bool]:
        """The node's id and address, the process, and whether it has a GPU."""
        context = ray.get_runtime_context()
        gpus = bool(context.get_accelerator_ids().get("GPU"))
        return context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), gpus

    def begin(self, number: int, count: int) -> None:
        """Starts the worker, which is one of so many on its node that have no GPU; 0 if it has one."""
        if count:
            share_processors(number, count)
        threading.Thread(target=self._run, name="hybrid_jax-worker", daemon=True).start()

    def _run(self) -> None:
        try:
            Worker(self._link).run()
        finally:
            self._link.outgoing.put((None, []))

    @ray.method(concurrency_group="put")
    def put(self, number: int, frame: bytes, along: list[ray.ObjectRef]) -> None:
        """Takes a frame, and references that go with it."""
        self._link.came(along)
        with self._lock:
            for due in self._order.add(number, frame):
                self._link.incoming.put(due)

    @ray.method(concurrency_group="take")
    def take(self) -> tuple[int, bytes | None, list[ray.ObjectRef]]:
        """Waits for the next frame, and returns its number, the frame, None at the end, and what goes along."""
        frame, along = self._link.outgoing.get()
        number, self._numbers = self._numbers, self._numbers + 1
        return number, frame, along


# `put` and `take` have a thread each, and `take` waits in its own. Ray's types leave the argument out.
SeatActor = ray.remote(concurrency_groups={"put": 1, "take": 1})(Seat)  # type: ignore[call-overload]


class RayLink(_Stored):
    """The caller's end.

    Args:
        seat: the actor.
        number: of the worker.
    """

    where = "actors of Ray"

    def __init__(self, seat: Any, number: int) -> None:
        super().__init__()
        self._seat, self.number = seat, number
        self.about = f"worker {number}"
        self.node, self._has_gpu = "", False
        self._sent, self._order = 0, _InOrder()
        self._asked: deque[Any] = deque()
        self._arrived: deque[bytes] = deque()
        self._why = ""
        self._over = threading.Event()  # nothing more will come

    def place(self, timeout: float | None = None) -> bool:
        """Waits until Ray has placed the actor; False if that takes longer than `timeout` seconds.

        Raises:
            RayError: it has ended.
        """
        try:
            self.node, address, process, self._has_gpu = ray.get(
                self._seat.where.remote(), timeout=timeout
            )
        except GetTimeoutError:
            return False
        self.about = f"worker {self.number} (process {process} on {address})"
        return True

    def begin(self, number: int, count: int) -> None:
        """Starts the worker, which is the `number`-th of `count` on its node."""
        self.sharing = count
        try:
            ray.get(self._seat.begin.remote(number, 0 if self._has_gpu else count))
        except RayError as error:
            raise WorkerLost(f"LLM: {self.about} did not start: {error}") from error
        for _ in range(AHEAD):
            self._asked.append(self._seat.take.remote())

    def send(self, frame: bytes) -> None:
        """As `Link.send`. If nobody is there, `receive` finds that out."""
        try:
            self._seat.put.remote(self._sent, frame, self.along())
        except RayError as error:
            raise OSError(str(error)) from error
        self._sent += 1

    def receive(self, within: float | None = None) -> bytes:
        """As `Link.receive`."""
        while not self._arrived:
            try:
                asked = self._asked[0]
                # Only what is made is brought here, however long that takes.
                if not ray.wait([asked], timeout=within, fetch_local=False)[0]:
                    raise TimeoutError
                number, frame, along = ray.get(asked)
                self._asked.popleft()
            except (RayError, IndexError) as error:
                self._why = str(error).strip().splitlines()[0] if str(error) else repr(error)
                self._over.set()
                raise EOFError from error
            if frame is None:
                self._over.set()
                raise EOFError
            self.came(along)
            self._asked.append(self._seat.take.remote())
            self._arrived += self._order.add(number, frame)
        return self._arrived.popleft()

    def close(self) -> None:
        """As `Link.close`. What still comes is received meanwhile."""
        self._over.wait(FORCED)
        self.kill()

    def kill(self) -> None:
        """As `Link.kill`."""
        self._over.set()
        with suppress(Exception):  # Ray may have been shut down
            ray.kill(self._seat)

    def why_lost(self) -> str:
        """What Ray says of it."""
        return self._why or "its actor has ended"

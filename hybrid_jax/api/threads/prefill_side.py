"""Replicas that only compute prompts, as the thread sees them that decides who gets which prompt."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hybrid_jax.api.completions import Job
from hybrid_jax.api.threads.engine_thread import EngineThread
from hybrid_jax.cluster.prefill import comes_from_elsewhere, prefix_request
from hybrid_jax.cluster.router import Router
from hybrid_jax.tiers.hand_over import HandOver
from hybrid_jax.tiers.part_file import Part

# Tokens after which a prompt's pages are copied, while those after them are computed. What is copied after the last
# chunk is waited for.
MOST_CHUNK = 2048
LEAST = 128  # tokens that a replica lacks; fewer it computes itself, beside its decode steps


@dataclass(frozen=True, kw_only=True)
class Travelling(Part):
    """A part on its way between processes.

    Attributes:
        found: as its file would be, or what leads to that (`Link.store`).
    """

    marks: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    found: Any


class Forwarding:
    """Brings parts of promises to replicas in other processes that wait for them, as soon as they come.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[str, ...]] = {}  # of each promise
        self._to: dict[str, list[EngineThread]] = defaultdict(list)  # who waits for each promise

    def begin(self, hand_over: HandOver, name: str, to: EngineThread) -> None:
        """A replica waits for a promise from now on."""
        promise = hand_over.known(name)
        with self._lock:
            has = self._wanted_by(to)
            self._to[name].append(to)
            if promise is not None:
                self._parts[name] = tuple(promise.parts)
                for part in promise.parts:
                    if part in hand_over.folder and part not in has:
                        self._send(to, part, hand_over.folder.read(part, {}))
        if promise is None or promise.state != "coming":
            to.end_promise(name, "failed" if promise is None else promise.state)

    def end(self, name: str, to: EngineThread) -> None:
        """A replica waits no longer."""
        with self._lock:
            self._to[name].remove(to)
            if not self._to[name]:
                del self._to[name]
                self._parts.pop(name, None)

    def came(self, name: str, part: Part) -> None:
        """A part has come."""
        with self._lock:
            waiting = [
                to for n, parts in self._parts.items() if name in parts for to in self._to[n]
            ]
            for to in dict.fromkeys(waiting):
                self._send(to, name, part)

    def _wanted_by(self, to: EngineThread) -> set[str]:
        """The parts of all promises that a replica waits for. It keeps a part as long as one of them has it."""
        own = (n for n, waiting in self._to.items() if to in waiting)
        return {part for name in own for part in self._parts.get(name, ())}

    def _send(self, to: EngineThread, name: str, part: Part) -> None:
        assert isinstance(part, Travelling), part
        to.bring_part(name, part.found)

    def ended(self, name: str, state: str) -> None:
        """A promise was kept or broken."""
        with self._lock:
            waiting = list(self._to.get(name, ()))
        for to in waiting:
            to.end_promise(name, state)


class _Asked(NamedTuple):
    """A prompt that is computed for another replica.

    Attributes:
        name: of its promise. by: the replica that computes it. to: the one that waits. request_id: of the former, and
            in the router.
    """

    name: str
    by: EngineThread
    to: EngineThread
    request_id: str


class PrefillSide:
    """Has prompts computed, and handed over to the replicas that go on from them.

    Args:
        hand_over: between both sides.
        router: chooses among the replicas that compute prompts.
        grain: the larger one of both sides. chunk: tokens of a chunk of a prompt.
        forwarding: brings parts to replicas in other processes; None where all engines share the hand-over.

    Attributes:
        threads: those of all replicas. The dispatcher sets it.
    """

    def __init__(
        self,
        hand_over: HandOver,
        router: Router,
        *,
        grain: int,
        chunk: int,
        forwarding: Forwarding | None = None,
    ) -> None:
        self._hand_over, self._router, self._grain = hand_over, router, grain
        self._chunk = min(chunk, MOST_CHUNK)
        self._forwarding, self._own = forwarding, frozenset(router.present)
        self.threads: Sequence[EngineThread] = ()
        self._asked: dict[str, _Asked] = {}
        self._numbers = itertools.count()

    @property
    def num_promises(self) -> int:
        """Prompts that were asked for, and of which nobody has said that they are there or not wanted any more."""
        return len(self._asked)

    def ask(self, owner: str, job: Job, hit_len: int, to: EngineThread) -> None:
        """Has a prompt computed for a replica that is about to get it.

        Args:
            owner: the router's name of it. job: with the prompt.
            hit_len: tokens that the replica has itself. to: the replica.
        """
        request = next(iter(job.unfinished)).request
        position = comes_from_elsewhere(request, self._grain)
        if position - hit_len < LEAST or not self._router.present:
            return
        tokens = np.asarray(request.tokens, np.int32)
        request_id = f"for {owner}, {next(self._numbers)}"
        by = self.threads[self._router.choose(request_id, tokens[: position + 1]).replica]
        name = self._hand_over.promise(tokens, position)
        self._asked[owner] = _Asked(name, by, to, request_id)
        for end in (by, to):
            end.promise(tokens, position)
        if self._forwarding is not None:
            self._forwarding.begin(self._hand_over, name, to)
        asked = prefix_request(request, position, self._chunk, request_id)
        by.compute_prefix(asked, name, functools.partial(self._ended, owner, request_id))

    def _ended(self, owner: str, request_id: str, error: BaseException | None) -> None:
        """In any thread: all that is to come of a prompt is on its way, or will not come.

        The owner may ask for another one by now.
        """
        self._router.ended(request_id)
        asked = self._asked.get(owner)
        if error is not None and asked is not None and asked.request_id == request_id:
            self._hand_over.fail(asked.name)  # the replica has ended, or takes no such prompt

    def let_go(self, owner: str) -> None:
        """A replica has what it asked for, or asks no more. Unknown owners are ignored."""
        asked = self._asked.pop(owner, None)
        if asked is None:
            return
        self._router.ended(asked.request_id)
        if self._forwarding is not None:
            self._forwarding.end(asked.name, asked.to)
        self._hand_over.take_back(asked.name)
        for end in (asked.by, asked.to):
            end.take_back(asked.name)
        asked.by.drop_prefix(asked.request_id)

    def gone(self, replica: int) -> None:
        """A replica has ended: what it was to bring will not come."""
        self._router.leave(replica)
        for asked in self._asked.values():
            if asked.by is self.threads[replica]:
                self._hand_over.fail(asked.name)

    def back(self, replica: int) -> bool:
        """A replica is there again; returns whether it is one of this side."""
        if replica in self._own:
            self._router.join(replica)
        return replica in self._own

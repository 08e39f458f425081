"""Replicas that only compute prompts, as the thread sees them that decides who gets which prompt."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybrid_jax.api.completions import Job
from hybrid_jax.api.threads.engine_thread import EngineThread
from hybrid_jax.api.threads.loop import Loop
from hybrid_jax.cluster.prefill import comes_from_elsewhere, prefix_request
from hybrid_jax.cluster.router import Router
from hybrid_jax.tiers.hand_over import HandOver, Sender

LEAST = 128  # tokens that a replica lacks; fewer it computes itself, beside its decode steps


class _Asked(NamedTuple):
    """A prompt that is computed for another replica.

    Attributes:
        name: of its promise. replica: that computes it. request_id: there.
    """

    name: str
    replica: int
    request_id: str


class PrefillSide:
    """Has prompts computed, and handed over to the replicas that go on from them.

    Args:
        hand_over: between both sides.
        router: chooses among the replicas that compute prompts.
        grain: the larger one of both sides. chunk: tokens of a chunk of a prompt.

    Attributes:
        threads: those of all replicas. The dispatcher sets it.
    """

    def __init__(self, hand_over: HandOver, router: Router, *, grain: int, chunk: int) -> None:
        self._hand_over, self._router, self._grain, self._chunk = hand_over, router, grain, chunk
        self.threads: Sequence[EngineThread] = ()
        self._asked: dict[str, _Asked] = {}
        self._numbers = itertools.count()

    @property
    def num_promises(self) -> int:
        """Prompts that were asked for, and of which nobody has said that they are there or not wanted any more."""
        return len(self._asked)

    def ask(self, owner: str, job: Job, hit_len: int) -> None:
        """Has a prompt computed for a replica that is about to get it.

        Args:
            owner: the router's name of it. job: with the prompt.
            hit_len: tokens that the replica has itself.
        """
        request = next(iter(job.unfinished)).request
        position = comes_from_elsewhere(request, self._grain)
        if position - hit_len < LEAST or not self._router.present:
            return
        tokens = np.asarray(request.tokens, np.int32)
        replica = self._router.choose(owner, tokens[: position + 1]).replica
        request_id = f"for {owner}, {next(self._numbers)}"
        name = self._hand_over.promise(tokens, position)
        self._asked[owner] = _Asked(name, replica, request_id)
        asked = prefix_request(request, position, self._chunk, request_id)

        def begin(loop: Loop) -> None:
            loop.compute_prefix(asked, functools.partial(self._ended, loop, owner, name))

        def told(_: None, error: BaseException | None) -> None:
            if error is not None:  # the replica has ended, or takes no such prompt
                self._router.ended(owner)
                self._hand_over.fail(name)

        self.threads[replica].later(begin, told)

    def _ended(self, loop: Loop, owner: str, name: str) -> None:
        """In the thread of a replica: all that is to come of a prompt is on its way."""
        self._router.ended(owner)
        assert isinstance(loop.engine.disk, Sender), loop.engine.disk
        loop.engine.disk.settle(name)

    def let_go(self, owner: str) -> None:
        """A replica has what it asked for, or asks no more. Unknown owners are ignored."""
        asked = self._asked.pop(owner, None)
        if asked is None:
            return
        self._router.ended(owner)
        self._hand_over.take_back(asked.name)
        drop = lambda loop: loop.drop_prefix(asked.request_id)
        self.threads[asked.replica].later(drop, lambda *_: None)

    def gone(self, replica: int) -> None:
        """A replica has ended: what it was to bring will not come."""
        self._router.leave(replica)
        for asked in self._asked.values():
            if asked.replica == replica:
                self._hand_over.fail(asked.name)

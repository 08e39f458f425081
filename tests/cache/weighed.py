"""A simulated cache whose `adaptive` is asked for every victim whether nothing else was worth less."""

from __future__ import annotations

import math
from bisect import bisect_right

import pytest

from hybrid_jax.cache.policy.adaptive import SAVINGS_EXPONENT, STEPS_PER_OCTAVE, Adaptive
from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.policy.value import freed_bytes, saved_tokens
from hybrid_jax.cache.tree.node import Node
from hybrid_jax.costs import Costs

COSTS = {
    "hybrid": Costs(flops_per_token=10, flops_per_key=2, kv_bytes=1, checkpoint_bytes=10),
    "attention": Costs(flops_per_token=10, flops_per_key=2, kv_bytes=1, checkpoint_bytes=0),
    "recurrent": Costs(flops_per_token=10, flops_per_key=2, kv_bytes=0, checkpoint_bytes=10),
}


class CheckedAdaptive(Adaptive):
    """Looks at all candidates whenever one goes.

    Attributes:
        tree: whose candidates it orders, once it is made.
        victims: points of those that went.
    """

    def __init__(self, costs: Costs):
        super().__init__(costs)
        self.victims = []

    def key(self, node: Node) -> tuple[int, int, int]:
        """Class, step of age, and rounded savings per byte, from scratch."""
        level = round(
            STEPS_PER_OCTAVE * math.log2(saved_tokens(node) / max(1, freed_bytes(node, self.costs)))
        )
        if node.note is None:
            return 0, 0, level
        points = self.points
        since, steps = node.note.since, points.tables.steps
        return node.note.life_class, bisect_right(steps, 1 + (points._clock - since)) - 1, level

    def score(self, node: Node) -> float:
        life_class, step, level = self.key(node)
        ratio = 2 ** (level / STEPS_PER_OCTAVE)
        return ratio**SAVINGS_EXPONENT * self.points.tables.index[life_class, step]

    def pop(self) -> Node | None:
        candidates = [
            n for n in self.tree.root.walk() if self.tree.arena.candidates._where(n) is not None
        ]
        scores = {node: self.score(node) for node in candidates}
        victim = super().pop()
        if victim is None:
            assert not candidates
        else:
            assert scores[victim] == pytest.approx(min(scores.values()), rel=1e-9)
            self.victims.append(victim.note)
        return victim

    def check(self) -> None:
        """Every candidate is in its queue, and nothing is kept of nodes that left the tree."""
        self.catch_up()
        nodes = set(self.tree.root.walk())
        assert set(self.candidates) <= nodes
        for node, row in self.candidates.items():
            assert self._keys[row] == self.key(node) and node in self._members[row]
        assert sum(map(len, self._members)) == len(self.candidates)
        assert {key for key, row in self._rows.items() if self._members[row]} == set(self._rows)
        for row, members in enumerate(self._members):
            assert math.isinf(self._values[row]) == (not members) == (row in self._free)


def checked(kind: str, capacity: int, *, history: int = 10**6, grain: int = 1) -> SimulatedCache:
    """A cache of this kind of model, and its policy as `cache.tree.policy`."""
    order = CheckedAdaptive(COSTS[kind])
    cache = SimulatedCache(COSTS[kind], capacity, order, grain=grain, history_tokens=history)
    order.tree = cache.tree
    return cache

"""FLOP-aware eviction: S(n) = recency(n) + alpha * flop_efficiency(n) (Marconi, arXiv 2411.19379, equation 2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hybrid_jax.cache.policy.value import freed_bytes, saved_flops, saved_tokens
from hybrid_jax.cache.tree.eviction import EvictionPolicy, LeastRecentlyUsed, OrderedCandidates
from hybrid_jax.cache.tree.node import ARENA, Node
from hybrid_jax.costs import Costs

STEPS_PER_OCTAVE = 64  # efficiencies are rounded to 1 %


class FlopAware(EvictionPolicy):
    """The node with the least S(n) goes first.

    Recency is 1 / (time since the last use) on the tree's clock, efficiency the FLOPs spared relative to the nearest
    checkpoint above per byte really freed; both are scaled to [0, 1] over the candidates. Efficiencies are rounded
    to 1/64 of an octave: of equally efficient nodes the one used longest ago goes first, so that a victim is
    found among one node per efficiency, however many nodes there are.

    Args:
        alpha: weight of the efficiency; 0 is least recently used.
        costs: of the model.
        efficiency: FLOPs per byte of a node in a tier; `own_edge_efficiency` when None.

    Raises:
        ValueError: a negative alpha.
    """

    def __init__(
        self,
        alpha: float,
        costs: Costs,
        *,
        efficiency: Callable[[Node, Costs, int], float] | None = None,
    ):
        if not (alpha >= 0 and math.isfinite(alpha)):
            raise ValueError(f"FlopAware: alpha must be a number of at least 0, got {alpha}")
        self.alpha, self.costs = alpha, costs
        self.efficiency = own_edge_efficiency if efficiency is None else efficiency
        self.candidates: dict[Node, int] = {}  # the place of their level
        self._newest = OrderedCandidates(key=lambda node: -node.last_use)
        self._clock = 0
        # Per level, in the order of first use: its nodes, its efficiency, and the last use of its first node (inf for
        # an empty level).
        self._places: dict[int, int] = {}
        self._levels: list[LeastRecentlyUsed] = []
        self._values = np.zeros(64)
        self._uses = np.full(64, np.inf)
        self._outdated: set[int] = set()  # places of levels whose first node may be another one now

    def with_alpha(self, alpha: float) -> FlopAware:
        """The same policy with another weight, empty."""
        return FlopAware(alpha, self.costs, efficiency=self.efficiency)

    def again(self) -> FlopAware:
        return self.with_alpha(self.alpha)

    def add(self, node: Node) -> None:
        level = self._level(node)
        place, old = self._places.get(level), self.candidates.get(node)
        if place is None:
            place = self._new_level(level)
        if old is not None and old != place:
            self._take(node, old)
        self.candidates[node] = place
        self._levels[place].add(node)
        self._newest.add(node)
        self._outdated.add(place)
        self._clock = max(self._clock, node.last_use)

    def _level(self, node: Node) -> int:
        value = self.efficiency(node, self.costs, self.tier)
        return round(STEPS_PER_OCTAVE * math.log2(value)) if value > 0 else -(1 << 16)

    def _new_level(self, level: int) -> int:
        place = self._places[level] = len(self._levels)
        self._levels.append(LeastRecentlyUsed())
        if place == len(self._values):
            self._values = np.concatenate((self._values, np.zeros(place)))
            self._uses = np.concatenate((self._uses, np.full(place, np.inf)))
        self._values[place] = 2.0 ** (level / STEPS_PER_OCTAVE)
        return place

    def discard(self, node: Node) -> None:
        place = self.candidates.pop(node, None)
        if place is not None:
            self._take(node, place)
            self._newest.discard(node)

    def _take(self, node: Node, place: int) -> None:
        self._levels[place].discard(node)
        self._outdated.add(place)

    def pop(self) -> Node | None:
        newest = self._newest.first()
        if newest is None:
            return None
        for place in self._outdated:
            first = self._levels[place].first()
            self._uses[place] = np.inf if first is None else first.last_use
        self._outdated.clear()
        filled = np.flatnonzero(self._uses < np.inf)
        uses, values = self._uses[filled], self._values[filled]
        now = self._clock + 1
        recency = 1.0 / (now - uses)
        scores = _scaled(recency, recency.min(), 1.0 / (now - newest.last_use))
        scores = scores + self.alpha * _scaled(values, values.min(), values.max())
        best = np.flatnonzero(scores == scores.min())
        place = int(filled[best[np.argmin(uses[best])]])
        node = self._levels[place].first()
        assert node is not None, "flop_aware: the chosen level is empty"
        self.discard(node)
        return node


def own_edge_efficiency(node: Node, costs: Costs, tier: int = ARENA) -> float:
    """FLOPs spared beyond the resume point above, per byte that goes with the node: the paper's definition."""
    return saved_flops(node, costs, tier) / max(1, freed_bytes(node, costs, tier))


def whole_prefix_efficiency(node: Node, costs: Costs, tier: int = ARENA) -> float:
    """The same FLOPs per byte of checkpoint and KV of the *whole* prefix: as the published code computes it.

    The slip in its feed-forward term is left out; it changes hit rates by less than half a point.
    """
    return saved_flops(node, costs, tier) / max(1, costs.prefix_bytes(node.end))


def replay_length(node: Node, costs: Costs, tier: int = ARENA) -> float:
    """Tokens to replay from the nearest resume point above if the node goes: SegLen's stand-in for the efficiency.

    It knows neither FLOPs nor bytes (abdelfattah-lab.github.io/blogs/seglen, for SGLang's tree).
    """
    return saved_tokens(node, tier)


def _scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return (values - low) / (high - low) if high > low else np.ones_like(values)

"""Caches by the names that `simulate --policy` knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hybrid_jax.cache.policy.flop_aware import (
    FlopAware,
    own_edge_efficiency,
    whole_prefix_efficiency,
)
from hybrid_jax.cache.policy.simulated import Outcome, SimulatedCache
from hybrid_jax.cache.policy.table import TUNED, make_policy
from hybrid_jax.cache.policy.tuner import AlphaTuner
from hybrid_jax.cache.tree.eviction import EvictionPolicy, LeastRecentlyUsed
from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.blocks import BlockCache
from hybrid_jax.sim.prefix_cache.clairvoyant import Clairvoyant
from hybrid_jax.sim.prefix_cache.traces import TraceRequest

HISTORY_TOKENS = 1 << 22
HISTORY_SHARE = 0.001  # of the cache's bytes

NAMES = {
    "none": "no cache",
    "vllm": "blocks of 32 tokens, a state for each, least recently used goes first",
    "sglang": "checkpoints at branch points and ends; of whole paths the ends go, least recently used first",
    "lru": "the same checkpoints; any with at most one child goes, least recently used first",
    "marconi": "FLOP-aware eviction as the paper reads, alpha tuned by replaying a window",
    "marconi-code": "FLOP-aware eviction as the published code computes it, alpha tuned the same way",
    "adaptive": "what has the least to gain goes first, by reuse as learned from what was asked",
    "optimal": "knows what will be asked: a lower bound of what can be reached",
    "infinite": "the longest prefix that any earlier request shares: no cache can hit more",
}

FIXED = {"alpha": own_edge_efficiency, "alpha-code": whole_prefix_efficiency}


class Cache(Protocol):
    """What a simulation runs a trace through."""

    @property
    def peak(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    @property
    def alpha(self) -> float | None: ...

    def request(self, prompt: np.ndarray, whole: np.ndarray) -> Outcome: ...


def make_cache(
    policy: str, costs: Costs, capacity: int, trace: Sequence[TraceRequest], *, grain: int = 1
) -> Cache:
    """The cache of one policy, empty.

    Args:
        policy: one of NAMES, or "alpha:X" for FLOP-aware eviction with a fixed weight, "alpha-code:X" as the
            published code computes it.
        costs: of the model.
        capacity: bytes.
        trace: what it will be asked; a policy that knows the future reads it.
        grain: tokens between resume points.

    Raises:
        ValueError: no such policy, a bad alpha, or a capacity below one checkpoint.
    """
    least = least_capacity(costs)
    if policy not in ("none", "infinite") and capacity < least:
        raise ValueError(
            f"simulate: capacity must hold one checkpoint, {least} bytes at least, got {capacity}"
        )
    name, _, value = policy.partition(":")
    if policy == "none":
        return NoCache()
    if policy == "infinite":
        return LongestPrefix()
    if policy == "vllm":
        return BlockCache(costs, capacity)

    def simulated(order: EvictionPolicy) -> Counted:
        return Counted(costs, capacity, order, grain=grain)

    if policy == "optimal":
        order = Clairvoyant(trace, costs)
        return Counted(costs, capacity, order, grain=grain, history_tokens=1 << 40)
    if policy == "adaptive":
        order, known = make_policy(policy, costs), history_tokens(capacity)
        return Counted(costs, capacity, order, grain=grain, history_tokens=known)
    if policy in TUNED:
        order = make_policy(policy, costs)
        return Tuned(simulated(order), AlphaTuner(order, simulated))
    if policy in ("sglang", "lru"):
        return simulated(make_policy(policy, costs))
    if name in FIXED and value:
        return simulated(FlopAware(_number(value), costs, efficiency=FIXED[name]))
    raise ValueError(
        f"simulate: no policy {policy!r}; known are {', '.join(NAMES)}, and alpha:X or "
        "alpha-code:X with a number X"
    )


def least_capacity(costs: Costs) -> int:
    """Bytes that a cache needs to hold anything."""
    return max(costs.checkpoint_bytes, costs.kv_bytes)


def history_tokens(capacity: int) -> int:
    """Tokens to know beyond those that are cached: a flat number would be fewer than a large cache holds itself."""
    return max(HISTORY_TOKENS, int(HISTORY_SHARE * capacity) // 4)


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"simulate: alpha must be a number of at least 0, got {value!r}") from None


class Counted(SimulatedCache):
    """A simulated cache that tells what a simulation reports."""

    alpha: float | None = None

    @property
    def peak(self) -> int:
        return self.budget.peak


class Tuned:
    """A cache whose alpha is tuned on the way."""

    def __init__(self, cache: Counted, tuner: AlphaTuner):
        self._cache, self._tuner = cache, tuner
        self._policy: FlopAware = tuner.policy

    @property
    def peak(self) -> int:
        return self._cache.peak

    @property
    def evictions(self) -> int:
        return self._cache.evictions

    @property
    def alpha(self) -> float:
        return self._policy.alpha

    def request(self, prompt: np.ndarray, whole: np.ndarray) -> Outcome:
        outcome = self._cache.request(prompt, whole)
        self._tuner.observe(prompt, whole, evictions=self.evictions)
        return outcome


class NoCache:
    """Computes everything."""

    peak = evictions = 0
    alpha: float | None = None

    def request(self, prompt: np.ndarray, whole: np.ndarray) -> Outcome:
        return Outcome(num_tokens=len(prompt), hit_len=0, match_len=0, cached_len=0, stored=False)


class LongestPrefix:
    """Resumes wherever any earlier prompt or output went, however far: the bound on what can be hit."""

    evictions = 0
    alpha: float | None = None

    def __init__(self) -> None:
        free = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=0)
        self._cache = Counted(free, 1 << 62, LeastRecentlyUsed())

    @property
    def peak(self) -> int:
        return 0

    def request(self, prompt: np.ndarray, whole: np.ndarray) -> Outcome:
        return self._cache.request(prompt, whole)

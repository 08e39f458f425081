"""Caches by the names that `simulate --policy` knows.

- none: no cache.
- vllm: blocks of 32 tokens, a state for each, least recently used goes first.
- sglang: checkpoints at branch points and ends; of whole paths the ends go, least recently used first.
- lru: the same checkpoints; any with at most one child goes, least recently used first.
- marconi: FLOP-aware eviction as the paper reads, alpha tuned by replaying the first requests.
- marconi-code: FLOP-aware eviction as the published code computes it, alpha tuned the same way.
- seglen: replay length to the nearest checkpoint above and recency, 0.85 to 0.15, as SegLen weighs them.
- adaptive: what has the least to gain goes first, by reuse as learned from what was asked.
- optimal: knows what will be asked: a lower bound of what can be reached.
- placed: knows what will be asked, and leaves a sequence's checkpoints, one or two, where that wants them.
- infinite: the longest prefix that any earlier request shares: no cache can hit more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from hybrid_jax.byte_sizes import at_least
from hybrid_jax.cache.policy.flop_aware import (
    FlopAware,
    own_edge_efficiency,
    replay_length,
    whole_prefix_efficiency,
)
from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.policy.table import TUNED, make_policy
from hybrid_jax.cache.policy.tuner import AlphaTuner
from hybrid_jax.cache.tree.eviction import EvictionPolicy, LeastRecentlyUsed
from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.clairvoyant import Clairvoyant
from hybrid_jax.sim.prefix_cache.placement import best_positions, later_overlaps
from hybrid_jax.sim.prefix_cache.traces import TraceRequest

BLOCK_TOKENS = 32
HISTORY_TOKENS = 1 << 22
ALL_TOKENS = 1 << 40
HISTORY_SHARE = 0.001  # of the cache's bytes
PLACED = 2  # checkpoints of a sequence, no more than a policy that learns leaves
SEGLEN_WEIGHT = 0.85  # of the replay length; the rest is recency's

NAMES = (
    *("none", "vllm", "sglang", "lru", "marconi", "marconi-code", "seglen", "adaptive"),
    *("optimal", "placed", "infinite"),
)
FIXED = {"alpha": own_edge_efficiency, "alpha-code": whole_prefix_efficiency}


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
            f"simulate: capacity must hold one checkpoint, {at_least(least, capacity)}"
        )
    if policy == "none":
        return NoCache()
    if policy == "infinite":
        return LongestPrefix()
    if policy == "vllm":
        return BlockCache(costs, capacity)
    if policy in TUNED:
        tuned = make_policy(policy, costs)
        assert isinstance(tuned, FlopAware), "only a weight of FLOPs is tuned"
        return Tuned(costs, capacity, tuned, grain=grain)

    if policy == "placed":
        return Placed(costs, capacity, trace, grain=grain)

    known = 0  # tokens, beyond those that are cached
    order: EvictionPolicy
    name, _, value = policy.partition(":")
    if policy == "optimal":
        order, known = Clairvoyant(trace, costs), ALL_TOKENS
    elif policy == "seglen":
        weight = SEGLEN_WEIGHT / (1 - SEGLEN_WEIGHT)
        order = FlopAware(weight, costs, efficiency=replay_length)
    elif name in FIXED and value:
        order = FlopAware(_number(value), costs, efficiency=FIXED[name])
    elif policy in NAMES:
        order = make_policy(policy, costs)
        if policy == "adaptive":  # a flat number would be fewer than a large cache holds itself
            known = max(HISTORY_TOKENS, int(HISTORY_SHARE * capacity) // 4)
    else:
        raise ValueError(
            f"simulate: no policy {policy!r}; known are {', '.join(NAMES)}, and alpha:X or "
            "alpha-code:X with a number X"
        )
    return Simulated(costs, capacity, order, grain=grain, history_tokens=known)


def least_capacity(costs: Costs) -> int:
    """Bytes that a cache needs to hold anything."""
    return max(costs.checkpoint_bytes, costs.kv_bytes)


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"simulate: alpha must be a number of at least 0, got {value!r}") from None


class Simulated(SimulatedCache):
    """A simulated cache that tells what a simulation reports."""

    @property
    def alpha(self) -> float | None:
        """The weight of FLOPs over recency, where it is tuned."""
        return None

    @property
    def peak(self) -> int:
        """Most bytes that were ever used."""
        return self.budget.peak


class Tuned(Simulated):
    """A cache whose alpha is tuned on the way."""

    def __init__(self, costs: Costs, capacity: int, policy: FlopAware, *, grain: int):
        super().__init__(costs, capacity, policy, grain=grain)
        replay = lambda policy: SimulatedCache(costs, capacity, policy, grain=grain)
        self._tuner = AlphaTuner(policy, replay)

    @property
    def alpha(self) -> float:
        """The weight of FLOPs over recency; 0 until it is tuned."""
        return self._tuner.policy.alpha

    def request(self, prompt: np.ndarray, whole: np.ndarray) -> int:
        hit_len = super().request(prompt, whole)
        self._tuner.observe(prompt, whole, evictions=self.evictions)
        return hit_len


class Placed(Simulated):
    """The clairvoyant's cache, whose sequences leave their checkpoints where they spare later prompts most.

    `optimal` knows what to evict, but leaves checkpoints as every policy does: a shared prefix gets one with its
    second prompt, so that the third is the first to use it. Here the first leaves it.

    Args:
        costs: of the model. capacity: bytes. trace: what it will be asked. grain: tokens between resume points.
    """

    def __init__(
        self, costs: Costs, capacity: int, trace: Sequence[TraceRequest], *, grain: int = 1
    ):
        order = Clairvoyant(trace, costs)
        super().__init__(costs, capacity, order, grain=grain, history_tokens=ALL_TOKENS)
        self._overlaps = iter(later_overlaps(trace))

    def request(self, prompt: np.ndarray, whole: np.ndarray) -> int:
        self._shared = next(self._overlaps)
        return super().request(prompt, whole)

    def wanted(self, hit_len: int, branch: int, last: int) -> list[int]:
        if not self.costs.checkpoint_bytes:
            return [last]
        return best_positions(self._shared, PLACED, start=hit_len, grain=self.grain)


class NoCache:
    """Computes everything."""

    peak = evictions = 0
    alpha: float | None = None

    def request(self, prompt: np.ndarray, whole: np.ndarray) -> int:
        """Nothing is ever hit."""
        return 0


class LongestPrefix(Simulated):
    """Resumes wherever any earlier prompt or output went, however far: the bound on what can be hit."""

    peak = 0

    def __init__(self) -> None:
        free = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=0)
        super().__init__(free, 1 << 62, LeastRecentlyUsed())


class BlockCache:
    """Blocks of some tokens, each with its KV and the recurrent state at its end; LRU goes first.

    This is how vLLM caches hybrids when told to keep every block. A block is known by its own tokens and all before
    it. Of a sequence the last blocks are used first, so they go first; a request that does not fit stores its
    beginning.

    Args:
        costs: bytes of a token and of a checkpoint.
        capacity: bytes, never exceeded.
        block_tokens: of one block.

    Attributes:
        reused, resumed: names of the blocks whose KV some later request hit, and whose state one resumed from.
    """

    alpha: float | None = None

    def __init__(self, costs: Costs, capacity: int, *, block_tokens: int = BLOCK_TOKENS):
        self.capacity, self.block_tokens = capacity, block_tokens
        self._block_bytes = costs.checkpoint_bytes + block_tokens * costs.kv_bytes
        self._most = capacity // self._block_bytes
        # Names; what was used last stands last.
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._names: dict[tuple[int, bytes], int] = {}  # (name of the block before, tokens) -> name
        self.evictions = self.peak = 0
        self.reused: set[int] = set()
        self.resumed: set[int] = set()

    @property
    def num_known(self) -> int:
        """Different blocks seen so far, cached now or not."""
        return len(self._names)

    def request(self, prompt: np.ndarray, whole: np.ndarray) -> int:
        """Hits leading blocks of the prompt, and stores those of the whole."""
        names = self._path(whole)
        limit = (len(prompt) - 1) // self.block_tokens
        hits = 0
        while hits < min(limit, len(names)) and names[hits] in self._blocks:
            hits += 1
        self.reused.update(names[:hits])
        self.resumed.update(names[hits - 1 : hits])
        kept = names[: self._most]
        for name in kept:
            self._blocks.pop(name, None)
        while len(self._blocks) + len(kept) > self._most:
            self._blocks.popitem(last=False)
            self.evictions += 1
        self._blocks.update(dict.fromkeys(reversed(kept)))
        self.peak = max(self.peak, len(self._blocks) * self._block_bytes)
        return hits * self.block_tokens

    def _path(self, tokens: np.ndarray) -> list[int]:
        names, name, size = [], 0, self.block_tokens
        for start in range(0, len(tokens) - size + 1, size):
            key = (name, tokens[start : start + size].tobytes())
            name = self._names.setdefault(key, len(self._names) + 1)
            names.append(name)
        return names


Cache = Simulated | NoCache | BlockCache  # what a simulation runs a trace through

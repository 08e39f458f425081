"""Eviction policies by the names that configurations and the command line know."""

from __future__ import annotations

from hybrid_jax.cache.policy.adaptive import Adaptive
from hybrid_jax.cache.policy.flop_aware import (
    FlopAware,
    own_edge_efficiency,
    whole_prefix_efficiency,
)
from hybrid_jax.cache.tree.eviction import EvictionPolicy, LeastRecentlyUsed
from hybrid_jax.config import fixed_alpha
from hybrid_jax.costs import Costs

# Alpha is found by replays: see `tuner`.
TUNED = {"marconi": own_edge_efficiency, "marconi-code": whole_prefix_efficiency}


def make_policy(name: str, costs: Costs) -> EvictionPolicy:
    """An empty candidate set of one policy.

    Args:
        name: "lru", "sglang", "marconi", "marconi-code", "adaptive", or "alpha:X"; `CacheConfig` says what they are.
        costs: of the model.

    Raises:
        ValueError: no such policy, or a bad alpha.
    """
    if name in ("lru", "sglang"):
        return LeastRecentlyUsed(leaves_only=name == "sglang")
    if name in TUNED:
        return FlopAware(0.0, costs, efficiency=TUNED[name])
    if name == "adaptive":
        return Adaptive(costs)
    alpha = fixed_alpha(name)
    if alpha is None:
        raise ValueError(f"eviction: no policy {name!r}")
    return FlopAware(alpha, costs)

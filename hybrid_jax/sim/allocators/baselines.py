"""Allocators by the names that `pool-sim --allocator` knows."""

from __future__ import annotations

import re
from collections.abc import Callable

from hybrid_jax.sim.allocators.avmp import Avmp
from hybrid_jax.sim.allocators.fixed_dual import FixedDual
from hybrid_jax.sim.allocators.padded import PaddedUnified
from hybrid_jax.sim.allocators.pool_geometry import PoolGeometry
from hybrid_jax.sim.allocators.pools import Allocator

HALF = 0.5
SGLANG_SHARE = 0.9 / 1.9  # SGLang's ratio of 0.9 is states over KV, not states over all

NAMES = {
    "padded_unified": "one pool, every page as large as a state",
    "fixed_dual_mrXX": "two pools, states get the share X.X: mr05 is 0.5, mr0474 is 0.474",
    "fixed_dual:X": "the same, with the share X; avmp_static:X as well",
    "fixed_dual_sglang": "the same, with the share that SGLang's ratio of 0.9 means, 0.9 / 1.9",
    "avmp_static_mrXX": "AVMP without rebalancing, with its share as above",
    "avmp_dynamic_bN": "AVMP from one half each; a rebalance moves N units of the pool that gives",
}
EXAMPLES = "fixed_dual_mr05, fixed_dual_mr09, avmp_static_mr05, avmp_dynamic_b128"
SHARE = re.compile(r"(fixed_dual|avmp_static)(?:_mr([0-9]{2,9})|:([0-9]*\.?[0-9]{1,9}))")
BATCH = re.compile(r"avmp_dynamic_b([1-9][0-9]{0,8})")


def make_allocator(name: str, geometry: PoolGeometry, pool_bytes: int) -> Allocator:
    """The allocator of one name, empty.

    Raises:
        ValueError: no such allocator, or a split that leaves one kind without memory.
    """
    return _maker(name)(geometry, pool_bytes)


def _maker(name: str) -> Callable[[PoolGeometry, int], Allocator]:
    if name == "padded_unified":
        return PaddedUnified
    if name == "fixed_dual_sglang":
        return _split(FixedDual, name, SGLANG_SHARE)
    if match := BATCH.fullmatch(name):
        batch = int(match[1])
        return _split(lambda *sizes: Avmp(*sizes, batch=batch), name, HALF)
    if match := SHARE.fullmatch(name):
        share = parse_share(name, match)
        return _split(FixedDual if match[1] == "fixed_dual" else Avmp, name, share)
    raise ValueError(
        f"pool-sim: no allocator {name!r}; known are {', '.join(NAMES)}, as in {EXAMPLES}"
    )


def parse_share(name: str, match: re.Match) -> float:
    """The share of states in a name that `SHARE` matches.

    Raises:
        ValueError: it leaves nothing for one kind.
    """
    share = float(match[3] or f"{match[2][0]}.{match[2][1:]}")
    if not 0 < share < 1:
        raise ValueError(
            f"pool-sim: {name}: the share of states must lie between 0 and 1, got {share:g}"
        )
    return share


def _split(make: Callable, name: str, share: float) -> Callable[[PoolGeometry, int], Allocator]:
    def made(geometry: PoolGeometry, pool_bytes: int) -> Allocator:
        allocator = make(geometry, pool_bytes, share)
        for pool, what in zip(allocator.pools, ("KV page", "state"), strict=True):
            if not pool.num_units:
                raise ValueError(
                    f"pool-sim: {name} must leave room for one {what} of {pool.unit_bytes} bytes, "
                    f"got a share of {share:g} of {pool_bytes} bytes for states"
                )
        return allocator

    return made

"""Allocators by the names that `pool-sim --allocator` knows, and runs of them.

In both modes:

- padded_unified: one pool, every page as large as a state.
- fixed_dual_mrXX: two pools, states get the share X.X: mr05 is 0.5, mr0474 is 0.474.
- fixed_dual:X: the same, with the share X; avmp_static:X as well.
- fixed_dual_sglang: the same, with the share that SGLang's ratio of 0.9 means, 0.9 / 1.9.
- avmp_static_mrXX: AVMP without rebalancing, with its share as above.
- avmp_dynamic_bN: AVMP from one half each; a rebalance moves N units of the pool that gives.

In honest mode also:

- frames: the engine's: equal frames, one free list; its rings beside the pool.
- frames:N: the same, rings and tables of N rows within the pool, and no more rows than that.
- frames_rings, frames_records, frames_raw: studies: rings in frames of the pool, as `rings_in_frames` says.
- ideal: bytes that flow, KV by pages of 16 tokens; ideal:N by N tokens.
- vllm_big_block: attention blocks as large as a layer's state.
- superblocks:SIZE: blocks of one size, each for one kind while in use.
- two_ended: KV from one end, states from the other, moved where they meet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.pools.engine_frames import EngineFrames, SchedulerRun
from benchmarks.pools.loads import PoolLoad
from benchmarks.pools.model_sizes import LayerSizes, ModelSizes
from benchmarks.pools.published import Avmp, FixedDual, PaddedUnified
from benchmarks.pools.rivals import (
    RING_KINDS,
    Amounts,
    AvmpMemory,
    QueueRun,
    Superblocks,
    TwoEnded,
    fixed_dual,
    ideal,
    padded_unified,
    rings_in_frames,
    vllm_big_block,
)
from benchmarks.pools.ticks import TickResult, TickRun
from hybrid_jax.byte_sizes import parse_size
from hybrid_jax.config import MAX_GRAIN

SGLANG_SHARE = 0.9 / 1.9  # SGLang's ratio of 0.9 is states over KV, not states over all
LEAST_BLOCK = 1 << 20

PAPER_NAMES = (
    *("padded_unified", "fixed_dual_mrXX", "fixed_dual:X", "fixed_dual_sglang"),
    *("avmp_static_mrXX", "avmp_dynamic_bN"),
)
HONEST_NAMES = (
    *("frames", "frames:N", "frames_rings", "frames_records", "frames_raw"),
    *("ideal", "vllm_big_block", "superblocks:SIZE", "two_ended"),
    *PAPER_NAMES,
)
PAPER_EXAMPLES = "fixed_dual_mr05, fixed_dual_mr09, avmp_static_mr05, avmp_dynamic_b128"
EXAMPLES = "frames, frames:64, frames:64@8, frames_rings@16, fixed_dual_mr05, avmp_dynamic_b128, superblocks:16MiB"
SHARE = re.compile(r"(fixed_dual|avmp_static)(?:_mr([0-9]{2,9})|:([0-9]*\.?[0-9]{1,9}))")
BATCH = re.compile(r"avmp_dynamic_b([1-9][0-9]{0,8})")
NUMBER = r"[1-9][0-9]{0,5}"
IDEAL = re.compile(rf"ideal(?::({NUMBER}))?")
# The ring's length after an @, else the engine's default.
FRAMES = re.compile(rf"frames(?:_({'|'.join(RING_KINDS)})|:({NUMBER}))?(?:@([0-9]{{1,6}}))?")
SUPERBLOCKS = "superblocks:"


def make_published(name: str, layers: LayerSizes, pool_bytes: int) -> FixedDual:
    """The allocator of one name in paper mode, empty.

    Raises:
        ValueError: no such allocator, or a split that leaves one kind without memory.
    """
    if name == "padded_unified":
        return PaddedUnified(layers, pool_bytes)
    kind, share, batch = _split(name, PAPER_NAMES, PAPER_EXAMPLES)
    made = (
        FixedDual(layers, pool_bytes, share)
        if kind == "fixed_dual"
        else Avmp(layers, pool_bytes, share, batch=batch)
    )
    for pool, what in zip(made.pools, ("KV page", "state"), strict=True):
        if not pool.num_units:
            raise ValueError(
                f"pool-sim: {name} must leave room for one {what} of {pool.unit_bytes} bytes, "
                f"got a share of {share:g} of {pool_bytes} bytes for states"
            )
    return made


def make_memory(name: str, model: ModelSizes, pool_bytes: int) -> Amounts | EngineFrames:
    """The allocator of one name in honest mode, empty.

    Raises:
        ValueError: no such allocator, or a size or a share that leaves one kind without memory.
    """
    plain = {
        "vllm_big_block": vllm_big_block,
        "two_ended": TwoEnded,
        "padded_unified": padded_unified,
    }
    if name in plain:
        return plain[name](model, pool_bytes)
    if match := IDEAL.fullmatch(name):
        return ideal(model, pool_bytes, step_tokens=int(match[1] or model.layers.page_tokens))
    if match := FRAMES.fullmatch(name):
        return _frames(name, match, model, pool_bytes)
    if name.startswith(SUPERBLOCKS):
        return _superblocks(name, model, pool_bytes)
    kind, share, batch = _split(name, HONEST_NAMES, EXAMPLES)
    if kind == "fixed_dual":
        return fixed_dual(model, pool_bytes, share)
    return AvmpMemory(model, pool_bytes, share, batch)


def make_run(load: PoolLoad, memory: Amounts | EngineFrames, model: ModelSizes) -> TickRun:
    """A run of a load: by the engine's scheduler for the engine's memory, and else by a queue."""
    if isinstance(memory, EngineFrames):
        return SchedulerRun(load, memory, model)
    return QueueRun(load, memory, model)


def run_beside_ideal(
    load: PoolLoad, model: ModelSizes, *, name: str, pool_bytes: int
) -> TickResult:
    """Runs a load under the byte-fluid ideal, and then under the allocator of one name."""
    found = None
    for each in ("ideal", name):
        run = make_run(load, make_memory(each, model, pool_bytes), model)
        found = run.run(name=each, pool_bytes=pool_bytes, ideal=found)
    assert found is not None
    return found


def _split(name: str, known: Sequence[str], examples: str) -> tuple[str, float, int | None]:
    """(kind, the share of states, the batch of a rebalance) of two pools.

    Raises:
        ValueError: no such name, or a share that leaves nothing for one kind.
    """
    if name == "fixed_dual_sglang":
        return "fixed_dual", SGLANG_SHARE, None
    if match := BATCH.fullmatch(name):
        return "avmp", 0.5, int(match[1])
    if (match := SHARE.fullmatch(name)) is None:
        raise ValueError(
            f"pool-sim: no allocator {name!r}; known are {', '.join(known)}, as in {examples}"
        )
    share = float(match[3] or f"{match[2][0]}.{match[2][1:]}")
    if not 0 < share < 1:
        raise ValueError(
            f"pool-sim: {name}: the share of states must lie between 0 and 1, got {share:g}"
        )
    return match[1], share, None


def _frames(
    name: str, match: re.Match[str], model: ModelSizes, pool_bytes: int
) -> Amounts | EngineFrames:
    kind, rows, grain = match.groups()
    if grain is not None:
        if not 1 <= int(grain) <= MAX_GRAIN or int(grain) & (int(grain) - 1):
            raise ValueError(
                f"pool-sim: {name}: a ring's length must be a power of two from 1 to {MAX_GRAIN}, got {grain}"
            )
        model = model.at_grain(int(grain))
    if kind is not None:
        return rings_in_frames(model, pool_bytes, kind=kind)
    return EngineFrames(model, pool_bytes, rows=None if rows is None else int(rows))


def _superblocks(name: str, model: ModelSizes, pool_bytes: int) -> Superblocks:
    size = parse_size(name.removeprefix(SUPERBLOCKS), name="pool-sim: superblocks")
    if not LEAST_BLOCK <= size <= pool_bytes:
        raise ValueError(
            f"pool-sim: {name}: a block must have from {LEAST_BLOCK} bytes to the pool's {pool_bytes}, got {size}"
        )
    return Superblocks(model, pool_bytes, size)

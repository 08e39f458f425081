"""Allocators of honest mode by the names that `pool-sim --allocator` knows."""

from __future__ import annotations

import re

from hybrid_jax.byte_sizes import parse_size
from hybrid_jax.config import MAX_GRAIN
from hybrid_jax.sim.allocators.baselines import BATCH, HALF, NAMES, SGLANG_SHARE, SHARE, parse_share
from hybrid_jax.sim.allocators.honest_arenas import Superblocks, TwoEnded
from hybrid_jax.sim.allocators.honest_frames import FramesMemory
from hybrid_jax.sim.allocators.honest_memory import HonestMemory, Ideal
from hybrid_jax.sim.allocators.honest_models import HonestModel
from hybrid_jax.sim.allocators.honest_rings import KINDS, RingsInFrames
from hybrid_jax.sim.allocators.honest_units import (
    AvmpMemory,
    fixed_dual,
    padded_unified,
    vllm_big_block,
)

HONEST_NAMES = {
    "frames": "the engine's: equal frames, one free list; its rings beside the pool",
    "frames:N": "the same, rings and tables of N rows within the pool, and no more rows than that",
    "frames_rings": "studies: rings in frames of the pool, each whole",
    "frames_records": "the same, taken as records come and given back at the fold",
    "frames_raw": "the same, records kept as they enter the convolution",
    "ideal": "bytes that flow, KV by pages of 16 tokens; ideal:N by N tokens",
    "vllm_big_block": "attention blocks as large as a layer's state",
    "superblocks:SIZE": "blocks of one size, each for one kind while in use",
    "two_ended": "KV from one end, states from the other, moved where they meet",
} | NAMES
EXAMPLES = "frames, frames:64, frames:64@8, frames_rings@16, fixed_dual_mr05, avmp_dynamic_b128, superblocks:16MiB"
NUMBER = r"[1-9][0-9]{0,5}"
IDEAL = re.compile(rf"ideal:({NUMBER})")
# The ring's length behind an @, else the engine's default.
FRAMES = re.compile(rf"frames(?:_({'|'.join(KINDS)})|:({NUMBER}))?(?:@([0-9]{{1,6}}))?")
SUPERBLOCKS = "superblocks:"
LEAST_BLOCK = 1 << 20


def make_honest(name: str, model: HonestModel, pool_bytes: int) -> HonestMemory:
    """The allocator of one name, empty.

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
    if name == "ideal":
        return Ideal(model, pool_bytes, step_tokens=model.layers.page_tokens)
    if match := IDEAL.fullmatch(name):
        return Ideal(model, pool_bytes, step_tokens=int(match[1]))
    if match := FRAMES.fullmatch(name):
        return _frames(name, match, model, pool_bytes)
    if name.startswith(SUPERBLOCKS):
        return _superblocks(name, model, pool_bytes)
    return _split(name, model, pool_bytes)


def _frames(name: str, match: re.Match, model: HonestModel, pool_bytes: int) -> FramesMemory:
    kind, rows, grain = match.groups()
    if grain is not None:
        if not 1 <= int(grain) <= MAX_GRAIN or int(grain) & (int(grain) - 1):
            raise ValueError(
                f"pool-sim: {name}: a ring's length must be a power of two from 1 to {MAX_GRAIN}, got {grain}"
            )
        model = model.at_grain(int(grain))
    if kind is not None:
        return RingsInFrames(model, pool_bytes, kind=kind)
    return FramesMemory(model, pool_bytes, rows=None if rows is None else int(rows))


def _superblocks(name: str, model: HonestModel, pool_bytes: int) -> Superblocks:
    size = parse_size(name.removeprefix(SUPERBLOCKS), name="pool-sim: superblocks")
    if not LEAST_BLOCK <= size <= pool_bytes:
        raise ValueError(
            f"pool-sim: {name}: a block must have from {LEAST_BLOCK} bytes to the pool's {pool_bytes}, got {size}"
        )
    return Superblocks(model, pool_bytes, size)


def _split(name: str, model: HonestModel, pool_bytes: int) -> HonestMemory:
    if name == "fixed_dual_sglang":
        return fixed_dual(model, pool_bytes, SGLANG_SHARE)
    if match := BATCH.fullmatch(name):
        return AvmpMemory(model, pool_bytes, HALF, int(match[1]))
    if match := SHARE.fullmatch(name):
        make = fixed_dual if match[1] == "fixed_dual" else AvmpMemory
        return make(model, pool_bytes, parse_share(name, match))
    raise ValueError(
        f"pool-sim: no allocator {name!r}; known are {', '.join(HONEST_NAMES)}, as in {EXAMPLES}"
    )

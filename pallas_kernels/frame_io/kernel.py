"""Frames on a GPU: copies of words in blocks, in place. A program takes one block of one frame."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.experimental import pallas as pl

from pallas_kernels.frame_io.reference import Copy, Read
from pallas_kernels.triton import Ref, call, cdiv, iota, load, store


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters: a block of 1,024 words is two 16-byte accesses in each thread."""

    words: int = 1024
    num_warps: int = 4


CONFIG = Config()


def _block(number: jax.Array, size: int, config: Config):
    """Words of a block of `size` words, and which of them exist."""
    words = number * config.words + iota(config.words)
    return words, words < size


def _read_kernel(arena_ref: Ref, ids_ref: Ref, out_ref: Ref, *, offset: int, config: Config):
    place = pl.program_id(0)
    words, inside = _block(pl.program_id(1), out_ref.shape[1], config)
    # Words, not floats: whatever the bits mean, NaN too, they pass unchanged.
    value = load(arena_ref, ids_ref[place], offset + words, mask=inside)
    store(out_ref, place, words, value=value, mask=inside)


def read_frames_pallas(arrays: Read, *, offset: int, words: int, config: Config = CONFIG):
    """See `api.read_frames`."""
    arena, ids = arrays
    flat = ids.reshape(-1)
    (out,) = call(
        _read_kernel,
        *(arena, flat),
        grid=(flat.shape[0], cdiv(words, config.words)),
        outputs=[jax.ShapeDtypeStruct((flat.shape[0], words), arena.dtype)],
        name="read_frames",
        num_warps=config.num_warps,
        offset=offset,
        config=config,
    )
    return out.reshape(*ids.shape, words)


def _copy_kernel(
    arena_in_ref: Ref, sources_ref: Ref, targets_ref: Ref, arena_ref: Ref, *, config: Config
):
    place = pl.program_id(0)
    words, inside = _block(pl.program_id(1), arena_ref.shape[1], config)
    # A frame is shared among programs, so that one copy of few frames still uses many multiprocessors.
    source, target = sources_ref[place], targets_ref[place]

    @pl.when(source != target)  # padding
    def _():
        value = load(arena_ref, source, words, mask=inside)
        store(arena_ref, target, words, value=value, mask=inside)


def copy_frames_pallas(arrays: Copy, *, config: Config = CONFIG):
    """See `api.copy_frames`."""
    arena, sources, _ = arrays
    (arena,) = call(
        _copy_kernel,
        *arrays,
        grid=(sources.shape[0], cdiv(arena.shape[1], config.words)),
        outputs=[0],
        name="copy_frames",
        num_warps=config.num_warps,
        config=config,
    )
    return arena

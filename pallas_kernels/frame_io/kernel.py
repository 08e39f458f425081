"""Frames on a GPU: copies of words in blocks, in place. A program takes one block of one frame or of some tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton import NOWHERE, call, cdiv, line, load, power_of_two, store


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters: a block of 1,024 words is two 16-byte accesses in each thread."""

    words: int = 1024
    num_warps: int = 4


CONFIG = Config()


def _block(number, size: int, config: Config):
    """Words of a block of `size` words, and which of them exist."""
    words = number * config.words + line(config.words)
    return words, words < size


def _read_kernel(arena_ref, ids_ref, out_ref, *, offset: int, config: Config):
    place = pl.program_id(0)
    words, inside = _block(pl.program_id(1), out_ref.shape[1], config)
    value = load(arena_ref, ids_ref[place], offset + words, mask=inside)
    store(out_ref, place, words, value=value, mask=inside)


def read_frames_pallas(arena, ids, *, offset, words, config: Config = CONFIG):
    """See `api.read_frames`."""
    flat = ids.reshape(-1)
    out = call(
        functools.partial(_read_kernel, offset=offset, config=config),
        *(arena, flat),
        grid=(flat.shape[0], cdiv(words, config.words)),
        out_shape=jax.ShapeDtypeStruct((flat.shape[0], words), arena.dtype),
        name="read_frames",
        num_warps=config.num_warps,
    )
    return out.reshape(*ids.shape, words)


def _write_kernel(arena_in_ref, ids_ref, values_ref, arena_ref, *, offset: int, config: Config):
    place = pl.program_id(0)
    words, inside = _block(pl.program_id(1), values_ref.shape[1], config)
    value = load(values_ref, place, words, mask=inside)
    store(arena_ref, ids_ref[place], offset + words, value=value, mask=inside)


def write_frames_pallas(arena, ids, values, *, offset, config: Config = CONFIG):
    """See `api.write_frames`."""
    flat = ids.reshape(-1)
    lines = values.reshape(flat.shape[0], -1)
    return _in_place(
        functools.partial(_write_kernel, offset=offset, config=config),
        *(arena, flat, lines),
        grid=(flat.shape[0], cdiv(lines.shape[1], config.words)),
        name="write_frames",
        config=config,
    )


def _copy_kernel(arena_in_ref, sources_ref, targets_ref, arena_ref, *, config: Config):
    place = pl.program_id(0)
    words, inside = _block(pl.program_id(1), arena_ref.shape[1], config)
    source, target = sources_ref[place], targets_ref[place]

    @pl.when(source != target)  # padding
    def _():
        value = load(arena_ref, source, words, mask=inside)
        store(arena_ref, target, words, value=value, mask=inside)


def copy_frames_pallas(arena, sources, targets, *, config: Config = CONFIG):
    """See `api.copy_frames`."""
    return _in_place(
        functools.partial(_copy_kernel, config=config),
        *(arena, sources, targets),
        grid=(sources.shape[0], cdiv(arena.shape[1], config.words)),
        name="copy_frames",
        config=config,
    )


def _update_kernel(
    arena_in_ref,  # [U, W], the same memory as arena_ref
    values_ref,  # [B, T, w]
    table_ref,  # [B, pages]
    base_ref,  # [B]
    begin_ref,  # [B]
    end_ref,  # [B]
    arena_ref,
    *,
    offset: int,
    page_tokens: int,
    tokens: int,
    config: Config,
):
    row = pl.program_id(0)
    width, last = values_ref.shape[2], table_ref.shape[1] - 1
    token = pl.program_id(1) * tokens + line(tokens, 0, 2)  # [t, 1]
    word = pl.program_id(2) * (config.words // tokens) + line(config.words // tokens, 1, 2)
    position = base_ref[row] + token
    live = (position >= begin_ref[row]) & (position < end_ref[row])
    live &= token < values_ref.shape[1]
    page = jnp.clip(position // page_tokens, 0, last)
    frame = load(table_ref, row, page, mask=live)  # the sink where nothing is written
    inside = live & (word < width)
    value = load(values_ref, row, token, word, mask=inside)
    place = offset + position % page_tokens * width + word
    if width & (width - 1):  # words behind the record are also the next token's
        place = jnp.where(inside, place, NOWHERE)
    store(arena_ref, frame, place, value=value, mask=inside)


def update_tokens_pallas(
    arena,
    values,
    table,
    base,
    begin,
    end,
    *,
    offset,
    page_tokens,
    config: Config = CONFIG,
):
    """See `api.update_tokens`. The grid walks over rows, tokens and words; for long records a program takes one
    token, for short ones as many as fill its block."""
    rows, count, width = values.shape
    tokens = min(max(config.words // power_of_two(width), 1), power_of_two(count))
    return _in_place(
        functools.partial(
            _update_kernel, offset=offset, page_tokens=page_tokens, tokens=tokens, config=config
        ),
        *(arena, values, table, base, begin, end),
        grid=(rows, cdiv(count, tokens), cdiv(width, config.words // tokens)),
        name="update_tokens",
        config=config,
    )


def _in_place(kernel, arena, *operands, grid, name: str, config: Config):
    return call(
        kernel,
        *(arena, *operands),
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(arena.shape, arena.dtype),
        name=name,
        num_warps=config.num_warps,
        aliases={0: 0},
    )

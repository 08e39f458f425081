"""How a checkpoint lies in frames uint32[U, W] of an arena: states, then columns, layer after layer.

A frame holds as many whole states as fit, of heads or other units, float32. Of the columns, the convolution's history,
each layer has `layer_words` words: float32 as it is, bfloat16 two neighbours to a word, the earlier one low.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import BITS, FLOAT32, INTS, WORDS, check
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.triton import Ref, call, cdiv, iota, load, store

BLOCK_WORDS = 1024  # that a program of `store_columns` or `store_states` takes


def unpack_states(words: jax.Array, units: int, unit_words: int) -> jax.Array:
    """Words uint32[B, ...] of a layer's frames, none but those of states, to float32[B, units, unit_words]."""
    state = jax.lax.bitcast_convert_type(words, jnp.float32)
    return state.reshape(words.shape[0], -1, unit_words)[:, :units]


def pack_states(state: jax.Array, num_frames: int, per_frame: int) -> jax.Array:
    """The inverse of `unpack_states`: `per_frame` units to a frame, uint32[B, num_frames, per_frame * unit_words]."""
    padding = num_frames * per_frame - state.shape[1]
    state = jnp.pad(state, ((0, 0), (0, padding), (0, 0)))
    words = jax.lax.bitcast_convert_type(state, jnp.uint32)
    return words.reshape(state.shape[0], num_frames, -1)


def layer_words(columns: int, channels: int, dtype: jnp.dtype) -> int:
    """Words of one layer's columns, the last one half empty where bfloat16 elements are odd in number."""
    return cdiv(columns * channels * jnp.dtype(dtype).itemsize, 4)


def pack_columns(columns: jax.Array) -> jax.Array:
    """Bits [..., C, E] as uint32[..., words], the words of `layer_words`."""
    flat = columns.reshape(*columns.shape[:-2], -1)
    if flat.dtype.itemsize == 4:
        return flat
    padding = [(0, 0)] * (flat.ndim - 1) + [(0, flat.shape[-1] % 2)]
    pairs = jnp.pad(flat, padding).reshape(*flat.shape[:-1], -1, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint32)


def unpack_columns(words: jax.Array, columns: int, channels: int, dtype: str) -> jax.Array:
    """The inverse of `pack_columns`: uint32[B, words] to bits [B, C, E] of `dtype`."""
    if dtype != "float32":
        words = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(words.shape[0], -1)
    return words[:, : columns * channels].reshape(-1, columns, channels)


def word_of(element: Callable, place: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Words of a layer's columns in a kernel; `element` gives the bits of elements by their places."""
    if jnp.dtype(dtype).itemsize == 4:
        return element(place)
    return element(2 * place) | (element(2 * place + 1) << 16)


class Columns(NamedTuple):
    """Arrays of `store_columns`.

    Attributes:
        arena: uint32[U, W]. frames: int32[B, n] frames that hold the columns of one checkpoint.
        folds: int32[B], below 0 for rows that are left alone.
        conv: uint16 or uint32[L, B', C, E] rings, B' >= B: bits of bfloat16 or float32.
    """

    arena: Annotated[jax.Array, WORDS, "frames words"]
    frames: Annotated[jax.Array, INTS, "B n"]
    folds: Annotated[jax.Array, INTS, "B"]
    conv: Annotated[jax.Array, BITS, "L rows C E"]


def store_columns(
    arrays: Columns, *, columns: int, implementation: Implementation | None = None
) -> jax.Array:
    """Writes the first `columns` raw columns of some rows' rings into frames; returns the arena.

    Args:
        columns: W - 1. implementation: "reference", "pallas", or None to choose.
    """
    where, conv = "store_columns", arrays.conv
    sizes = check(where, arrays)
    needed = sizes.L * layer_words(columns, sizes.E, conv.dtype)
    if needed > sizes.n * sizes.words:
        raise ValueError(
            f"{where}: frames must hold {needed} words a row, got {sizes.n} of {sizes.words}"
        )
    if not 0 <= columns <= sizes.C or sizes.B > sizes.rows:
        raise ValueError(
            f"{where}: {columns} columns of {sizes.B} rows must lie within the rings, got {conv.shape}"
        )
    return run(where, implementation, STORES, arrays, columns=columns)


def store_columns_reference(arrays: Columns, *, columns: int):
    """Row by row and word by word."""
    arena, frames, folds, conv = arrays
    rows = frames.shape[0]
    packed = pack_columns(conv[:, :rows, :columns])
    words = jnp.moveaxis(packed, 0, 1).reshape(rows, -1)
    place = jnp.arange(words.shape[1])
    for row in range(frames.shape[0]):
        frame, offset = frames[row, place // arena.shape[1]], place % arena.shape[1]
        stored = arena.at[frame, offset].set(words[row])
        arena = jnp.where(folds[row] >= 0, stored, arena)
    return arena


def _store_kernel(
    frames_ref: Ref,
    folds_ref: Ref,
    conv_ref: Ref,
    arena_ref: Ref,
    *,
    columns: int,
):
    layers, _, _, channels = conv_ref.shape
    words = layer_words(columns, channels, conv_ref.dtype)
    word = pl.program_id(0) * BLOCK_WORDS + iota(BLOCK_WORDS)
    inside = word < layers * words
    # Each layer starts at a word of its own, so that no word holds elements of two layers.
    layer, place = word // words, word % words
    frame_words = arena_ref.shape[1]

    def element(row: jax.Array, index: jax.Array):
        """Bits of one element of the layer's columns."""
        # The last word of a layer may be half empty; its upper half becomes zero.
        exists = inside & (index < columns * channels)
        x = load(conv_ref, layer, row, index // channels, index % channels, mask=exists)
        return x.astype(jnp.uint32)

    # Rows are a loop, not programs: mostly none folds, and then a program only looks at their lengths.
    def store_row(row: jax.Array, _: None):
        @pl.when(folds_ref[row] >= 0)
        def _():
            value = word_of(functools.partial(element, row), place, conv_ref.dtype)
            frame = load(frames_ref, row, word // frame_words, mask=inside)
            store(arena_ref, frame, word % frame_words, value=value, mask=inside)

    jax.lax.fori_loop(0, folds_ref.shape[0], store_row, None)


def store_columns_pallas(arrays: Columns, *, columns: int):
    """A program takes a block of words of every row that folds."""
    layers, _, _, channels = arrays.conv.shape
    words = layers * layer_words(columns, channels, arrays.conv.dtype)
    (arena,) = call(
        _store_kernel,
        *arrays,
        grid=(cdiv(words, BLOCK_WORDS),),
        outputs=[0],
        name="store_columns",
        num_warps=4,
        columns=columns,
    )
    return arena


STORES = {
    "reference": store_columns_reference,
    "pallas": store_columns_pallas,
}


class States(NamedTuple):
    """Arrays of `store_states`.

    Attributes:
        arena: uint32[U, W]. frames: int32[B, n] frames that hold the states of one checkpoint, layer after layer.
        folds: int32[B], below 0 for rows that are left alone. copies: int32[B] which copy in a ring is stored.
        state: float32[L, B', K, words] rings with K copies of a row's state, B' >= B.
    """

    arena: Annotated[jax.Array, WORDS, "frames words"]
    frames: Annotated[jax.Array, INTS, "B n"]
    folds: Annotated[jax.Array, INTS, "B"]
    copies: Annotated[jax.Array, INTS, "B"]
    state: Annotated[jax.Array, FLOAT32, "L rows K state_words"]


def store_states(
    arrays: States, *, unit_words: int, implementation: Implementation | None = None
) -> jax.Array:
    """Writes the states of some rows of rings that carry them into frames, for all layers; returns the arena.

    Args:
        unit_words: of a unit, which a frame holds whole. implementation: "reference", "pallas", or None to choose.
    """
    where = "store_states"
    sizes = check(where, arrays)
    if sizes.state_words % unit_words or unit_words > sizes.words:
        raise ValueError(
            f"{where}: unit_words must divide the state's {sizes.state_words} words and fit a frame's {sizes.words}, "
            f"got {unit_words}"
        )
    needed = sizes.L * cdiv(sizes.state_words, _used_words(sizes.words, unit_words))
    if needed > sizes.n or sizes.B > sizes.rows:
        raise ValueError(
            f"{where}: {needed} frames and {sizes.B} rows are needed, got {sizes.n} and rings {arrays.state.shape}"
        )
    return run(where, implementation, STATES, arrays, unit_words=unit_words)


def _used_words(frame_words: int, unit_words: int) -> int:
    """Words of a frame that whole units fill."""
    return frame_words // unit_words * unit_words


def store_states_reference(arrays: States, *, unit_words: int):
    """Row by row and layer by layer."""
    arena, frames, folds, copies, state = arrays
    used = _used_words(arena.shape[1], unit_words)
    place = jnp.arange(state.shape[3])
    per_layer = cdiv(state.shape[3], used)
    for row in range(frames.shape[0]):
        for layer in range(state.shape[0]):
            words = jax.lax.bitcast_convert_type(state[layer, row, copies[row]], jnp.uint32)
            frame = frames[row, layer * per_layer + place // used]
            stored = arena.at[frame, place % used].set(words)
            arena = jnp.where(folds[row] >= 0, stored, arena)
    return arena


def _states_kernel(
    frames_ref: Ref,
    folds_ref: Ref,
    copies_ref: Ref,
    state_ref: Ref,
    arena_ref: Ref,
    *,
    used: int,
):
    layer, words = pl.program_id(1), state_ref.shape[3]
    place = pl.program_id(0) * BLOCK_WORDS + iota(BLOCK_WORDS)
    inside = place < words
    at = layer * cdiv(words, used) + place // used

    # As in `_store_kernel`: mostly none folds.
    def store_row(row: jax.Array, _: None):
        @pl.when(folds_ref[row] >= 0)
        def _():
            value = load(state_ref, layer, row, copies_ref[row], place, mask=inside)
            frame = load(frames_ref, row, at, mask=inside)
            bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
            store(arena_ref, frame, place % used, value=bits, mask=inside)

    jax.lax.fori_loop(0, folds_ref.shape[0], store_row, None)


def store_states_pallas(arrays: States, *, unit_words: int):
    """A program takes a block of words of one layer, of every row that folds."""
    layers, _, _, words = arrays.state.shape
    (arena,) = call(
        _states_kernel,
        *arrays,
        grid=(cdiv(words, BLOCK_WORDS), layers),
        outputs=[0],
        name="store_states",
        num_warps=4,
        used=_used_words(arrays.arena.shape[1], unit_words),
    )
    return arena


STATES = {
    "reference": store_states_reference,
    "pallas": store_states_pallas,
}

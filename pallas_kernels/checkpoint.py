"""How a checkpoint lies in frames uint32[U, W] of an arena: states, then columns, layer after layer.

A frame holds as many whole states as fit, of heads or other units, float32. Of the columns, the convolution's history,
each layer has `layer_words` words: float32 as it is, bfloat16 two neighbours to a word, the earlier one low.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.triton import cdiv


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

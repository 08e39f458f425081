"""Checkpoints as int8: a row's own form into the narrow one of the cache, once, and back.

A column of a unit (`StateLayout.scales`) has n values x, one float32 scale s and codes c in -127 .. 127:

    s = max|x| / 127, rounded to 17 bits        c = round(x / s), a half to the even one        x' = c s

127 s is a float32, since s has 17 bits. So the largest x' is 127 s, and narrowing what was widened gives the same s
and c again. That of the largest float32 is finite, for its s is rounded down. Values and scales below the smallest
normal float32 count as 0. If max|x| is a NaN or an infinity, s is NaN and c is 0, so all x' are NaN: a row that goes on
from them fails. `tests/exactness/narrow_definition.py` is the same in NumPy, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.engine.frames import read_whole, write_whole
from hybrid_jax.geometry import NarrowForm, NarrowPart, StateGroup
from hybrid_jax.state import Model, State

MOST = 127.0  # the largest code
DROPPED_BITS = 7  # of a scale's 24
SMALLEST = np.finfo(np.float32).tiny


def narrow_checkpoint(state: State, frames: jax.Array, *, model: Model) -> jax.Array:
    """Reads a checkpoint in a row's form from frames int32[F]; uint32[N, W] words of its narrow form."""
    words, form = read_whole(state, frames, model), _form(model)
    parts = [
        part
        for group, sizes in zip(model.geometry.groups, form.parts, strict=True)
        for part in _narrow_group(words, group, sizes)
    ]
    return _in_frames(parts, form.num_frames, model)


def widen_checkpoint(state: State, frames: jax.Array, *, model: Model) -> jax.Array:
    """Reads a checkpoint in narrow form from frames int32[N]; uint32[F, W] words of a row's form."""
    words, form = read_whole(state, frames, model).reshape(-1), _form(model)
    parts: list[jax.Array] = []
    start = 0
    for group, sizes in zip(model.geometry.groups, form.parts, strict=True):
        pieces = []
        for size in sizes:
            pieces.append(words[start : start + size])
            start += size
        parts += _widen_group(pieces, group, model.geometry.frame_words)
    return _in_frames(parts, model.geometry.state_frames, model)


def write_checkpoint(state: State, frames: jax.Array, words: jax.Array) -> State:
    """Writes words uint32[n, W] to frames int32[n].

    It is a program of its own: in one with the reads, XLA would keep a copy of the arena for those that come late.
    """
    return write_whole(state, frames, words)


def _form(model: Model) -> NarrowForm:
    form = model.geometry.narrow
    assert form is not None, "narrow: checkpoints stay as rows have them"
    return form


def _in_frames(parts: list[jax.Array], num_frames: int, model: Model) -> jax.Array:
    """A run of words as whole frames."""
    words, size = jnp.concatenate(parts), model.geometry.frame_words
    return jnp.pad(words, (0, num_frames * size - words.shape[0])).reshape(num_frames, size)


# --- one group of layers --------------------------------------------------------------------------


def _narrow_group(words: jax.Array, group: StateGroup, sizes: NarrowPart) -> Iterator[jax.Array]:
    """The group's part of a narrow checkpoint, out of the frames uint32[F, W] of a row's."""
    layout = group.layout
    if layout.units:
        used = group.units_per_frame * layout.unit_words
        own = words[group.first_frame : group.columns.start, :used]
        own = own.reshape(group.num_layers, -1, layout.unit_words)[:, : layout.units]
        if layout.scales:
            x = _floats(own).reshape(group.num_layers, layout.units, -1, layout.scales)
            scales, codes = quantized(x)
            yield _packed(codes, sizes.states)
            yield _bits(scales).reshape(-1)
        else:
            yield own.reshape(-1)
    yield words[group.columns].reshape(-1)[: sizes.columns]


def _widen_group(
    pieces: list[jax.Array], group: StateGroup, frame_words: int
) -> Iterator[jax.Array]:
    """The group's frames of a row's checkpoint as a run of words, out of its part of a narrow one."""
    layout, (states, scales, columns) = group.layout, pieces
    if layout.units:
        own = states
        if layout.scales:
            shape = (group.num_layers, layout.units, layout.unit_words // layout.scales)
            codes = _unpacked(states, group.num_layers * layout.state_words)
            factors = _floats(scales).reshape(*shape[:2], 1, layout.scales)
            own = _bits(codes.reshape(*shape, layout.scales).astype(jnp.float32) * factors)
        own = own.reshape(group.num_layers, layout.units, layout.unit_words)
        filled = group.frames_per_layer * group.units_per_frame
        own = jnp.pad(own, ((0, 0), (0, filled - layout.units), (0, 0)))
        own = own.reshape(-1, group.units_per_frame * layout.unit_words)
        yield jnp.pad(own, ((0, 0), (0, frame_words - own.shape[1]))).reshape(-1)
    yield jnp.pad(columns, (0, group.column_frames * frame_words - columns.shape[0]))


def quantized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales float32[..., 1, n] and codes int8[..., m, n] of values float32[..., m, n]."""
    sizes = jnp.abs(x)
    largest = sizes.max(axis=-2, keepdims=True)
    # The factor is a number of its own: XLA would make it of a division by a constant, and NumPy would not.
    scales = largest * np.float32(1 / MOST)
    bits = (_bits(scales) + (1 << DROPPED_BITS - 1)) & ~np.uint32((1 << DROPPED_BITS) - 1)
    scales = jnp.where(scales < SMALLEST, 0.0, _floats(bits))
    # Of a NaN with high bits the sum has overflowed.
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.nan)
    some = scales > 0
    codes = jnp.round(x / jnp.where(some, scales, 1.0))
    # On a CPU XLA takes smaller values for 0, and NumPy does not.
    codes = jnp.where(some & (sizes >= SMALLEST), codes, 0.0)
    return scales, jnp.clip(codes, -MOST, MOST).astype(jnp.int8)


def _packed(codes: jax.Array, num_words: int) -> jax.Array:
    """Bytes as words, the first one low."""
    flat = jnp.pad(codes.reshape(-1), (0, 4 * num_words - codes.size))
    return jax.lax.bitcast_convert_type(flat.reshape(-1, 4), jnp.uint32)


def _unpacked(words: jax.Array, count: int) -> jax.Array:
    """The inverse: int8[count]."""
    return jax.lax.bitcast_convert_type(words, jnp.int8).reshape(-1)[:count]


def _floats(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)

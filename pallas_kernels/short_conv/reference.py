"""The definitions: every output from the last W columns on its token's path."""

from __future__ import annotations

import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import BITS, FLOATS, INTS, WORDS
from pallas_kernels.causal_conv.reference import tap_places
from pallas_kernels.checkpoint import pack_columns
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.operands import floats, stored, summed


class ShortChunk(NamedTuple):
    """Arrays of `api.short_conv`."""

    projected: Annotated[jax.Array, FLOATS, "B T columns"]
    history: Annotated[jax.Array, FLOATS + BITS, "B before E"]
    weight: Annotated[jax.Array, FLOATS, "W E"]
    bias: Annotated[jax.Array | None, FLOATS, "None E"]
    lengths: Annotated[jax.Array, INTS, "B"]


class ShortWindow(NamedTuple):
    """Arrays of `api.short_conv_window`.

    Attributes:
        projected: [B, T, 3 E] B | C | x of each token, without gates [B, T, 2 E] x | z; or parts
            float32[S, B, T, ...] of that product, whose sum counts in the dtype of `weight`.
        weight: [W, E] taps. bias: [E] or None.
        conv: [L, B', W - 1 + T', E] products B x, or x, B' >= B and T' >= T: the W - 1 before the window, then those
            of its tokens; floats, or their bits as unsigned integers.
        first: int32[B] leading tokens that the ring holds already. num_valid: int32[B] tokens that exist; at most T.
        ancestors: int32[B, T] of a tree of tokens, as in `ssd_window.WindowFrames`; None for a chain.
    """

    projected: Annotated[jax.Array, FLOATS, "parts? B T columns"]
    weight: Annotated[jax.Array, FLOATS, "W E"]
    bias: Annotated[jax.Array | None, FLOATS, "None E"]
    conv: Annotated[jax.Array, FLOATS + BITS, "L rows C E"]
    first: Annotated[jax.Array, INTS, "B"]
    num_valid: Annotated[jax.Array, INTS, "B"]
    ancestors: Annotated[jax.Array | None, INTS, "None B T"] = None


class ShortTail(NamedTuple):
    """Arrays of `api.store_short_tail`.

    Attributes:
        arena: uint32[U, W]. conv: bits[L, B', C, E] rings of all layers.
        projected: [B, T, 3 E] B | C | x of a chunk, or [B, T, 2 E] x | z. history: bits[B, W - 1, E] columns before it.
        frames: int32[B, n] frames of the columns of each row's next checkpoint.
        rows: int32[B] ring rows. lengths, state_lengths: int32[B] tokens of the chunk, and before the checkpoint.
    """

    arena: Annotated[jax.Array, WORDS, "frames words"]
    conv: Annotated[jax.Array, BITS, "L rows C E"]
    projected: Annotated[jax.Array, FLOATS, "B T columns"]
    history: Annotated[jax.Array, BITS, "B before E"]
    frames: Annotated[jax.Array, INTS, "B n"]
    rows: Annotated[jax.Array, INTS, "B"]
    lengths: Annotated[jax.Array, INTS, "B"]
    state_lengths: Annotated[jax.Array, INTS, "B"]


def split(projected: jax.Array, gated: bool) -> tuple[jax.Array, jax.Array | None]:
    """The convolution's inputs [..., E] and the gates of its outputs, if there are any."""
    if not gated:
        return jnp.split(projected, 2, axis=-1)[0], None
    B, C, x = jnp.split(projected, 3, axis=-1)
    return B * x, C


def outputs(
    taps: jax.Array, C: jax.Array | None, weight: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """Columns [..., W, E], the token's own last, and gates C [..., E] to outputs [..., E]; None for SiLU in place of
    gates."""
    y = jnp.einsum(
        "...we,we->...e", taps.astype(jnp.float32), weight.astype(jnp.float32), precision=HIGHEST
    )
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return jax.nn.silu(y).astype(taps.dtype) if C is None else C * y.astype(C.dtype)


def short_conv_reference(arrays: ShortChunk, *, gated: bool = True):
    """See `api.short_conv`."""
    projected, history, weight, bias, lengths = arrays
    valid = (jnp.arange(projected.shape[1]) < lengths[:, None])[..., None]
    raw, C = split(jnp.where(valid, projected, 0), gated)
    columns = jnp.concatenate([floats(history).astype(raw.dtype), raw], axis=1)
    places = jnp.arange(projected.shape[1])[:, None] + jnp.arange(weight.shape[0])
    return jnp.where(valid, outputs(columns[:, places], C, weight, bias), 0)


def short_conv_window_reference(
    arrays: ShortWindow, *, layer: int, moves: bool = True, gated: bool = True
):
    """See `api.short_conv_window`: each row by itself."""
    projected, weight, _, conv, first, num_valid, ancestors = arrays
    projected = summed(projected, 3, weight.dtype)
    rows, tokens, _ = projected.shape
    token = jnp.arange(tokens)
    if ancestors is None:
        paths = jnp.broadcast_to(token <= token[:, None], (rows, tokens, tokens))
    else:
        paths = (ancestors[:, :, None] >> token) & 1 > 0
    one = functools.partial(_row, arrays, moves, gated)
    ring, y = jax.vmap(one)((projected, conv[layer, :rows], first, num_valid, paths))
    return conv.at[layer, :rows].set(ring), y


def _row(arrays: ShortWindow, moves: bool, gated: bool, row: tuple):
    """One row: projected [T, columns], conv [W - 1 + T', E], two numbers, paths bool[T, T]."""
    projected, conv, first, count, paths = row
    tokens, history, token = (
        projected.shape[0],
        arrays.weight.shape[0] - 1,
        jnp.arange(projected.shape[0]),
    )
    new = (token >= first) & (token < count)
    live = new.any()
    raw, C = split(jnp.where(new[:, None], projected, 0), gated)
    old = floats(conv[: history + tokens]).astype(raw.dtype)
    raw = jnp.where((token < first)[:, None], old[history:], raw)
    columns = jnp.concatenate([old[:history], raw])
    y = outputs(columns[tap_places(paths, history)], C, arrays.weight, arrays.bias)
    behind = jnp.where(
        (live & (token >= first))[:, None], stored(raw, conv.dtype), conv[history:][:tokens]
    )
    moved = live & (count == tokens) & moves
    before = jnp.where(moved, stored(columns[tokens:], conv.dtype), conv[:history])
    ring = jnp.concatenate([before, behind, conv[history + tokens :]])
    return ring, jnp.where(new[:, None], y, 0)


def store_short_tail_reference(arrays: ShortTail, *, layer: int, gated: bool = True):
    """One row after another."""
    arena, conv, projected, history, frames, rows, lengths, ends = arrays
    count, channels = history.shape[1:]
    for b in range(rows.shape[0]):
        columns = jnp.concatenate([history[b], stored(split(projected[b], gated)[0], conv.dtype)])
        at_end, at_checkpoint = (
            jax.lax.dynamic_slice(columns, (start, 0), (count, channels))
            for start in (lengths[b], ends[b])
        )
        conv = conv.at[layer, rows[b], :count].set(at_end)
        packed = pack_columns(at_checkpoint[None])[0]
        place = layer * packed.size + jnp.arange(packed.size)
        frame = frames[b, place // arena.shape[1]]
        arena = arena.at[frame, place % arena.shape[1]].set(packed)
    return arena, conv

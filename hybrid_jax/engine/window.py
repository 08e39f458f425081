"""The window: a few new tokens per row from checkpoint + ring + pages, for decode and exact mode alike."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import Attention
from hybrid_jax.engine import blocks, fused
from hybrid_jax.engine.blocks import Model
from hybrid_jax.layers import mamba2
from hybrid_jax.models import decoder
from hybrid_jax.state import State, from_bits

FOLDS = {"xla": blocks.fold_rows, "pallas": fused.fold_rows}


class WindowRows(NamedTuple):
    """Rows of a window: T tokens at absolute positions base .. base + T - 1, of which [begin, end) are new.

    Attributes:
        tokens: int32[B, T]. base, begin, end: int32[B]; begin = end = 0 makes a row inert.
        checkpoint, slot: int32[B] position and slot of the row's checkpoint.
        table: int32[B, groups, pages].
    """

    tokens: jax.Array
    base: jax.Array
    begin: jax.Array
    end: jax.Array
    checkpoint: jax.Array
    slot: jax.Array
    table: jax.Array


def window(
    params: dict,
    state: State,
    rows: WindowRows,
    *,
    rates: jax.Array | None,
    model: Model,
) -> tuple[jax.Array, State]:
    """Runs T new tokens per row from checkpoint + ring + pages.

    The new records go to the ring at slot position - checkpoint. T is 1, or the whole ring with base =
    checkpoint (exact mode).

    Args:
        rates: float32[L, M] decay rates of all Mamba-2 layers, None without any.

    Returns:
        h [B, T, D] before the last norm, and the state.
    """
    num_rows, width = rows.tokens.shape
    positions = rows.base[:, None] + jnp.arange(width)
    valid = (positions >= rows.begin[:, None]) & (positions < rows.end[:, None])  # [B, T]
    exists = rows.checkpoint > 0
    frames = blocks.slot_frames(state, rows.slot)  # [B, F]
    if model.kernels == "pallas":
        return _window_on_kernels(params, state, rows, frames, exists, valid, rates, model)
    arena, rings, attention_layers = state.arena, [], itertools.count()
    beside = None, None

    def mix(weights: dict, normed: jax.Array, spec: decoder.Mixer) -> jax.Array:
        nonlocal arena, beside
        if isinstance(spec, Attention):
            index, span = next(attention_layers), (rows.base, rows.begin, rows.end)
            table = _table_after(state, rows, normed, *beside)
            out, arena = blocks.attend_pages(
                weights, normed, arena, table, *span, index, spec, model
            )
            return out
        number = len(rings)
        own = blocks.layer_frames(frames, number, model)
        ring = (state.conv[number], state.xB[number], state.dt[number])
        ring = tuple(array[:num_rows] for array in ring)
        checkpoint = (arena, own, exists)
        out, arena, ring = _window_mixer(
            weights, normed, checkpoint, ring, rows, valid, spec, model
        )
        rings.append(ring)
        beside = normed, out
        return out

    h = decoder.walk(params, rows.tokens, valid, model.config, mix)
    state = state.replace(arena=arena)
    return h, _write_rings(state, h, rings, rows, valid) if rings else state


def _table_after(
    state: State, rows: WindowRows, normed: jax.Array, given: jax.Array | None, made: jax.Array
) -> jax.Array:
    """The page table for an attention layer, once a recurrent mixer beside it has read the arena.

    Of two mixers side by side neither depends on the other, and XLA would keep a copy of what one still has to read.

    Args:
        normed: the layer's input. given, made: the last recurrent mixer's input, and its output or parts of it.
    """
    return rows.table + blocks.zero_after(state, made) if normed is given else rows.table


def _window_on_kernels(
    params, state: State, rows: WindowRows, frames, exists, valid, rates, model: Model
):
    """`window` where each layer writes its ring itself."""
    attention_layers, recurrent_layers = itertools.count(), itertools.count()
    started = exists.astype(jnp.int32)
    beside = None, None

    def mix(weights: dict, normed: jax.Array, spec: decoder.Mixer) -> jax.Array:
        nonlocal state, beside
        if isinstance(spec, Attention):
            index, span = next(attention_layers), (rows.base, rows.begin, rows.end)
            table = _table_after(state, rows, normed, *beside)
            out, arena = blocks.attend_pages(
                weights, normed, state.arena, table, *span, index, spec, model
            )
            state = state.replace(arena=arena)
            return out
        place = (rows, frames, started, rates, next(recurrent_layers))
        out, state = fused.mix_window(weights, normed, state, *place, spec, model)
        beside = normed, out
        return out

    h = decoder.walk(params, rows.tokens, valid, model.config, mix, "pallas")
    return h, state


def _window_mixer(params, h, checkpoint, ring, rows: WindowRows, valid, spec, model: Model):
    """One Mamba-2 layer of a window: outputs, the arena as it was, and the ring entries to store."""
    conv, ring_xB, ring_dt = ring  # [B, W - 1 + T, E], [B, S, .], [B, S, M]
    width, history = h.shape[1], spec.conv_width - 1
    z, raw, dt = mamba2.project(params, h, spec)
    raw = jnp.where(valid[..., None], raw, 0)
    old = from_bits(conv).astype(raw.dtype)
    positions = rows.base[:, None] + jnp.arange(width)
    earlier = (positions >= rows.checkpoint[:, None]) & (positions < rows.begin[:, None])
    raw = jnp.where(earlier[..., None], old[:, history:], raw)
    columns = jnp.concatenate([old[:, :history], raw], axis=1)
    xBC = mamba2.convolve(params, columns, spec)
    xB, C = jnp.split(xBC, [spec.record_size], axis=-1)
    xB = blocks.ring_bits(xB, model)
    slot = jnp.arange(ring_xB.shape[1])
    starts = rows.base - rows.checkpoint
    if width == 1:
        here = (slot == starts[:, None]) & valid
    else:
        here = valid
    merged_xB = jnp.where(here[..., None], xB, ring_xB)
    merged_dt = jnp.where(here[..., None], dt, ring_dt)
    out, arena = mamba2.window_frames(
        params,
        z,
        jnp.where(valid[..., None], C, 0),
        xBC[..., : spec.inner_size],
        *checkpoint,
        mamba2.Records(from_bits(merged_xB).astype(h.dtype), merged_dt),
        starts,
        jnp.maximum(rows.end - rows.base, 0),
        spec,
        "xla",
    )
    # The columns move on by the tokens after which the next window's base stands.
    moved = columns[:, width : width + history]
    complete = valid.any(1) & (rows.end == rows.base + width)
    kept = jnp.where(complete[:, None, None], moved, columns[:, :history])
    conv = blocks.ring_bits(jnp.concatenate([kept, columns[:, history:]], axis=1), model)
    if width == 1:
        return out, arena, (conv, xB, dt)
    return out, arena, (conv, merged_xB, merged_dt)


def _write_rings(
    state: State, h: jax.Array, rings: list, rows: WindowRows, valid: jax.Array
) -> State:
    """Stores all layers' new ring entries: a record per row for T = 1, whole rings otherwise."""
    conv, xB, dt = (jnp.stack(arrays) for arrays in zip(*rings, strict=True))
    num_rows, width = valid.shape
    live = valid.any(1)
    # Every read of the rings comes before the first write; the last layer's leads to h alone.
    zero = blocks.zero_after(state, h)
    sink = state.tokens.shape[0] - 1
    new_xB, new_dt = state.xB, state.dt
    for b in range(num_rows):
        row = jnp.where(live[b], b, sink) + zero
        slot = jnp.where(live[b], rows.base[b] - rows.checkpoint[b], 0) if width == 1 else 0
        new_xB = blocks.put_row(new_xB, xB[:, b : b + 1], row, slot)
        new_dt = blocks.put_row(new_dt, dt[:, b : b + 1], row, slot)

    # Records are computed from the columns where they are written, so the columns come last. In a loop: what
    # enters one is an array of its own, while outside XLA would fuse the read of the old columns into the
    # write of the new and keep a copy of the ring.
    zero = blocks.zero_after(state, new_xB, new_dt)

    def put(b, ring):
        value = jax.lax.dynamic_slice_in_dim(conv, b, 1, axis=1)
        return blocks.put_row(ring, value, jnp.where(live[b], b, sink))

    new_conv = jax.lax.fori_loop(zero, num_rows + zero, put, state.conv)
    return state.replace(conv=new_conv, xB=new_xB, dt=new_dt)

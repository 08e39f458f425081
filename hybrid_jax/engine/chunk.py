"""The chunk: prompt tokens of some rows from a checkpoint and pages to the next checkpoint and a ring's tail."""

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


class ChunkRows(NamedTuple):
    """Rows of a chunk: T tokens from absolute position start on, of which `length` exist.

    Attributes:
        tokens: int32[R, T]. start, length: int32[R].
        state_len: int32[R] tokens that the checkpoint after the chunk covers.
        row: int32[R] ring rows.
        read, write: int32[R, F] frames of the checkpoints before and after.
        table: int32[R, groups, pages].
    """

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    state_len: jax.Array
    row: jax.Array
    read: jax.Array
    write: jax.Array
    table: jax.Array


def chunk(params: dict, state: State, rows: ChunkRows, *, model: Model) -> tuple[jax.Array, State]:
    """Runs a chunk: h [R, T, D] before the last norm, and the state with checkpoints, pages and rings written."""
    end, exists = rows.start + rows.length, rows.start > 0
    tails, beside = (), (None, None)
    attention_layers, recurrent_layers = itertools.count(), itertools.count()

    def mix(weights: dict, normed: jax.Array, spec: decoder.Mixer) -> jax.Array:
        nonlocal state, tails, beside
        if isinstance(spec, Attention):
            span = (rows.start, rows.start, end, next(attention_layers))
            out, arena = blocks.attend_pages(
                weights, normed, state.arena, rows.table, *span, spec, model
            )
            state, beside = state.replace(arena=arena), (normed, out)
            return out
        number = next(recurrent_layers)
        if model.kernels == "pallas":
            place = (rows.read, rows.write, rows.row, exists, rows.length, rows.state_len, number)
            out, state = fused.mix_chunk(weights, normed, state, *place, spec, model)
            return out
        own = blocks.layer_frames(rows.read, number, model)
        old = blocks.read_layer_state(state.arena, own, exists, model)
        # Read per layer: one read for all would be fused into places past the next write.
        history = blocks.read_layer_conv(state.arena, rows.read, exists, number, model)
        lengths = (rows.length, rows.state_len)
        out, new, columns, records = mamba2.scan(
            weights, normed, old, from_bits(history), *lengths, spec, "xla"
        )
        tails = _join(tails, _tail(columns, records, *lengths, spec, model), number, model)
        # After the tails, or XLA keeps what they are cut from until the end: 271 in place of 86 MB for 512 tokens
        # of 173 M weights.
        # And after the pages, where an attention layer beside this one has read them.
        read = beside[1:] if beside[0] is normed else ()
        own = blocks.layer_frames(rows.write, number, model)
        own = own + blocks.zero_after(state, *tails, *read)
        state = state.replace(arena=blocks.write_layer_state(state.arena, own, new, model))
        return out

    valid = jnp.arange(rows.tokens.shape[1]) < rows.length[:, None]
    h = decoder.walk(params, rows.tokens, valid, model.config, mix, model.kernels)
    if tails:
        # Attention layers may follow the last recurrent one: their reads come before this write too.
        write = rows.write + blocks.zero_after(state, h)
        state = _write_tails(state, tails, rows.row, write, model)
    return h, state


def _tail(columns, records, length, state_len, spec, model: Model):
    """One layer's share of the ring and of the checkpoint after a chunk, as bits."""
    history, grain = spec.conv_width - 1, model.geometry.grain
    return (
        blocks.ring_bits(blocks.slice_tokens(columns, length, history), model),
        blocks.ring_bits(blocks.slice_tokens(records.xB, state_len, grain), model),
        blocks.slice_tokens(records.dt, state_len, grain),
        blocks.ring_bits(blocks.slice_tokens(columns, state_len, history), model),
    )


def _join(tails: tuple, tail: tuple, layer: int, model: Model) -> tuple:
    """The layers' tails [L, R, ...] with one more layer's in its place; none yet in an empty tuple."""
    layers = model.geometry.num_mamba2
    tails = tails or tuple(jnp.zeros((layers, *part.shape), part.dtype) for part in tail)
    put = jax.lax.dynamic_update_index_in_dim
    return tuple(put(all_, part, layer, 0) for all_, part in zip(tails, tail, strict=True))


def _write_tails(state: State, tails: tuple, row, write, model: Model) -> State:
    conv, xB, dt, checkpoint_conv = tails
    arena = blocks.write_conv(state.arena, write, checkpoint_conv, model)
    rings = [state.conv, state.xB, state.dt]
    for r in range(row.shape[0]):
        rings = [
            blocks.put_row(ring, tail[:, r : r + 1], row[r])
            for ring, tail in zip(rings, (conv, xB, dt), strict=True)
        ]
    return state.replace(arena=arena, conv=rings[0], xB=rings[1], dt=rings[2])

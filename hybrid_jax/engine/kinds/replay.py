"""Kinds that keep a record of each token since the checkpoint, as XLA runs them.

XLA writes rings at the end of a step and states by slices, since it would copy them otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from hybrid_jax.config import RecurrentMixer
from hybrid_jax.engine import frames
from hybrid_jax.engine.kinds.kind import (
    At,
    ChunkRows,
    FoldRows,
    LayerSteps,
    Tail,
    WindowPlan,
)
from hybrid_jax.engine.model import Model
from hybrid_jax.engine.rings import ring_bits, slice_tokens
from hybrid_jax.state import State, from_bits

Fields = dict[str, jax.Array]  # of records


class Recurrence(Protocol):
    """The arithmetic of a kind.

    T are tokens, S slots of a ring, W - 1 columns of E channels; states are [B, units, unit_words].
    """

    def share(self, params: Sequence[dict]) -> Any:
        """As in `LayerSteps`."""

    def project(self, params: dict, h: jax.Array, spec: RecurrentMixer) -> tuple[jax.Array, Any]:
        """h [B, T, D] to the raw inputs [B, T, E] of the convolution, and what else comes of it."""

    def records(
        self, params: dict, columns: jax.Array, rest: Any, spec: RecurrentMixer
    ) -> tuple[Fields, Any]:
        """Raw columns [B, W - 1 + T, E] to the records [B, T, ...] of the tokens, and what `read` needs beside them."""

    def read(
        self,
        params: dict,
        rest: Any,
        arena: jax.Array,
        own: jax.Array,
        plan: WindowPlan,
        ring: Fields,
        spec: RecurrentMixer,
    ) -> tuple[jax.Array, jax.Array]:
        """Outputs [B, T, D] of the tokens of a window, and the arena as it was.

        Args:
            rest: of `records`.
            own: int32[B, n] frames of the layer's checkpoints. ring: [B, S, ...] records, the new ones among them.
        """

    def scan(
        self,
        params: dict,
        h: jax.Array,
        state: jax.Array,
        history: jax.Array,
        rows: ChunkRows,
        spec: RecurrentMixer,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Fields]:
        """A chunk h [R, T, D] from a state and W - 1 columns: outputs [R, T, D], the state after `rows.state_len`
        tokens, all columns [R, W - 1 + T, E] and records [R, T, ...]."""

    def fold(
        self, shared: Any, state: jax.Array, ring: Fields, count: jax.Array, spec: RecurrentMixer
    ) -> jax.Array:
        """The state after the first `count` int32[B] records of rings [B, S, ...]."""


class Replay(LayerSteps):
    """`LayerSteps` of a recurrence on XLA."""

    def __init__(self, recurrence: Recurrence) -> None:
        self.recurrence = recurrence

    def share(self, params: Sequence[dict]) -> Any:
        return self.recurrence.share(params)

    def window(
        self, params: dict, h: jax.Array, state: State, at: At, plan: WindowPlan, model: Model
    ) -> tuple[jax.Array, State, Fields]:
        """The new records are put into a copy of the ring for this layer alone, and handed back."""
        rows, valid, (num_rows, width) = plan.rows, plan.valid, h.shape[:2]
        group = at.of(model.geometry)
        history = group.layout.columns
        old_ring = {name: ring[at.layer][:num_rows] for name, ring in state.rings[at.group].items()}
        raw, rest = self.recurrence.project(params, h, at.spec)
        raw = jnp.where(valid[..., None], raw, 0)
        old = from_bits(old_ring.pop("conv")).astype(raw.dtype)
        positions = rows.base[:, None] + jnp.arange(width)
        earlier = (positions >= rows.checkpoint[:, None]) & (positions < rows.begin[:, None])
        raw = jnp.where(earlier[..., None], old[:, history:], raw)
        columns = jnp.concatenate([old[:, :history], raw], axis=1)
        records, rest = self.recurrence.records(params, columns, rest, at.spec)
        new = {name: _stored(records[name], ring, model) for name, ring in old_ring.items()}
        starts = rows.base - rows.checkpoint
        if width == 1:
            slots = jnp.arange(next(iter(old_ring.values())).shape[1])
            here = (slots == starts[:, None]) & valid
        else:
            here = valid
        merged = {n: jnp.where(here[..., None], new[n], ring) for n, ring in old_ring.items()}
        read = {name: _read(ring, h.dtype) for name, ring in merged.items()}
        own = frames.layer_frames(plan.frames, at.layer, group)
        out, arena = self.recurrence.read(params, rest, state.arena, own, plan, read, at.spec)
        # The columns move on by the tokens after which the next window's base stands.
        moved = columns[:, width : width + history]
        complete = valid.any(1) & (rows.end == rows.base + width)
        kept = jnp.where(complete[:, None, None], moved, columns[:, :history])
        conv = ring_bits(jnp.concatenate([kept, columns[:, history:]], axis=1), model)
        stored = new if width == 1 else merged
        return out, state.replace(arena=arena), {"conv": conv, **stored}

    def chunk(
        self, params: dict, h: jax.Array, state: State, at: At, rows: ChunkRows, model: Model
    ) -> tuple[jax.Array, State, Tail]:
        group, exists = at.of(model.geometry), rows.start > 0
        own = frames.layer_frames(rows.read, at.layer, group)
        old = frames.read_state(state.arena, own, exists, group, model)
        # Read per layer: one read for all would be fused into places past the next write.
        history = frames.read_columns(state.arena, rows.read, exists, at.layer, group, model)
        out, new, columns, records = self.recurrence.scan(
            params, h, old, from_bits(history), rows, at.spec
        )
        count, grain = group.layout.columns, model.geometry.grain
        rings = {"conv": ring_bits(slice_tokens(columns, rows.length, count), model)}
        for name, ring in state.rings[at.group].items():
            if name != "conv":
                tail = slice_tokens(records[name], rows.state_len, grain)
                rings[name] = _stored(tail, ring, model)
        last = ring_bits(slice_tokens(columns, rows.state_len, count), model)
        return out, state, Tail(rings, last, new)

    def fold(self, state: State, at: At, rows: FoldRows, shared: Any, model: Model) -> State:
        """One (row, layer) at a time."""
        own = at.of(model.geometry)
        layers, rings = own.num_layers, state.rings[at.group]
        order = jnp.argsort(~rows.needed, stable=True)
        count, grain, columns = rows.needed.sum(), model.geometry.grain, own.layout.columns
        conv, records = (
            rings["conv"],
            {name: ring for name, ring in rings.items() if name != "conv"},
        )

        # The rings travel through the loops although these only read them: as loop invariants they would be
        # alive beside the loop's own copy when the window writes them later, and XLA would copy them.
        def fold_layer(i, carry):
            arena, records = carry
            row, layer = order[i // layers], i % layers

            def ring(array: jax.Array) -> jax.Array:
                part = jax.lax.dynamic_slice(array, (layer, row, 0, 0), (1, 1, *array.shape[2:]))
                return _read(part[0], model.activation_dtype)

            def of(slot: jax.Array) -> jax.Array:
                line = jax.lax.dynamic_slice_in_dim(state.slots, slot, 1)
                return frames.layer_frames(line, layer, own)

            exists = (rows.checkpoint[row] > 0)[None]
            old = frames.read_state(arena, of(rows.read_slot[row]), exists, own, model)
            line = jax.tree.map(lambda array: array[layer], shared)
            mine = {name: ring(array) for name, array in records.items()}
            new = self.recurrence.fold(line, old, mine, jnp.full(1, grain, jnp.int32), at.spec)
            return frames.write_state(arena, of(rows.write_slot[row]), new, own), records

        def fold_columns(i, carry):
            arena, conv = carry
            row = order[i]
            bits = jax.lax.dynamic_slice(conv, (0, row, 0, 0), (layers, 1, columns, conv.shape[3]))
            line = jax.lax.dynamic_slice_in_dim(state.slots, rows.write_slot[row], 1)
            return frames.write_columns(arena, line, bits, own), conv

        arena, records = jax.lax.fori_loop(0, count * layers, fold_layer, (state.arena, records))
        arena, conv = jax.lax.fori_loop(0, count, fold_columns, (arena, conv))
        return state.replace(arena=arena).with_ring(at.group, conv=conv, **records)


def _stored(record: jax.Array, ring: jax.Array, model: Model) -> jax.Array:
    """A field of records as its ring keeps it."""
    return record if ring.dtype == jnp.float32 else ring_bits(record, model)


def _read(ring: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `_stored`."""
    return ring if ring.dtype == jnp.float32 else from_bits(ring).astype(dtype)

"""Kinds that keep a record of each token since the checkpoint, as XLA runs them.

XLA writes rings at the end of a step and states by slices, because it would copy them otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.columns import (
    Convolution,
    WithColumns,
    convolve_window,
    fold_layers,
)
from hybrid_jax.engine.mixers.mixer import (
    Chunked,
    ChunkPlan,
    ChunkRows,
    CommitRows,
    Entry,
    FoldRows,
    Spec,
    Tail,
    Windowed,
    WindowPlan,
)
from hybrid_jax.engine.rings import move_records, ring_bits, slice_tokens
from hybrid_jax.geometry import StatePlace
from hybrid_jax.layers.cut import CutInput, MixerInput, size_of
from hybrid_jax.state import Model, State, from_bits

Fields = dict[str, jax.Array]  # of records


class Scanned(NamedTuple):
    """What the first layer of a group scanned in a chunk.

    Attributes:
        params: the layer's. state: float32[R, units, unit_words] before the chunk. records: [R, T, ...] of its tokens.
    """

    params: dict
    state: jax.Array
    records: Fields


class Past(NamedTuple):
    """What the tokens of a window follow: a layer's checkpoint and its records since then.

    Attributes:
        arena: uint32[U, W]. place, plan: of the layer, and of the window.
        ring: bits[B, S, ...] records as they are stored.
    """

    arena: jax.Array
    place: StatePlace
    plan: WindowPlan
    ring: Fields

    def frames(self) -> jax.Array:
        """Frames int32[B, n] of the state in the checkpoint, which is zero where `plan.exists` is false."""
        group = self.place.of(self.plan.model.geometry)
        return frames.layer_frames(self.plan.frames, self.place.layer, group)

    def state(self) -> jax.Array:
        """The state in the checkpoint, float32[B, units, unit_words]."""
        group, exists = self.place.of(self.plan.model.geometry), self.plan.exists
        return frames.read_state(self.arena, self.frames(), exists, group, self.plan.model)

    def records(self) -> Fields:
        """The records [B, S, ...] before the window's; those at and past its first token may hold anything."""
        return {
            name: _read(ring, self.plan.model.activation_dtype) for name, ring in self.ring.items()
        }

    def join(self, records: Fields) -> tuple[Fields, dict[str, Entry]]:
        """The ring's records with the window's own [B, T, ...] among them, and the entries that store these."""
        new = {
            name: _stored(records[name], ring, self.plan.model) for name, ring in self.ring.items()
        }
        merged, entries = _merge(self.ring, new, self.plan)
        return self._replace(ring=merged).records(), entries


class ReplayRecurrence(Convolution[Spec], Protocol[Spec]):
    """The arithmetic of a kind. T, W and E are as in `Convolution`; S is records that a ring has room for.

    States are [B, units, unit_words].
    """

    def prepare(self, params: Sequence[dict]) -> Any:
        """As in `StateSteps`."""

    def window(
        self, params: dict, convolved: Any, rest: Any, past: Past, spec: Spec
    ) -> tuple[jax.Array, jax.Array, dict[str, Entry]]:
        """The tokens of a window, which may be a tree, from what `convolve` and `project` give.

        Returns:
            Outputs [B, T, D], the arena as it was, and the entries from `past.join`.
        """

    def reread(
        self, params: dict, h: CutInput, past: Past, shared: Any, spec: Spec
    ) -> tuple[jax.Array, jax.Array]:
        """A layer that reads the state of its group: outputs [B, T, D], and the arena as it was.

        Args:
            past: of the group's first layer, with the window's own records in its ring. shared: what `prepare` made.
        """
        raise AssertionError(f"{type(self).__name__} has no form after a cut")

    def rescan(
        self, params: dict, h: CutInput, scanned: Scanned, rows: ChunkRows, spec: Spec
    ) -> jax.Array:
        """A chunk of a layer that reads the state of its group: outputs [R, T, D]."""
        raise AssertionError(f"{type(self).__name__} has no form after a cut")

    def scan(
        self,
        params: dict,
        h: MixerInput,
        state: jax.Array,
        history: jax.Array,
        rows: ChunkRows,
        spec: Spec,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Fields]:
        """A chunk h [R, T, D] from a state and W - 1 columns: outputs [R, T, D], the state after `rows.state_len`
        tokens, all columns [R, W - 1 + T, E] and records [R, T, ...]."""

    def fold(
        self, shared: Any, state: jax.Array, ring: Fields, count: jax.Array, spec: Spec
    ) -> jax.Array:
        """The state after the first `count` int32[B] records of rings [B, S, ...]."""


class Replay(WithColumns[Spec]):
    """`StateSteps` for a recurrence that XLA runs."""

    def __init__(self, recurrence: ReplayRecurrence[Spec]) -> None:
        self.recurrence = recurrence

    def prepare(self, params: Sequence[dict]) -> Any:
        return self.recurrence.prepare(params)

    def window(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: StatePlace,
        plan: WindowPlan,
        spec: Spec,
    ) -> Windowed:
        """Puts the new records into a copy of this layer's ring, and hands them back to be written later."""
        num_rows, _ = size_of(h)
        group = at.of(plan.model.geometry)
        old = {name: ring[at.layer][:num_rows] for name, ring in state.rings[at.group].items()}
        conv = old.pop("conv", None)
        made = convolve_window(self.recurrence, params, h, conv, group, plan)
        convolved, rest, moved = made
        past = Past(state.arena, at, plan, old)
        out, arena, entries = self.recurrence.window(params, convolved, rest, past, spec)
        return Windowed(out, state.replace(arena=arena), entries | moved)

    def reread(
        self,
        params: dict,
        h: CutInput,
        state: State,
        at: StatePlace,
        plan: WindowPlan,
        entries: dict[str, Entry],
        spec: Spec,
    ) -> Windowed:
        num_rows, _ = size_of(h)
        old = {name: ring[at.layer][:num_rows] for name, ring in state.rings[at.group].items()}
        old.pop("conv", None)
        new = {name: entry.values for name, entry in entries.items() if name in old}
        past = Past(state.arena, at, plan, _merge(old, new, plan)[0])
        out, arena = self.recurrence.reread(params, h, past, plan.shared[at.group], spec)
        return Windowed(out, state.replace(arena=arena))

    def commit(self, state: State, group: int, rows: CommitRows, model: Model) -> State:
        """Moves the records of a path together, too."""
        state = super().commit(state, group, rows, model)
        # `rings.write_window` has read the records that it wrote, to write the columns after them. These writes must
        # come later, or XLA would keep a copy.
        written = [ring for name, ring in state.rings[group].items() if name == "conv"]
        return move_records(state, group, rows, after=written)

    def chunk(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: StatePlace,
        plan: ChunkPlan,
        spec: Spec,
    ) -> Chunked:
        rows, model = plan
        group, exists = at.of(model.geometry), rows.start > 0
        own = frames.layer_frames(rows.read, at.layer, group)
        old = frames.read_state(state.arena, own, exists, group, model)
        # Read per layer, because one read for all layers would be fused into places past the next write.
        history = frames.read_columns(state.arena, rows.read, exists, at.layer, group, model)
        out, new, columns, records = self.recurrence.scan(
            params, h, old, from_bits(history), rows, spec
        )
        count, grain = group.layout.columns, model.geometry.grain
        rings = {}
        if count:
            conv = ring_bits(slice_tokens(columns, rows.length, count), model)
            rings["conv"] = Entry(conv)
        for name, ring in state.rings[at.group].items():
            if name != "conv":
                tail = slice_tokens(records[name], rows.state_len, grain)
                rings[name] = Entry(_stored(tail, ring, model))
        last = ring_bits(slice_tokens(columns, rows.state_len, count), model)
        stream = Scanned(params, old, records) if model.config.state_group > 1 else None
        return Chunked(out, state, Tail(rings, last, new), stream)

    def rescan(
        self,
        params: dict,
        h: CutInput,
        state: State,
        at: StatePlace,
        plan: ChunkPlan,
        stream: Any,
        spec: Spec,
    ) -> jax.Array:
        return self.recurrence.rescan(params, h, stream, plan.rows, spec)

    def fold(self, state: State, group: int, rows: FoldRows, shared: Any, model: Model) -> State:
        own, grain = model.geometry.groups[group], model.geometry.grain

        def folded(arena, rings, row, layer):
            def ring(array: jax.Array) -> jax.Array:
                part = jax.lax.dynamic_slice(array, (layer, row, 0, 0), (1, 1, *array.shape[2:]))
                return _read(part[0], model.activation_dtype)

            slots = jax.lax.dynamic_slice_in_dim(state.slots, rows.read_slot[row], 1)
            exists = (rows.checkpoint[row] > 0)[None]
            old = frames.layer_frames(slots, layer, own)
            old = frames.read_state(arena, old, exists, own, model)
            line = jax.tree.map(lambda array: array[layer], shared)
            mine = {name: ring(array) for name, array in rings.items()}
            return self.recurrence.fold(
                line, old, mine, jnp.full(1, grain, jnp.int32), own.layout.spec
            )

        return fold_layers(state, group, rows, folded, model)


def _merge(old: Fields, new: Fields, plan: WindowPlan) -> tuple[Fields, dict[str, Entry]]:
    """Rings [B, S, ...] with the new records [B, T, ...] among the old ones, and the entries to be written."""
    rows, valid = plan.rows, plan.valid
    width, room = valid.shape[1], next(iter(old.values())).shape[1]
    starts = rows.starts
    if width == room:  # a window as long as the ring begins where the ring does
        merged = {n: jnp.where(valid[..., None], new[n], ring) for n, ring in old.items()}
        return merged, {name: Entry(ring) for name, ring in merged.items()}
    entries = {name: Entry(record, starts) for name, record in new.items()}
    place = jnp.arange(room) - starts[:, None]
    if width == 1:
        here = (place == 0) & valid
    else:
        source = jnp.clip(place, 0, width - 1)
        here = (place == source) & jnp.take_along_axis(valid, source, axis=1)
        new = {n: jnp.take_along_axis(x, source[..., None], axis=1) for n, x in new.items()}
    return {n: jnp.where(here[..., None], new[n], ring) for n, ring in old.items()}, entries


def _stored(record: jax.Array, ring: jax.Array, model: Model) -> jax.Array:
    """A field of the records, in the form in which the ring keeps it."""
    return record if ring.dtype == jnp.float32 else ring_bits(record, model)


def _read(ring: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `_stored`."""
    return ring if ring.dtype == jnp.float32 else from_bits(ring).astype(dtype)

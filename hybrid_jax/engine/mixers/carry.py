"""Kinds that carry the state after each row's last token, as XLA runs them.

A fold copies the state into a checkpoint. If it is decided only after a window how many of its tokens stay, the ring
has a copy of the state for each number of tokens, and the row's length says which copy counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
    CommitRows,
    Entry,
    FoldRows,
    Spec,
    Tail,
    Windowed,
    WindowPlan,
)
from hybrid_jax.engine.rings import put_row, ring_bits, slice_tokens
from hybrid_jax.geometry import StatePlace
from hybrid_jax.state import Model, State, from_bits


class CarryRecurrence(Convolution[Spec], Protocol[Spec]):
    """The arithmetic of a kind. States are [B, units, unit_words]."""

    def advance(
        self,
        params: dict,
        convolved: Any,
        rest: Any,
        state: jax.Array,
        valid: jax.Array,
        kept: jax.Array,
        spec: Spec,
    ) -> tuple[jax.Array, jax.Array]:
        """What each token reads, [B, T, ...], and K states of each row.

        For exact mode a token must give the same bits wherever it stands among the T.

        Args:
            convolved, rest: from `convolve` and `project`. state: the state before the first token.
            valid: bool[B, T] tokens that are real; others leave the state as it is.
            kept: int32[B, K] numbers of tokens after which a state is wanted.

        Returns:
            What each token reads, and float32[B, K, units, unit_words].
        """

    def output(self, params: dict, y: jax.Array, rest: Any, spec: Spec) -> jax.Array:
        """Outputs [B, T, D] from what the tokens read, and the rest of the projection."""


class Carry(WithColumns[Spec]):
    """`StateSteps` for a recurrence that XLA runs."""

    def __init__(self, recurrence: CarryRecurrence[Spec]) -> None:
        self.recurrence = recurrence

    def prepare(self, params: Sequence[dict]) -> None:
        """Nothing, because a fold needs no weights."""

    def window(
        self,
        params: dict,
        h: jax.Array,
        state: State,
        at: StatePlace,
        plan: WindowPlan,
        spec: Spec,
    ) -> Windowed:
        rows, (num_rows, width) = plan.rows, h.shape[:2]
        group, ring = at.of(plan.model.geometry), state.rings[at.group]
        conv = ring["conv"][at.layer][:num_rows] if group.layout.columns else None
        made = convolve_window(self.recurrence, params, h, conv, group, plan)
        convolved, rest, moved = made
        count = ring["state"].shape[2]
        old = _states_at(ring["state"], at.layer, rows.begin % count)
        old = old.reshape(num_rows, group.layout.units, -1)
        if plan.aligned:  # a prompt's chunk begins at the checkpoint
            own = frames.layer_frames(plan.frames, at.layer, group)
            first = frames.read_state(state.arena, own, plan.exists, group, plan.model)
            old = jnp.where((rows.begin == rows.checkpoint)[:, None, None], first, old)
        # States are kept after the window's last token, or after each that may be the last to stay.
        new_tokens = count - 1 if not plan.commits else 1
        last = rows.end if plan.aligned else rows.base + width
        first = last - new_tokens
        kept = first[:, None] - rows.base[:, None] + 1 + jnp.arange(new_tokens)
        advance = functools.partial(self.recurrence.advance, params, spec=spec)
        if rows.ancestors is None:
            y, new = advance(convolved, rest, old, plan.valid, kept)
        else:
            y, new = _advance_tree(advance, (convolved, rest), old, plan.valid, rows.parents)
        out = self.recurrence.output(params, y, rest, spec)
        new = new.reshape(*new.shape[:2], -1)
        start = rows.end if plan.commits else first + 1
        live = plan.valid.any(1)
        zero = frames.zero_after(state, out)
        written, last = put_copies(ring["state"], new, at.layer, live, start % count, zero)
        # XLA may compute the new states from the columns once more, so these are written later. It knows the row of a
        # batch of one.
        later = frames.zero_after(state, last)
        for name, entry in moved.items():
            values = entry.values + later.astype(entry.values.dtype)
            moved[name] = entry.replace(values=values)
        return Windowed(out, state.with_ring(at.group, state=written), moved)

    def commit(self, state: State, group: int, rows: CommitRows, model: Model) -> State:
        """Copies the state after the last token of a path to where the row's length expects it, too."""
        state = super().commit(state, group, rows, model)
        if rows.path is None or rows.base is None:
            return state
        ring = state.rings[group]["state"]
        sources, targets = copies_of_path(rows, ring.shape[2])

        def put(b, ring):
            size = (ring.shape[0], 1, 1, ring.shape[3])
            copy = jax.lax.dynamic_slice(ring, (0, b, sources[b], 0), size)
            return put_row(ring, copy, b, targets[b])

        return state.with_ring(group, state=jax.lax.fori_loop(0, len(sources), put, ring))

    def chunk(
        self,
        params: dict,
        h: jax.Array,
        state: State,
        at: StatePlace,
        plan: ChunkPlan,
        spec: Spec,
    ) -> Chunked:
        rows, model = plan
        group, exists = at.of(model.geometry), rows.start > 0
        history, ring = group.layout.columns, state.rings[at.group]["state"]
        own = frames.layer_frames(rows.read, at.layer, group)
        old = frames.read_state(state.arena, own, exists, group, model)
        before = frames.read_columns(state.arena, rows.read, exists, at.layer, group, model)
        raw, rest = self.recurrence.project(params, h, spec)
        valid = jnp.arange(h.shape[1]) < rows.length[:, None]
        raw = jnp.where(valid[..., None], raw, 0)
        columns = jnp.concatenate([from_bits(before).astype(raw.dtype), raw], axis=1)
        kept = jnp.stack([rows.state_len, rows.length], axis=1)
        convolved = self.recurrence.convolve(params, columns, spec)
        y, new = self.recurrence.advance(params, convolved, rest, old, valid, kept, spec)
        out = self.recurrence.output(params, y, rest, spec)
        last = new[:, 1:].reshape(new.shape[0], 1, -1)
        start = None if ring.shape[2] == 1 else (rows.start + rows.length) % ring.shape[2]
        rings = {"state": Entry(last, start)}
        if history:
            conv = ring_bits(slice_tokens(columns, rows.length, history), model)
            rings["conv"] = Entry(conv)
        end = ring_bits(slice_tokens(columns, rows.state_len, history), model)
        return Chunked(out, state, Tail(rings, end, new[:, 0]))

    def fold(self, state: State, group: int, rows: FoldRows, shared: None, model: Model) -> State:
        layout, grain = model.geometry.groups[group].layout, model.geometry.grain

        def folded(arena, rings, row, layer):
            ring = rings["state"]
            copy = (rows.checkpoint[row] + grain) % ring.shape[2]
            words = jax.lax.dynamic_slice(ring, (layer, row, copy, 0), (1, 1, 1, ring.shape[3]))
            return words.reshape(1, layout.units, layout.unit_words)

        return fold_layers(state, group, rows, folded, model)


def copies_of_path(rows: CommitRows, count: int) -> tuple[jax.Array, jax.Array]:
    """Which copy of a state is the one after a path, and which one the row's length will ask for; both int32[B].

    They are the same where nothing stays.
    """
    assert rows.path is not None and rows.base is not None, "commit: of a path only"
    last = jnp.maximum(rows.count - 1, 0)[:, None]
    after = rows.base + 1 + jnp.take_along_axis(rows.path, last, axis=1)[:, 0]
    wanted = rows.base + rows.count
    return jnp.where(rows.count > 0, after, wanted) % count, wanted % count


def _states_at(ring: jax.Array, layer: int, which: jax.Array) -> jax.Array:
    """From each of B rows of a ring [L, B', copies, S], one copy of a layer's state: [B, S]."""
    rows, size = which.shape[0], ring.shape[3]
    if ring.shape[2] == 1:
        return ring[layer, :rows, 0]
    parts = [
        jax.lax.dynamic_slice(ring, (layer, b, which[b], 0), (1, 1, 1, size)) for b in range(rows)
    ]
    return jnp.concatenate(parts, axis=1).reshape(rows, size)


def put_copies(
    ring: jax.Array,
    new: jax.Array,
    layer: int,
    live: jax.Array,
    start: jax.Array,
    zero: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """A ring [L, B', copies, S] with new copies of one layer's states; after the last copy comes the first.

    Also an element of it that exists once all are written.

    The copies are written now and not at the end of the step, so that those of one layer exist at a time. A loop writes
    them, for the reason that `rings.write_window` gives.

    Args:
        new: [B, n, S]. live: bool[B] rows whose copies count. start: int32[B] where the first one goes.
        zero: 0, once everything has been read that comes before.
    """
    num_rows, parts, size = new.shape
    sink = ring.shape[1] - 1

    def put(i, carry):
        ring, b, part = carry[0], i // parts, i % parts
        value = jax.lax.dynamic_slice(new, (b, part, 0), (1, 1, size))[None]
        row, place = jnp.where(live[b], b, sink), (start[b] + part) % ring.shape[2]
        ring = put_row(ring, value, row, place, layer)
        return ring, ring[0, 0, 0, 0]

    return jax.lax.fori_loop(zero, num_rows * parts + zero, put, (ring, jnp.zeros((), ring.dtype)))


def _advance_tree(
    advance: Callable[..., tuple[jax.Array, jax.Array]],
    given: Sequence[Any],
    state: jax.Array,
    valid: jax.Array,
    parents: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Advances the tokens of a tree one after the other, each from its parent's state.

    Args:
        parents: as `WindowRows.parents`.

    Returns:
        What the tokens read, [B, T, ...], and the states after each of them.
    """
    rows, tokens = parents.shape
    one = jnp.ones((rows, 1), jnp.int32)

    def token(states: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        t, parent, own, valid = inputs
        # 0 stands for the state before the tree.
        first = jnp.take_along_axis(states, parent[:, None, None, None], axis=1)[:, 0]
        own = jax.tree.map(lambda part: part[:, None], own)
        y, new = advance(*own, first, valid[:, None], one)
        return jax.lax.dynamic_update_slice_in_dim(states, new, t + 1, axis=1), y[:, 0]

    states = jnp.zeros((rows, 1 + tokens, *state.shape[1:])).at[:, 0].set(state)
    first_axis = jax.tree.map(
        lambda part: jnp.moveaxis(part, 1, 0), (parents + 1, tuple(given), valid)
    )
    states, y = jax.lax.scan(token, states, (jnp.arange(tokens), *first_axis))
    return jnp.moveaxis(y, 0, 1), states[:, 1:]

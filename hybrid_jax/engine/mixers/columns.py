"""Convolution columns and folds, as XLA does them for every kind of recurrent layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.mixer import (
    CommitRows,
    Entry,
    FoldRows,
    LoadRows,
    Spec,
    StateSteps,
    WindowPlan,
)
from hybrid_jax.engine.rings import put_row, ring_bits
from hybrid_jax.geometry import StateGroup
from hybrid_jax.layers.cut import MixerInput
from hybrid_jax.state import Model, State, from_bits
from pallas_kernels.causal_conv.reference import tap_places


class Convolution(Protocol[Spec]):
    """What stands in front of a recurrence over T tokens: a projection, and a convolution of W taps and E channels."""

    def project(self, params: dict, h: MixerInput, spec: Spec) -> tuple[jax.Array, Any]:
        """From h [B, T, D], the raw inputs [B, T, E] of the convolution and the rest of the projection, [B, T, ...]."""

    def convolve(self, params: dict, columns: jax.Array, spec: Spec) -> Any:
        """From raw columns [B, W - 1 + T, E], arrays [B, T, ...]. None where there is no convolution.

        In a tree each token is a row of its own, so nothing may depend on B or T.
        """


# --- in a window ----------------------------------------------------------------------------------


def window_columns(
    raw: jax.Array, conv: jax.Array | None, history: int, plan: WindowPlan
) -> jax.Array:
    """The raw inputs [B, W - 1 + T, E] of a convolution: first those before the window, then the window's own.

    Args:
        raw: [B, T, E] inputs of the window's tokens. conv: bits[B, W - 1 + T', E] from the ring, which has the tokens
            before the new ones; None for a layer without a convolution. history: W - 1.
    """
    raw = jnp.where(plan.valid[..., None], raw, 0)
    if conv is None:
        return raw
    rows, width = plan.rows, raw.shape[1]
    old = from_bits(conv).astype(raw.dtype)
    positions = rows.base[:, None] + jnp.arange(width)
    earlier = (positions >= rows.checkpoint[:, None]) & (positions < rows.begin[:, None])
    raw = jnp.where(earlier[..., None], old[:, history : history + width], raw)
    return jnp.concatenate([old[:, :history], raw], axis=1)


def convolve_paths(
    convolve: Callable[[jax.Array], Any], columns: jax.Array, ancestors: jax.Array | None
) -> Any:
    """What a convolution makes of the tokens of a window: arrays [B, T, ...].

    Args:
        convolve: makes arrays [B', T', ...] of columns [B', W - 1 + T', E].
        columns: [B, W - 1 + T, E]. ancestors: as in `WindowRows`. In a tree each token has its own W columns.
    """
    if ancestors is None:
        return convolve(columns)
    rows, tokens = ancestors.shape
    paths = (ancestors[:, :, None] >> jnp.arange(tokens)) & 1 > 0
    places = tap_places(paths, columns.shape[1] - tokens)
    taken = jax.vmap(lambda one, at: one[at])(columns, places)  # [B, T, W, E]
    made = convolve(taken.reshape(rows * tokens, *taken.shape[2:]))
    return jax.tree.map(lambda part: part.reshape(rows, tokens, *part.shape[2:]), made)


def convolve_window(
    recurrence: Convolution[Spec],
    params: dict,
    h: MixerInput,
    conv: jax.Array | None,
    group: StateGroup,
    plan: WindowPlan,
) -> tuple[Any, Any, dict[str, Entry]]:
    """What `convolve` and `project` give for the tokens h [B, T, D] of a window, and the columns to be stored.

    Args:
        conv: as in `window_columns`.
    """
    layout = group.layout
    raw, rest = recurrence.project(params, h, layout.spec)
    columns = window_columns(raw, conv, layout.columns, plan)
    convolve = functools.partial(recurrence.convolve, params, spec=layout.spec)
    convolved = convolve_paths(convolve, columns, plan.rows.ancestors)
    if layout.columns == 0:
        return convolved, rest, {}
    moved = Entry(next_columns(columns, layout.columns, plan), renews=True)
    return convolved, rest, {"conv": moved}


def next_columns(columns: jax.Array, history: int, plan: WindowPlan) -> jax.Array:
    """The columns that a window leaves in the ring, bits[B, W - 1 + T, E].

    If the window's last token is committed, the columns move on, so that the next window begins after that token. For
    other windows `commit` moves them.
    """
    width = columns.shape[1] - history
    kept = columns[:, :history]
    if plan.commits:
        moves = plan.valid.any(1) & (plan.rows.end == plan.rows.base + width)
        kept = jnp.where(moves[:, None, None], columns[:, width : width + history], kept)
    return ring_bits(jnp.concatenate([kept, columns[:, history:]], axis=1), plan.model)


def read_columns(state: State, group: int, rows: LoadRows, model: Model) -> jax.Array:
    """The columns bits[L, B, W - 1, E] of all layers of a group in the rows' checkpoints."""
    own = model.geometry.groups[group]
    layers = range(own.num_layers)
    return jnp.stack(
        [
            frames.read_columns(state.arena, rows.frames, rows.exists, layer, own, model)
            for layer in layers
        ]
    )


class WithColumns(StateSteps[Spec]):
    """What all kinds do with the columns in their rings."""

    def commit(self, state: State, group: int, rows: CommitRows, model: Model) -> State:
        """Moves the columns: of all else, the row's length says what counts, unless tokens branch."""
        history = model.geometry.groups[group].layout.columns
        if history == 0:
            return state
        places = rows.last_columns(history)
        # The columns of a chain lie side by side.
        parts = 1 if rows.path is None else history

        def put(b, conv):
            size = (conv.shape[0], 1, history // parts, conv.shape[3])
            moved = [
                jax.lax.dynamic_slice(conv, (0, b, places[b, i], 0), size) for i in range(parts)
            ]
            return jax.lax.dynamic_update_slice(conv, jnp.concatenate(moved, 2), (0, b, 0, 0))

        conv = jax.lax.fori_loop(0, len(rows.count), put, state.rings[group]["conv"])
        return state.with_ring(group, conv=conv)

    def load(
        self, state: State, group: int, rows: LoadRows, model: Model
    ) -> tuple[State, list[jax.Array]]:
        if model.geometry.groups[group].layout.columns == 0:
            return state, []
        bits = read_columns(state, group, rows, model)
        conv, sink = state.rings[group]["conv"], state.tokens.shape[0] - 1
        for b in range(rows.needed.shape[0]):
            conv = put_row(conv, bits[:, b : b + 1], jnp.where(rows.needed[b], b, sink))
        return state.with_ring(group, conv=conv), [conv]


# --- folds ----------------------------------------------------------------------------------------


def fold_layers(
    state: State,
    group: int,
    rows: FoldRows,
    folded: Callable[[jax.Array, dict[str, jax.Array], jax.Array, jax.Array], jax.Array] | None,
    model: Model,
) -> State:
    """Writes the checkpoints of rows whose ring is full: states one (row, layer) at a time, columns one row at a time.

    Args:
        folded: makes the new state: arena, rings without the columns, row, layer -> float32[1, units, unit_words].
            None where there are only columns.
    """
    own, rings = model.geometry.groups[group], dict(state.rings[group])
    layers, columns = own.num_layers, own.layout.columns
    conv = rings.pop("conv", None)
    # One more than there are, so that the compiler does not know the row of a batch of one.
    order = jnp.argsort(~jnp.pad(rows.needed, (0, 1)), stable=True)
    count = rows.needed.sum()

    # The rings travel through the loops, although the loops only read them. As loop invariants they would be alive
    # beside the loop's own copy when the window writes them later, and XLA would copy them.
    def fold_layer(i, carry):
        arena, rings, _ = carry
        row, layer = order[i // layers], i % layers
        assert folded is not None
        new = folded(arena, rings, row, layer)
        target = jax.lax.dynamic_slice_in_dim(state.slots, rows.write_slot[row], 1)
        arena = frames.write_state(arena, frames.layer_frames(target, layer, own), new, own)
        return arena, rings, row

    def fold_columns(i, carry):
        arena, conv, _ = carry
        row = order[i]
        bits = jax.lax.dynamic_slice(conv, (0, row, 0, 0), (layers, 1, columns, conv.shape[3]))
        target = jax.lax.dynamic_slice_in_dim(state.slots, rows.write_slot[row], 1)
        return frames.write_columns(arena, target, bits, own), conv, row

    arena, last = state.arena, jnp.zeros_like(count)
    if folded is not None:
        carry = arena, rings, last
        arena, rings, last = jax.lax.fori_loop(0, count * layers, fold_layer, carry)
    if conv is not None:
        carry = arena, conv, last
        arena, rings["conv"], last = jax.lax.fori_loop(0, count, fold_columns, carry)
    # What these loops read leads only to the arena, and some kinds do not read that in a window. The window must still
    # come after them, because it writes the rings.
    tokens = state.tokens + frames.zero_after(state, last)
    return state.replace(arena=arena, tokens=tokens).with_ring(group, **rings)

"""Convolution columns and their folds, as every kind does them where layers are made of Pallas kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.columns import read_columns
from hybrid_jax.engine.mixers.mixer import CommitRows, FoldRows, LoadRows, Spec, StateSteps
from hybrid_jax.state import Model, State
from pallas_kernels.checkpoint import Columns, store_columns


class WithPallasColumns(StateSteps[Spec]):
    """What all kinds do with the columns in their rings."""

    def commit(self, state: State, group: int, rows: CommitRows, model: Model) -> State:
        """Moves the columns of all rows at once."""
        history = model.geometry.groups[group].layout.columns
        if history == 0:
            return state
        conv, count = state.rings[group]["conv"], len(rows.count)
        places = rows.last_columns(history)
        moved = jnp.take_along_axis(conv[:, :count], places[None, ..., None], axis=2)
        return state.with_ring(group, conv=conv.at[:, :count, :history].set(moved))

    def load(
        self, state: State, group: int, rows: LoadRows, model: Model
    ) -> tuple[State, list[jax.Array]]:
        """Loads all rows at once; a layer's kernel then has the ring to itself."""
        if model.geometry.groups[group].layout.columns == 0:
            return state, []
        bits, conv = read_columns(state, group, rows, model), state.rings[group]["conv"]
        place = jnp.index_exp[:, : rows.needed.shape[0], : bits.shape[2]]
        bits = jnp.where(rows.needed[:, None, None], bits, conv[place])
        return state.with_ring(group, conv=conv.at[place].set(bits)), [bits]


def fold_columns(state: State, group: int, rows: FoldRows, folds: jax.Array, model: Model) -> State:
    """Writes the columns of rows whose ring is full into their checkpoints, in one launch for all layers.

    Args:
        folds: int32[B], below 0 for rows that are left alone.
    """
    own = model.geometry.groups[group]
    if own.layout.columns == 0:
        return state
    write = frames.slot_frames(state, rows.write_slot)[:, own.columns]
    conv = state.rings[group]["conv"]
    arrays = Columns(state.arena, write, folds, conv)
    arena = store_columns(arrays, columns=own.layout.columns, implementation="pallas")
    # Before a window writes the ring: XLA might put the fold after that, and would copy the ring for it.
    arena, conv = jax.lax.optimization_barrier((arena, conv))
    return state.replace(arena=arena).with_ring(group, conv=conv)

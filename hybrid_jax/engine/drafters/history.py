"""The tokens of each row on the device, for drafters that look tokens up.

A row's history holds its committed tokens and the one that it feeds next. If nobody asks for it, there is none, and
all of this does nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.state import State


def note(
    state: State, rows: jax.Array, positions: jax.Array, tokens: jax.Array, count: jax.Array
) -> State:
    """Writes down the first `count` int32[B] of some tokens of each row.

    Args:
        rows: int32[B] ring rows.
        positions: int32[B] where the first token stands.
        tokens: int32[B, T].
    """
    history = state.drafting.get("history")
    if history is None:
        return state
    columns = history.shape[1]
    offsets = jnp.arange(tokens.shape[1])
    places = jnp.where(offsets < count[:, None], positions[:, None] + offsets, columns)
    return _replaced(state, history.at[rows[:, None], places].set(tokens, mode="drop"))


def load(state: State, row: jax.Array, tokens: jax.Array) -> State:
    """Writes a whole history int32[H] of one row."""
    history = state.drafting["history"]
    return _replaced(state, jax.lax.dynamic_update_slice(history, tokens[None], (row, 0)))


def copy(state: State, source: jax.Array, target: jax.Array) -> State:
    """Copies the history of one row to another."""
    history = state.drafting.get("history")
    if history is None:
        return state
    line = jax.lax.dynamic_slice_in_dim(history, source, 1)
    return _replaced(state, jax.lax.dynamic_update_slice(history, line, (target, 0)))


def _replaced(state: State, history: jax.Array) -> State:
    return state.replace(drafting=state.drafting | {"history": history})

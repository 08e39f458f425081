"""What drafters keep of each row on the device, in `State.drafting`. All of this does nothing where nobody asks for it.

A row's history holds its committed tokens and the one that it feeds next, for drafters that look tokens up. Its hidden
state is that of its last committed token, for a head that drafts from it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.engine.mixers.mixer import WindowRows
from hybrid_jax.models import decoder
from hybrid_jax.state import Model, State


def note_tokens(
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
    return _replaced(state, history=history.at[rows[:, None], places].set(tokens, mode="drop"))


def load_tokens(state: State, row: jax.Array, tokens: jax.Array) -> State:
    """Writes a whole history int32[H] of one row."""
    history = state.drafting["history"]
    return _replaced(state, history=jax.lax.dynamic_update_slice(history, tokens[None], (row, 0)))


def note_hidden(
    params: dict, state: State, rows: jax.Array, h: jax.Array, which: jax.Array, model: Model
) -> State:
    """Writes down the hidden states of the last tokens that stay.

    Args:
        rows: int32[B] ring rows. h: [B, D] before the last norm. which: bool[B] rows that have a new one.
    """
    hidden = state.drafting.get("hidden")
    if hidden is None:
        return state
    new = decoder.normed_hidden(params, h, model.config)
    new = jnp.where(which[:, None], new, hidden[rows])
    return _replaced(state, hidden=hidden.at[rows].set(new))


def forget_hidden(state: State, which: jax.Array) -> State:
    """Sets the hidden states of the first B rows to zero, for rows bool[B] whose last token nobody computed."""
    hidden = state.drafting.get("hidden")
    if hidden is None:
        return state
    kept = jnp.where(which[:, None], 0, hidden[: len(which)])
    return _replaced(state, hidden=hidden.at[: len(which)].set(kept))


def hidden_before(hidden: jax.Array, state: State, rows: WindowRows) -> jax.Array:
    """The hidden state before each token of a window, [B, T, D]; before a row's first one, what drafters keep.

    Args:
        hidden: [B, T, D] of the window's tokens, after the last norm.
    """
    num_rows, width, _ = hidden.shape
    own = state.drafting["hidden"][jnp.arange(num_rows)][:, None]
    if rows.ancestors is not None:
        places = rows.parents[:, :, None] + 1
        return jnp.take_along_axis(jnp.concatenate([own, hidden], axis=1), places, axis=1)
    shifted = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    first = jnp.arange(width) == (rows.begin - rows.base)[:, None]
    return jnp.where(first[:, :, None], own, shifted)


def copy_row(
    drafting: dict[str, jax.Array], source: jax.Array, target: jax.Array
) -> dict[str, jax.Array]:
    """A `State.drafting` in which one row has all that another has."""

    def copied(array: jax.Array) -> jax.Array:
        line = jax.lax.dynamic_slice_in_dim(array, source, 1)
        return jax.lax.dynamic_update_slice(array, line, (target, 0))

    return jax.tree.map(copied, drafting)


def _replaced(state: State, **arrays: jax.Array) -> State:
    return state.replace(drafting=state.drafting | arrays)

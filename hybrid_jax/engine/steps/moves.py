"""Small programs around the steps: they write lines of the slot table, and move rows to other places."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.engine import adjust, rings
from hybrid_jax.state import State


def write_slots(state: State, ids: jax.Array, frames: jax.Array) -> State:
    """Writes lines int32[n, F] of the slot table; padding repeats a real line."""
    return state.replace(slots=state.slots.at[ids].set(frames))


def move_row(state: State, source: jax.Array, target: jax.Array) -> State:
    """Moves one ring row to another place; the source is marked as stopped."""
    rows = jnp.arange(state.tokens.shape[0])
    tokens = jnp.where(rows == target, state.tokens[source], state.tokens)
    tokens = jnp.where(rows == source, -1, tokens)
    lengths = jnp.where(rows == target, state.lengths[source], state.lengths)
    moved = jax.tree.map(lambda ring: rings.copy_row(ring, source, target), state.rings)
    return state.replace(rings=moved, tokens=tokens, lengths=lengths)


# By the name of their programs. Their first argument is donated.
MOVES = {
    "write_slots": write_slots,
    "move_row": move_row,
    "load_adjust": adjust.load_row,
    "move_adjust": adjust.move_row,
}

"""Small programs around the steps: lines of the slot table, and rows that change their place."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.engine import adjust, rings
from hybrid_jax.state import State


def write_slots(state: State, ids: jax.Array, frames: jax.Array) -> State:
    """Lines int32[n, F] of the slot table; padding repeats a real line."""
    return state.replace(slots=state.slots.at[ids].set(frames))


def move_row(state: State, source: jax.Array, target: jax.Array) -> State:
    """Moves one ring row to another place; the source is left stopped."""

    token = jax.lax.dynamic_slice(state.tokens, (source,), (1,))
    tokens = jax.lax.dynamic_update_slice(state.tokens, token, (target,))
    tokens = jax.lax.dynamic_update_slice(tokens, jnp.full(1, -1, jnp.int32), (source,))
    moved = jax.tree.map(lambda ring: rings.copy_row(ring, source, target), state.rings)
    return state.replace(rings=moved, tokens=tokens)


# By the name of their programs. Their first argument is donated.
MOVES = {
    "write_slots": write_slots,
    "move_row": move_row,
    "load_adjust": adjust.load_row,
    "move_adjust": adjust.move_row,
}

"""Where rows stand, by what the device knows: committed lengths, and checkpoints that they lead to."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.engine.model import Model
from hybrid_jax.state import State


class Cursor(NamedTuple):
    """Of B rows that decode.

    Attributes:
        position: int32[B] of the next token. checkpoint, slot: int32[B] position and slot of the checkpoint.
    """

    position: jax.Array
    checkpoint: jax.Array
    slot: jax.Array


def cursor(
    state: State, known: jax.Array, read_slot: jax.Array, fold_slot: jax.Array, model: Model
) -> Cursor:
    """Where the first B rows stand, each with at least one token in its ring.

    The host may not know yet what plans in flight have brought; it knows what each row's checkpoint was before them,
    and the one slot of all later ones.

    Args:
        known: int32[B] positions of checkpoints that the host knows. read_slot: int32[B] their slots.
        fold_slot: int32[B] slots of later ones.
    """
    position = state.lengths[: known.shape[0]]
    last = jnp.maximum(position - 1, 0)
    checkpoint = last - last % model.geometry.grain
    return Cursor(position, checkpoint, jnp.where(checkpoint > known, fold_slot, read_slot))

"""Where rows stand by what the device knows: their committed lengths, and the checkpoints that follow from these."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.engine.model import Model
from hybrid_jax.state import State


class Cursor(NamedTuple):
    """Where B decoding rows stand.

    Attributes:
        position: int32[B] position of the next token. checkpoint, slot: int32[B] position and slot of the checkpoint.
    """

    position: jax.Array
    checkpoint: jax.Array
    slot: jax.Array


def cursor(
    state: State, known: jax.Array, read_slot: jax.Array, fold_slot: jax.Array, model: Model
) -> Cursor:
    """Where the first B rows stand. Each has at least one token in its ring.

    The host may not know yet what plans in flight have brought. It knows what each row's checkpoint was before them,
    and the one slot of all later checkpoints.

    Args:
        known: int32[B] positions of the checkpoints that the host knows. read_slot: int32[B] the slots of these.
        fold_slot: int32[B] slots of later checkpoints.
    """
    position = state.lengths[: known.shape[0]]
    last = jnp.maximum(position - 1, 0)
    checkpoint = last - last % model.geometry.grain
    return Cursor(position, checkpoint, jnp.where(checkpoint > known, fold_slot, read_slot))

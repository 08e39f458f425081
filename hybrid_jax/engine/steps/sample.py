"""The first token of a row, which prefill and fork draw alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.model import Model
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.state import State


def first_tokens(
    state: State,
    adjust: Adjust | None,
    logits: jax.Array,
    batch: jax.Array,
    positions: jax.Array,
    samples: jax.Array,
    layout: Layout,
    num_logprobs: int,
    model: Model,
) -> tuple[State, Adjust | None, Sampled]:
    """Samples the first token of each row, and stores it, or the mark of a stop, where decode will find it.

    Args:
        logits: float32[R, V]. batch: packed rows. samples: bool[R], true for rows whose prompt ends here.
        positions: int32[R] positions of these tokens, which are also the lengths of the rows from now on.
    """
    row = layout.get(batch, "row")
    sampled, fed, adjust = choose(
        logits, batch, layout, positions, samples, num_logprobs, adjust, row, model.sampler
    )
    tokens, lengths, rows = state.tokens, state.lengths, jnp.arange(state.tokens.shape[0])
    for r in range(row.shape[0]):
        tokens = jnp.where(rows == row[r], fed[r], tokens)
        lengths = jnp.where(rows == row[r], positions[r], lengths)
    return state.replace(tokens=tokens, lengths=lengths), adjust, sampled

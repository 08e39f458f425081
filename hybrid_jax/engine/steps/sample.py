"""First tokens of rows, and log-probabilities of prompts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.model import Model
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import Sampled, logprobs
from hybrid_jax.geometry import PROMPT_POSITIONS
from hybrid_jax.models import decoder
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


def prompt_logprobs(
    params: dict, h: jax.Array, tokens: jax.Array, *, model: Model, num_logprobs: int
) -> Sampled:
    """Log-probabilities of given tokens, a few positions at a time.

    Args:
        h: [R, T, D] hidden states before the last norm.
        tokens: int32[R, T] the token that follows each position.

    Returns:
        The tokens int32[R, T], and logprobs with the same leading axes.
    """
    count = min(num_logprobs, model.config.vocab_size)

    def blocks_of(x):
        x = x.reshape(-1, *x.shape[2:])
        x = jnp.pad(x, ((0, -x.shape[0] % PROMPT_POSITIONS), *((0, 0) for _ in x.shape[1:])))
        return x.reshape(-1, PROMPT_POSITIONS, *x.shape[1:])

    def some(block):
        return logprobs(decoder.logits(params, block[0], model.config), block[1], count)

    found = jax.lax.map(some, (blocks_of(h), blocks_of(tokens)))

    def whole(x):
        return x.reshape(-1, *x.shape[2:])[: tokens.size].reshape(*tokens.shape, *x.shape[2:])

    found = jax.tree.map(whole, found)
    return Sampled(tokens, found)

"""The definition, by sorting."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import FLOAT32, FLOATS, INTS, WORDS
from pallas_kernels.token_sampling.numbers import noise_keys, token_noise


class SamplingArrays(NamedTuple):
    """Arrays of `api.sample_tokens`.

    Attributes:
        logits: float32[B, V].
        keys: uint32[B, 2]. A row's noise is that of its key, into which its numbers below are folded first.
        temperature: float32[B], 0 takes the largest logit, the first of equal ones.
        top_k: int32[B], 0 for no limit. top_p: float32[B], 1 for no limit. min_p: float32[B], 0 for no limit.
        banned: int32[B, n] tokens that are not drawn, -1 where unused; n may be 0. A NaN is not drawn either; only
            for "xla" there must be none.
        sample_index, position: int32[B] numbers to fold into the keys, in this order; None for none.
    """

    logits: Annotated[jax.Array, FLOAT32, "B V"]
    keys: Annotated[jax.Array, WORDS, "B 2"]
    temperature: Annotated[jax.Array, FLOATS, "B"]
    top_k: Annotated[jax.Array, INTS, "B"]
    top_p: Annotated[jax.Array, FLOATS, "B"]
    min_p: Annotated[jax.Array, FLOATS, "B"]
    banned: Annotated[jax.Array, INTS, "B n"]
    sample_index: Annotated[jax.Array | None, INTS, "None B"] = None
    position: Annotated[jax.Array | None, INTS, "None B"] = None

    def noise_keys(self) -> jax.Array:
        """The keys uint32[B, 2] of the noise."""
        numbers = (self.sample_index, self.position)
        return noise_keys(self.keys, *(number for number in numbers if number is not None))

    def keyed(self) -> tuple[jax.Array, ...]:
        """The first seven arrays, with the keys of the noise."""
        return self.logits, self.noise_keys(), *self[2:7]


def sample_tokens_reference(arrays: SamplingArrays):
    """See `api.sample_tokens`."""
    logits, keys, temperature, top_k, top_p, min_p, banned = arrays.keyed()
    tokens = jnp.arange(logits.shape[1])
    gone = (tokens == banned[:, :, None]).any(1) | jnp.isnan(logits)
    logits = jnp.where(gone, -jnp.inf, logits)
    random = temperature > 0
    scaled = logits - logits.max(-1, keepdims=True)
    scaled = scaled / jnp.where(random, temperature, 1.0)[:, None]
    kept = jnp.where(scaled >= jnp.log(min_p)[:, None], scaled, -jnp.inf)  # log 0 is -inf
    ordered = -jnp.sort(-kept, axis=-1)
    last = jnp.clip(top_k - 1, 0, logits.shape[1] - 1)
    edge = jnp.take_along_axis(ordered, last[:, None], axis=-1)
    kept = jnp.where((top_k[:, None] > 0) & (kept < edge), -jnp.inf, kept)
    ordered = jnp.where((top_k[:, None] > 0) & (ordered < edge), -jnp.inf, ordered)
    weights = jnp.exp(ordered)
    ahead = jnp.cumsum(weights, axis=-1) - weights
    # Tokens needed to reach it, ties left aside, and the most likely one however little is asked for.
    needed = (ahead < (top_p * weights.sum(-1))[:, None]) | (tokens == 0)
    edge = jnp.where(needed, ordered, jnp.inf).min(-1, keepdims=True)
    kept = jnp.where((top_p[:, None] < 1.0) & (kept < edge), -jnp.inf, kept)
    drawn = jnp.where(random[:, None], kept + token_noise(keys, tokens[None]), logits)
    return jnp.argmax(drawn, axis=-1).astype(jnp.int32)

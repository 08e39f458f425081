"""From logits to tokens, inside a step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.engine.pack import Layout
from pallas_kernels.dispatch import Implementation
from pallas_kernels.token_sampling import SamplingArrays, sample_tokens
from pallas_kernels.token_sampling.groups import largest

# In place of a token, if the model's logits are not all finite. -1 stands for no token, and for unused stop ids.
NOT_FINITE = -2


class SamplingRows(NamedTuple):
    """Sampling parameters of B rows.

    Attributes:
        seed: uint32[B, 2] low and high words. sample_index: int32[B].
        temperature: float32[B], 0 is greedy. top_k: int32[B], 0 is all. top_p: float32[B]. min_p: float32[B].
        min_end: int32[B] the first absolute position at which a stop id may be drawn.
        stop_ids: int32[B, n], -1 where unused.
    """

    seed: jax.Array
    sample_index: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    min_end: jax.Array
    stop_ids: jax.Array


class Logprobs(NamedTuple):
    """chosen float32[B]; rank int32[B] from 1; ids int32[B, n] and values float32[B, n] of the n best."""

    chosen: jax.Array
    rank: jax.Array
    ids: jax.Array
    values: jax.Array


class Sampled(NamedTuple):
    """tokens int32[...], some of them perhaps NOT_FINITE; logprobs None or `Logprobs` with the same leading axes."""

    tokens: jax.Array
    logprobs: Logprobs | None


def unpack_sampling(layout: Layout, batch: jax.Array) -> SamplingRows:
    """Sampling parameters from the packed rows of a step."""

    def floats(name):
        return jax.lax.bitcast_convert_type(layout.get(batch, name), jnp.float32)

    return SamplingRows(
        seed=jax.lax.bitcast_convert_type(layout.get(batch, "seed"), jnp.uint32),
        sample_index=layout.get(batch, "sample_index"),
        temperature=floats("temperature"),
        top_k=layout.get(batch, "top_k"),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        min_end=layout.get(batch, "min_end"),
        stop_ids=layout.get(batch, "stop_ids"),
    )


def sample(
    logits: jax.Array, rows: SamplingRows, positions: jax.Array, sampler: Implementation = "xla"
) -> jax.Array:
    """Chooses a token per row: argmax of logits / temperature + Gumbel noise over the kept tokens.

    min_p, top_k and top_p filter in this order. The noise is a function of (seed, sample index, absolute position,
    token) alone. So a stream does not depend on its batch, on the cache, or on how its tokens were grouped into steps.

    Args:
        logits: float32[B, V].
        rows: sampling parameters.
        positions: int32[B] absolute position of the token being chosen.
        sampler: "pallas" or "triton" for a kernel; "xla" for the way that suits a CPU.

    Returns:
        int32[B] token ids.
    """
    given = SamplingArrays(
        logits=logits,
        keys=rows.seed,
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        banned=jnp.where((positions < rows.min_end)[:, None], rows.stop_ids, -1),
        sample_index=rows.sample_index,
        position=positions,
    )
    return sample_tokens(given, implementation=sampler)


def logprobs(logits: jax.Array, tokens: jax.Array, count: int) -> Logprobs:
    """Log-probabilities of the chosen tokens and of the `count` most likely ones, if there are so many; unscaled.

    Of equally likely tokens the one with the lower id comes first, as in `largest` and as greedy decoding takes them.
    """
    own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    before = jnp.arange(logits.shape[1]) < tokens[:, None]
    rank = ((logits > own) | ((logits == own) & before)).sum(-1).astype(jnp.int32) + 1
    best, ids = largest(logits, min(count, logits.shape[1]))
    return Logprobs((own - total)[:, 0], rank, ids, best - total)


def are_finite(logits: jax.Array) -> jax.Array:
    """bool[B]: whether all of a row's logits float32[B, V] are finite.

    It is their sum that is looked at: XLA's maximum on a CPU may skip a NaN, and comparisons take twice as long.
    """
    return jnp.isfinite(logits.sum(-1))


def stopped(tokens: jax.Array, rows: SamplingRows) -> jax.Array:
    """bool[B]: whether the token is one of the row's stop ids."""
    return (tokens[:, None] == rows.stop_ids).any(-1)

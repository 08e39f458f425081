"""From logits to tokens, inside a step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.engine.pack import Layout


class SamplingRows(NamedTuple):
    """Sampling parameters of B rows.

    Attributes:
        seed: uint32[B, 2] low and high words. sample_index: int32[B].
        temperature: float32[B], 0 is greedy. top_k: int32[B], 0 is all. top_p: float32[B].
        stop_ids: int32[B, n], -1 where unused.
    """

    seed: jax.Array
    sample_index: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    stop_ids: jax.Array


class Logprobs(NamedTuple):
    """chosen float32[B]; rank int32[B] from 1; ids int32[B, n] and values float32[B, n] of the n best."""

    chosen: jax.Array
    rank: jax.Array
    ids: jax.Array
    values: jax.Array


class Sampled(NamedTuple):
    """tokens int32[...]; logprobs None or `Logprobs` with the same leading axes."""

    tokens: jax.Array
    logprobs: Logprobs | None


def unpack_sampling(layout: Layout, batch: jax.Array) -> SamplingRows:
    def floats(name):
        return jax.lax.bitcast_convert_type(layout.get(batch, name), jnp.float32)

    return SamplingRows(
        seed=jax.lax.bitcast_convert_type(layout.get(batch, "seed"), jnp.uint32),
        sample_index=layout.get(batch, "sample_index"),
        temperature=floats("temperature"),
        top_k=layout.get(batch, "top_k"),
        top_p=floats("top_p"),
        stop_ids=layout.get(batch, "stop_ids"),
    )


def sample(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """Chooses a token per row: argmax of logits / temperature + Gumbel noise over the kept tokens.

    The noise is a function of (seed, sample index, absolute position) alone, so a stream does not depend
    on its batch, on the cache or on how its tokens were grouped into steps.

    Args:
        logits: float32[B, V].
        rows: sampling parameters.
        positions: int32[B] absolute position of the token being chosen.

    Returns:
        int32[B] token ids.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    random = rows.temperature > 0

    def draw():
        scaled = logits / jnp.where(random, rows.temperature, 1.0)[:, None]
        filters = random & ((rows.top_k > 0) | (rows.top_p < 1.0))
        kept = jax.lax.cond(filters.any(), _keep_likely, lambda s, _: s, scaled, rows)
        noise = jax.vmap(_noise, in_axes=(0, 0, 0, None))(
            rows.seed, rows.sample_index, positions, logits.shape[1]
        )
        return jnp.where(random, jnp.argmax(kept + noise, axis=-1).astype(jnp.int32), greedy)

    return jax.lax.cond(random.any(), draw, lambda: greedy)


def choose(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    samples: jax.Array,
    num_logprobs: int,
) -> tuple[Sampled, jax.Array]:
    """Samples a token per row, and says what the row feeds next.

    Args:
        logits: float32[B, V]. rows, positions: as in `sample`.
        samples: bool[B] rows whose token counts.
        num_logprobs: most likely tokens to report; 0 for no log-probabilities.

    Returns:
        What was sampled, and int32[B] the token to feed: -1 after a stop token and for rows that do not sample.
    """
    tokens = sample(logits, rows, positions)
    fed = jnp.where(samples & ~stopped(tokens, rows), tokens, -1)
    extra = None
    if num_logprobs:
        extra = logprobs(logits, tokens, min(num_logprobs, logits.shape[1]))
    return Sampled(tokens, extra), fed


def _noise(seed: jax.Array, sample_index: jax.Array, position: jax.Array, size: int) -> jax.Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _keep_likely(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """Top-k, then top-p on what is left: everything else becomes -inf. Ties at the edge all stay."""
    vocab = scaled.shape[1]
    order = _sortable(scaled)
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    edge = _largest_edge(order, jnp.ones_like(scaled), k.astype(jnp.float32))
    kept = jnp.where(order >= edge[:, None], scaled, -jnp.inf)
    probabilities = jax.nn.softmax(kept, axis=-1)
    edge = _largest_edge(order, probabilities, jnp.minimum(rows.top_p, 1.0))
    narrow = (rows.top_p < 1.0)[:, None]
    return jnp.where(narrow & (order < edge[:, None]), -jnp.inf, kept)


def _sortable(x: jax.Array) -> jax.Array:
    """float32 to int32 of the same order; both zeros are one."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    bits = jnp.where(x == 0, 0, bits)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_edge(order: jax.Array, weight: jax.Array, needed: jax.Array) -> jax.Array:
    """Largest int32 edge per row such that the weight of entries >= edge reaches `needed`: bisection, no sort."""

    def halve(_, bounds):
        low, high = bounds  # the edge `low` reaches it, `high` does not
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reached = jnp.where(order >= middle[:, None], weight, 0.0).sum(-1) >= needed
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low = jnp.full(order.shape[0], jnp.iinfo(jnp.int32).min, jnp.int32)
    high = order.max(-1)
    top = jnp.where(order >= high[:, None], weight, 0.0).sum(-1) >= needed
    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jnp.where(top, high, low)


def logprobs(logits: jax.Array, tokens: jax.Array, count: int) -> Logprobs:
    """Log-probabilities of the chosen tokens and of the `count` most likely, from the unscaled logits."""
    values = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(values, tokens[:, None], axis=-1)
    rank = (values > chosen).sum(-1).astype(jnp.int32) + 1
    best, ids = jax.lax.top_k(values, count)
    return Logprobs(chosen[:, 0], rank, ids, best)


def stopped(tokens: jax.Array, rows: SamplingRows) -> jax.Array:
    """bool[B]: the token is one of the row's stop ids."""
    return (tokens[:, None] == rows.stop_ids).any(-1)

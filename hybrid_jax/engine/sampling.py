"""From logits to tokens, inside a step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.engine.pack import Layout

BLOCK = 128  # tokens of the vocabulary that are looked at together
LIKELY_BLOCKS = 128  # blocks that filters are tried on first: those of the most likely tokens


class SamplingRows(NamedTuple):
    """Sampling parameters of B rows.

    Attributes:
        seed: uint32[B, 2] low and high words. sample_index: int32[B].
        temperature: float32[B], 0 is greedy. top_k: int32[B], 0 is all. top_p: float32[B]. min_p: float32[B].
        min_end: int32[B] the first absolute position where a stop id may be drawn.
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
        min_p=floats("min_p"),
        min_end=layout.get(batch, "min_end"),
        stop_ids=layout.get(batch, "stop_ids"),
    )


def sample(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """Chooses a token per row: argmax of logits / temperature + Gumbel noise over the kept tokens.

    min_p, top_k and top_p filter in this order. The noise is a function of (seed, sample index, absolute
    position, token) alone, so a stream does not depend on its batch, on the cache or on how its tokens were
    grouped into steps.

    Args:
        logits: float32[B, V].
        rows: sampling parameters.
        positions: int32[B] absolute position of the token being chosen.

    Returns:
        int32[B] token ids.
    """
    random = rows.temperature > 0
    early = positions < rows.min_end
    logits = jax.lax.cond(early.any(), _without_stops, lambda x, *_: x, logits, rows, early)
    greedy = _argmax(logits)

    def draw():
        scaled = logits - logits.max(-1, keepdims=True)
        scaled = scaled / jnp.where(random, rows.temperature, 1.0)[:, None]
        keys = noise_keys(rows, positions)
        filtered = random & ((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0))
        few, enough = jax.lax.cond(
            filtered.any(),
            lambda: _draw_among_likely(scaled, rows, keys),
            lambda: (greedy, jnp.zeros_like(random)),
        )
        left = random & ~(filtered & enough)
        every = jax.lax.cond(
            left.any(), lambda: _draw_among_all(scaled, rows, keys, filtered & left), lambda: greedy
        )
        return jnp.where(random, jnp.where(left, every, few), greedy)

    return jax.lax.cond(random.any(), draw, lambda: greedy)


def _without_stops(logits: jax.Array, rows: SamplingRows, early: jax.Array) -> jax.Array:
    """-inf for the stop ids of rows that may not end yet."""
    lines = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(early[:, None] & (rows.stop_ids >= 0), rows.stop_ids, logits.shape[1])
    return logits.at[lines, ids].set(-jnp.inf, mode="drop")


def _blocks(x: jax.Array) -> jax.Array:
    """x [B, V] as [B, n, BLOCK], -inf behind its end."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)), constant_values=-jnp.inf)
    return x.reshape(x.shape[0], -1, BLOCK)


def _argmax(x: jax.Array) -> jax.Array:
    """First of the largest of each row, int32[B]: by blocks, since XLA's CPU argmax does not vectorise."""
    if x.shape[1] <= BLOCK:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    blocks = _blocks(x)
    block = jnp.argmax(blocks.max(-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def _best_blocks(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The blocks of x [B, V] with the largest maxima: the `count` largest values lie in them.

    Of equal values the first count as larger, in blocks as in `lax.top_k`, so that both agree on these too.

    Returns:
        values [B, m] in the order of the vocabulary, their ids int32[B, m], and the largest value left out [B].
    """
    blocks = _blocks(x)
    rows, num_blocks, _ = blocks.shape
    if num_blocks <= count:
        ids = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape)
        return x, ids, jnp.full(rows, -jnp.inf)
    maxima, best = jax.lax.top_k(blocks.max(-1), count + 1)
    best = jnp.sort(best[:, :count], axis=-1)
    values = jnp.take_along_axis(blocks, best[:, :, None], axis=1).reshape(rows, -1)
    ids = (best[:, :, None] * BLOCK + jnp.arange(BLOCK)).reshape(rows, -1)
    return values, ids.astype(jnp.int32), maxima[:, -1]


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, which on a CPU sorts all it is given, on the blocks that hold the result."""
    values, ids, _ = _best_blocks(x, count)
    values, places = jax.lax.top_k(values, count)
    return values, jnp.take_along_axis(ids, places, axis=1)


# --- noise ----------------------------------------------------------------------------------------


def noise_keys(rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """uint32[B, 2]: a key per row from (seed, sample index, position), by threefry."""

    def fold(seed, sample_index, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(
            jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        )

    return jax.vmap(fold)(rows.seed, rows.sample_index, positions)


def token_noise(keys: jax.Array, tokens: jax.Array) -> jax.Array:
    """Standard Gumbel noise float32[B, n] of keys uint32[B, 2] at token ids int32[B, n] (or [1, n]).

    A hash of key and token (two rounds of 32-bit mixing, constants by C. Wellons' hash-prospector): any
    subset of a vocabulary costs what it is, and a whole one a fifth of threefry's bits.
    """
    bits = _mix(_mix(tokens.astype(jnp.uint32) + keys[:, :1]) ^ keys[:, 1:])
    # Precise where it matters: small values are large noise. Never 1, whose logarithm would be infinite.
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    uniform = jnp.minimum(uniform, jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


# --- filters --------------------------------------------------------------------------------------


def _draw_among_likely(scaled: jax.Array, rows: SamplingRows, keys: jax.Array) -> tuple:
    """Draws from the blocks of the most likely tokens alone.

    Args:
        scaled: float32[B, V], 0 at the most likely token. keys: uint32[B, 2].

    Returns:
        tokens int32[B]; enough bool[B], whether these blocks hold everything a row's filters keep.
    """
    values, ids, left_out = _best_blocks(scaled, LIKELY_BLOCKS)
    kept, lowest = _keep_likely(values, rows, _mass(scaled, rows))
    best = _argmax(kept + token_noise(keys, ids))
    tokens = jnp.take_along_axis(ids, best[:, None], axis=1)[:, 0]
    return tokens, (lowest > left_out) & (rows.top_k <= values.shape[1])


def _draw_among_all(scaled, rows: SamplingRows, keys, filtered: jax.Array) -> jax.Array:
    kept = jax.lax.cond(filtered.any(), keep_likely, lambda x, _: x, scaled, rows)
    return _argmax(kept + token_noise(keys, jnp.arange(scaled.shape[1])[None]))


def keep_likely(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """float32[B, V] with -inf for what min_p, top-k and top-p leave out: what the ways above are a way to."""
    shifted = scaled - scaled.max(-1, keepdims=True)
    kept = jax.lax.cond(
        ((rows.top_k > 0) | (rows.top_p < 1.0)).any(),
        lambda: _keep_likely(shifted, rows, _mass(shifted, rows))[0],
        lambda: jnp.where(shifted >= _floor(rows), shifted, -jnp.inf),
    )
    return jnp.where(kept > -jnp.inf, scaled, -jnp.inf)


def _floor(rows: SamplingRows) -> jax.Array:
    """float32[B, 1] least scaled logit that min_p keeps, the largest being 0."""
    return jnp.where(rows.min_p > 0, jnp.log(rows.min_p), -jnp.inf)[:, None]


def _mass(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """float32[B]: what the tokens weigh that min_p keeps, the most likely one 1."""
    return jnp.where(scaled >= _floor(rows), jnp.exp(scaled), 0.0).sum(-1)


def _keep_likely(
    scaled: jax.Array, rows: SamplingRows, mass: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """min_p, top-k, then top-p on what is left: everything else becomes -inf. Ties at an edge all stay.

    Args:
        scaled: float32[B, n], 0 at the most likely token; the whole vocabulary or its most likely part.
        rows: sampling parameters.
        mass: float32[B] `_mass` of the whole vocabulary.

    Returns:
        [B, n]; and float32[B] the least value the result depends on.
    """
    scaled = jnp.where(scaled >= _floor(rows), scaled, -jnp.inf)
    order = _sortable(scaled)
    by_count, by_mass = rows.top_k > 0, rows.top_p < 1.0
    k = jnp.where(by_count, jnp.minimum(rows.top_k, scaled.shape[1]), 0)
    edge = _largest_edge(order, jnp.ones_like(scaled), k.astype(jnp.float32))
    counted = jnp.where(by_count[:, None] & (order < edge[:, None]), -jnp.inf, scaled)
    weights = jnp.exp(counted)
    needed = rows.top_p * jnp.where(by_count, weights.sum(-1), mass)
    edge = _largest_edge(order, weights, needed)
    kept = jnp.where(by_mass[:, None] & (order < edge[:, None]), -jnp.inf, counted)
    decisive = jnp.where(by_count[:, None], counted, kept)
    return kept, jnp.where(decisive > -jnp.inf, decisive, jnp.inf).min(-1)


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


# --- what is reported -----------------------------------------------------------------------------


def logprobs(logits: jax.Array, tokens: jax.Array, count: int) -> Logprobs:
    """Log-probabilities of the chosen tokens and of the `count` most likely, from the unscaled logits."""
    own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    rank = (logits > own).sum(-1).astype(jnp.int32) + 1
    best, ids = largest(logits, count)
    return Logprobs((own - total)[:, 0], rank, ids, best - total)


def stopped(tokens: jax.Array, rows: SamplingRows) -> jax.Array:
    """bool[B]: the token is one of the row's stop ids."""
    return (tokens[:, None] == rows.stop_ids).any(-1)

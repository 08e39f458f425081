"""From logits to tokens, inside a step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.engine import token_groups
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.token_groups import GROUP, largest
from pallas_kernels.dispatch import Implementation
from pallas_kernels.token_sampling import SamplingArrays, sample_tokens
from pallas_kernels.token_sampling.numbers import gumbel, sortable, token_hash

# Groups of tokens that are tried before the whole vocabulary. With top-k and top-p these are the groups of the most
# likely tokens, first few and then more. Without them these are the groups with the largest bounds.
LIKELY_GROUPS, BOUNDED_GROUPS = (160, 1152), 128
BOUND_SLACK = 1e-3  # the last bits of the logarithm need not fall with its argument
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
    if sampler != "xla":
        given = SamplingArrays(
            *(logits, noise_keys(rows, positions), rows.temperature),
            *(rows.top_k, rows.top_p, rows.min_p, _banned(rows, positions)),
        )
        return sample_tokens(given, implementation=sampler)
    random = rows.temperature > 0
    scores = score(logits, rows, positions)
    greedy = _greedy(scores)

    def draw():
        keys = noise_keys(rows, positions)
        if scores.maxima.shape[1] <= BOUNDED_GROUPS:
            return jnp.where(random, draw_among_all(scores, rows, keys, random), greedy)
        edged = random & ((rows.top_k > 0) | (rows.top_p < 1.0))
        free = random & ~edged
        tokens, done = jax.lax.cond(
            free.any(),
            lambda: draw_by_bounds(scores, rows, keys),
            lambda: (greedy, jnp.zeros_like(random)),
        )
        done &= free
        mass = mass_of_all(scores, rows, edged)
        for count in LIKELY_GROUPS:
            left = edged & ~done
            likely, enough = jax.lax.cond(
                left.any(),
                lambda count=count: draw_among_likely(scores, rows, keys, mass, count),
                lambda: (greedy, jnp.zeros_like(random)),
            )
            tokens = jnp.where(left & enough, likely, tokens)
            done |= left & enough
        left = random & ~done
        every = jax.lax.cond(
            left.any(), lambda: draw_among_all(scores, rows, keys, left), lambda: greedy
        )
        return jnp.where(random, jnp.where(left, every, tokens), greedy)

    return jax.lax.cond(random.any(), draw, lambda: greedy)


# --- logits -------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Logits, and what every way to draw from them needs first.

    Attributes:
        logits: float32[B, V]. banned: int32[B, n] tokens that may not be drawn yet, -1 where unused.
        maxima: float32[B, ceil(V / GROUP)] largest logit of each group of neighbours, without banned tokens.
        top: float32[B, 1] largest logit. temperature: float32[B, 1], 1 for greedy rows.
    """

    logits: jax.Array
    banned: jax.Array
    maxima: jax.Array
    top: jax.Array
    temperature: jax.Array

    def scaled(self, logits: jax.Array) -> jax.Array:
        """Scaled logits float32[B, n], which are 0 for the most likely token."""
        return (logits - self.top) / self.temperature

    def of_groups(self, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits of the groups int32[B, m], one group after the other, and their token ids, both [B, m * GROUP]."""
        values, ids = token_groups.take(self.logits, places)
        banned = (ids[:, :, None] == self.banned[:, None]).any(-1)
        return jnp.where(banned, -jnp.inf, values), ids

    def of_all(self) -> jax.Array:
        """Scaled logits float32[B, V]."""
        return self.scaled(_without(self.logits, self.banned))


def score(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> Scores:
    """Finds the largest logits of a step, once for all ways to draw."""
    banned = _banned(rows, positions)
    maxima = jax.lax.cond(
        (banned >= 0).any(),
        lambda: token_groups.maxima(_without(logits, banned)),
        lambda: token_groups.maxima(logits),
    )
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    return Scores(logits, banned, maxima, maxima.max(-1, keepdims=True), temperature[:, None])


def _banned(rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """int32[B, n] tokens that may not be drawn yet, -1 where unused."""
    return jnp.where((positions < rows.min_end)[:, None], rows.stop_ids, -1)


def _without(logits: jax.Array, banned: jax.Array) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(banned >= 0, banned, logits.shape[1])
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def _greedy(scores: Scores) -> jax.Array:
    """The first of the most likely tokens of each row, int32[B]."""
    values, ids = scores.of_groups(token_groups.argmax(scores.maxima)[:, None])
    return token_groups.at(ids, jnp.argmax(values, axis=-1))


# --- noise ----------------------------------------------------------------------------------------


def noise_keys(rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """A key uint32[B, 2] for each row, made from (seed, sample index, position) by threefry."""

    def fold(seed, sample_index, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(
            jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        )

    return jax.vmap(fold)(rows.seed, rows.sample_index, positions)


def token_noise(keys: jax.Array, tokens: jax.Array) -> jax.Array:
    """Standard Gumbel noise float32[B, n] of keys uint32[B, 2] at token ids int32[B, n] (or [1, n]).

    The noise is a hash of key and token. So a part of a vocabulary costs only as much as it is large, and a whole
    vocabulary costs a fifth of threefry's bits.
    """
    return gumbel(token_hash(keys[:, :1], keys[:, 1:], tokens))


# --- ways to draw ---------------------------------------------------------------------------------


def mass_of_all(scores: Scores, rows: SamplingRows, which: jax.Array) -> jax.Array:
    """The `_mass` float32[B] of the whole vocabulary if any row of bool[B] `which` has top-p without top-k, else 0."""
    asked = which & (rows.top_k == 0) & (rows.top_p < 1.0)
    return jax.lax.cond(
        asked.any(), lambda: _mass(scores.of_all(), rows), lambda: jnp.zeros(which.shape)
    )


def draw_among_likely(
    scores: Scores, rows: SamplingRows, keys: jax.Array, mass: jax.Array, count: int
) -> tuple:
    """Draws from only those groups that hold the `count` most likely tokens.

    Args:
        keys: uint32[B, 2]. mass: float32[B], from `mass_of_all`.

    Returns:
        tokens int32[B]; enough bool[B], whether these groups hold everything that a row's filters keep.
    """
    places, left_out = token_groups.best(scores.maxima, count)
    values, ids = scores.of_groups(places)
    kept, lowest = _keep_likely(scores.scaled(values), rows, mass)
    tokens = token_groups.at(ids, token_groups.argmax(kept + token_noise(keys, ids)))
    less = scores.scaled(left_out[:, None])[:, 0]
    return tokens, lowest > less


def draw_by_bounds(scores: Scores, rows: SamplingRows, keys: jax.Array) -> tuple:
    """Draws from all tokens that min_p keeps, but looks only at groups that may hold the best token.

    No token of a group can reach more than the group's largest scaled logit plus the noise of its smallest hash. So the
    logarithms of the noise are taken for the groups, and for the tokens of the few best groups, in place of the whole
    vocabulary.

    Returns:
        tokens int32[B]; proven bool[B], whether no other group can hold a better token.
    """
    maxima, floor = scores.scaled(scores.maxima), _floor(rows)
    tokens = jnp.arange(maxima.shape[1] * GROUP)[None]
    hashes = token_hash(keys[:, :1], keys[:, 1:], tokens).reshape(*maxima.shape, GROUP).min(-1)
    # Without the barrier, XLA hashes again for each use inside the logarithms.
    hashes = jax.lax.optimization_barrier(hashes)
    bounds = jnp.where(maxima >= floor, maxima + gumbel(hashes), -jnp.inf)
    places, left_out = token_groups.best(bounds, BOUNDED_GROUPS)
    values, ids = scores.of_groups(places)
    scaled = scores.scaled(values)
    drawn = jnp.where(scaled >= floor, scaled, -jnp.inf) + token_noise(keys, ids)
    return token_groups.at(ids, token_groups.argmax(drawn)), drawn.max(-1) > left_out + BOUND_SLACK


def draw_among_all(
    scores: Scores, rows: SamplingRows, keys: jax.Array, which: jax.Array
) -> jax.Array:
    """Draws tokens int32[B] from the whole vocabulary. Rows outside bool[B] `which` may get any token."""
    scaled = scores.of_all()
    filtered = which & ((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0))
    kept = jax.lax.cond(filtered.any(), keep_likely, lambda x, _: x, scaled, rows)
    drawn = kept + token_noise(keys, jnp.arange(scaled.shape[1])[None])
    return token_groups.argmax(drawn)


# --- filters --------------------------------------------------------------------------------------


def keep_likely(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """float32[B, V] with -inf for all that min_p, top-k and top-p leave out; the ways above are shortcuts for this."""
    shifted = scaled - scaled.max(-1, keepdims=True)
    kept = jax.lax.cond(
        ((rows.top_k > 0) | (rows.top_p < 1.0)).any(),
        lambda: _keep_likely(shifted, rows, _mass(shifted, rows))[0],
        lambda: jnp.where(shifted >= _floor(rows), shifted, -jnp.inf),
    )
    return jnp.where(kept > -jnp.inf, scaled, -jnp.inf)


def _floor(rows: SamplingRows) -> jax.Array:
    """The least scaled logit float32[B, 1] that min_p keeps; the largest logit is 0."""
    return jnp.where(rows.min_p > 0, jnp.log(rows.min_p), -jnp.inf)[:, None]


def _mass(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """The weight float32[B] of the tokens that min_p keeps; the most likely token weighs 1."""
    return jnp.where(scaled >= _floor(rows), jnp.exp(scaled), 0.0).sum(-1)


def _keep_likely(
    scaled: jax.Array, rows: SamplingRows, mass: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Applies min_p, then top-k, then top-p on what is left; everything else becomes -inf. Ties at an edge all stay.

    Args:
        scaled: float32[B, n], 0 at the most likely token; the whole vocabulary or its most likely part.
        rows: sampling parameters.
        mass: float32[B] `_mass` of the whole vocabulary.

    Returns:
        [B, n]; and float32[B] the least value that the result depends on.
    """
    scaled = jnp.where(scaled >= _floor(rows), scaled, -jnp.inf)
    order = sortable(scaled)
    by_count, by_mass = rows.top_k > 0, rows.top_p < 1.0
    k = jnp.where(by_count, jnp.minimum(rows.top_k, scaled.shape[1]), 0)
    nowhere = jnp.full(k.shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    edge = jax.lax.cond(
        by_count.any(),
        lambda: token_groups.largest_edge(order, jnp.ones_like(scaled), k.astype(jnp.float32)),
        lambda: nowhere,
    )
    counted = jnp.where(by_count[:, None] & (order < edge[:, None]), -jnp.inf, scaled)
    weights = jnp.exp(counted)
    needed = rows.top_p * jnp.where(by_count, weights.sum(-1), mass)
    edge = token_groups.largest_edge(order, weights, needed)
    kept = jnp.where(by_mass[:, None] & (order < edge[:, None]), -jnp.inf, counted)
    decisive = jnp.where(by_count[:, None], counted, kept)
    return kept, jnp.where(decisive > -jnp.inf, decisive, jnp.inf).min(-1)


# --- what is reported -----------------------------------------------------------------------------


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

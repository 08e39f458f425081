"""Sampling by what XLA makes of it on a CPU: few tokens are looked at where few can be drawn, and nothing is sorted."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.token_sampling import groups
from pallas_kernels.token_sampling.groups import GROUP
from pallas_kernels.token_sampling.numbers import gumbel, sortable, token_hash, token_noise
from pallas_kernels.token_sampling.reference import SamplingArrays

# Groups of tokens that are tried before the whole vocabulary. With top-k and top-p these are the groups of the most
# likely tokens, first few and then more. Without them these are the groups with the largest bounds.
LIKELY_GROUPS, BOUNDED_GROUPS = (160, 1152), 128
BOUND_SLACK = 1e-3  # the last bits of the logarithm need not fall with its argument


def sample_tokens_xla(arrays: SamplingArrays) -> jax.Array:
    """See `api.sample_tokens`. Noise is made only where a row is drawn at random."""
    random = arrays.temperature > 0
    scores = score(arrays)
    greedy = _greedy(scores)

    def draw():
        keys = arrays.noise_keys()
        if scores.maxima.shape[1] <= BOUNDED_GROUPS:
            return jnp.where(random, draw_among_all(scores, arrays, keys, random), greedy)
        edged = random & ((arrays.top_k > 0) | (arrays.top_p < 1.0))
        free = random & ~edged
        tokens, done = jax.lax.cond(
            free.any(),
            lambda: draw_by_bounds(scores, arrays, keys),
            lambda: (greedy, jnp.zeros_like(random)),
        )
        done &= free
        mass = mass_of_all(scores, arrays, edged)
        for count in LIKELY_GROUPS:
            left = edged & ~done
            likely, enough = jax.lax.cond(
                left.any(),
                lambda count=count: draw_among_likely(scores, arrays, keys, mass, count),
                lambda: (greedy, jnp.zeros_like(random)),
            )
            tokens = jnp.where(left & enough, likely, tokens)
            done |= left & enough
        left = random & ~done
        every = jax.lax.cond(
            left.any(), lambda: draw_among_all(scores, arrays, keys, left), lambda: greedy
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
        values, ids = groups.take(self.logits, places)
        banned = (ids[:, :, None] == self.banned[:, None]).any(-1)
        return jnp.where(banned, -jnp.inf, values), ids

    def of_all(self) -> jax.Array:
        """Scaled logits float32[B, V]."""
        return self.scaled(_without(self.logits, self.banned))


def score(arrays: SamplingArrays) -> Scores:
    """Finds the largest logits of a step, once for all ways to draw."""
    logits, banned = arrays.logits, arrays.banned
    maxima = jax.lax.cond(
        (banned >= 0).any(),
        lambda: groups.maxima(_without(logits, banned)),
        lambda: groups.maxima(logits),
    )
    temperature = jnp.where(arrays.temperature > 0, arrays.temperature, 1.0)
    return Scores(logits, banned, maxima, maxima.max(-1, keepdims=True), temperature[:, None])


def _without(logits: jax.Array, banned: jax.Array) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(banned >= 0, banned, logits.shape[1])
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def _greedy(scores: Scores) -> jax.Array:
    """The first of the most likely tokens of each row, int32[B]."""
    values, ids = scores.of_groups(groups.argmax(scores.maxima)[:, None])
    return groups.at(ids, jnp.argmax(values, axis=-1))


# --- ways to draw ---------------------------------------------------------------------------------


def mass_of_all(scores: Scores, arrays: SamplingArrays, which: jax.Array) -> jax.Array:
    """The `_mass` float32[B] of the whole vocabulary if any row of bool[B] `which` has top-p without top-k, else 0."""
    asked = which & (arrays.top_k == 0) & (arrays.top_p < 1.0)
    return jax.lax.cond(
        asked.any(), lambda: _mass(scores.of_all(), arrays), lambda: jnp.zeros(which.shape)
    )


def draw_among_likely(
    scores: Scores, arrays: SamplingArrays, keys: jax.Array, mass: jax.Array, count: int
) -> tuple:
    """Draws from only those groups that hold the `count` most likely tokens.

    Args:
        keys: uint32[B, 2]. mass: float32[B], from `mass_of_all`.

    Returns:
        tokens int32[B]; enough bool[B], whether these groups hold everything that a row's filters keep.
    """
    places, left_out = groups.best(scores.maxima, count)
    values, ids = scores.of_groups(places)
    kept, lowest = _keep_likely(scores.scaled(values), arrays, mass)
    tokens = groups.at(ids, groups.argmax(kept + token_noise(keys, ids)))
    less = scores.scaled(left_out[:, None])[:, 0]
    return tokens, lowest > less


def draw_by_bounds(scores: Scores, arrays: SamplingArrays, keys: jax.Array) -> tuple:
    """Draws from all tokens that min_p keeps, but looks only at groups that may hold the best token.

    No token of a group can reach more than the group's largest scaled logit plus the noise of its smallest hash. So the
    logarithms of the noise are taken for the groups, and for the tokens of the few best groups, in place of the whole
    vocabulary.

    Returns:
        tokens int32[B]; proven bool[B], whether no other group can hold a better token.
    """
    maxima, floor = scores.scaled(scores.maxima), _floor(arrays)
    tokens = jnp.arange(maxima.shape[1] * GROUP)[None]
    hashes = token_hash(keys[:, :1], keys[:, 1:], tokens).reshape(*maxima.shape, GROUP).min(-1)
    # Without the barrier, XLA hashes again for each use inside the logarithms.
    hashes = jax.lax.optimization_barrier(hashes)
    bounds = jnp.where(maxima >= floor, maxima + gumbel(hashes), -jnp.inf)
    places, left_out = groups.best(bounds, BOUNDED_GROUPS)
    values, ids = scores.of_groups(places)
    scaled = scores.scaled(values)
    drawn = jnp.where(scaled >= floor, scaled, -jnp.inf) + token_noise(keys, ids)
    return groups.at(ids, groups.argmax(drawn)), drawn.max(-1) > left_out + BOUND_SLACK


def draw_among_all(
    scores: Scores, arrays: SamplingArrays, keys: jax.Array, which: jax.Array
) -> jax.Array:
    """Draws tokens int32[B] from the whole vocabulary. Rows outside bool[B] `which` may get any token."""
    scaled = scores.of_all()
    filtered = which & ((arrays.top_k > 0) | (arrays.top_p < 1.0) | (arrays.min_p > 0))
    kept = jax.lax.cond(filtered.any(), keep_likely, lambda x, _: x, scaled, arrays)
    drawn = kept + token_noise(keys, jnp.arange(scaled.shape[1])[None])
    return groups.argmax(drawn)


# --- filters --------------------------------------------------------------------------------------


def keep_likely(scaled: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """float32[B, V] with -inf for all that min_p, top-k and top-p leave out; the ways above are shortcuts for this."""
    shifted = scaled - scaled.max(-1, keepdims=True)
    kept = jax.lax.cond(
        ((arrays.top_k > 0) | (arrays.top_p < 1.0)).any(),
        lambda: _keep_likely(shifted, arrays, _mass(shifted, arrays))[0],
        lambda: jnp.where(shifted >= _floor(arrays), shifted, -jnp.inf),
    )
    return jnp.where(kept > -jnp.inf, scaled, -jnp.inf)


def _floor(arrays: SamplingArrays) -> jax.Array:
    """The least scaled logit float32[B, 1] that min_p keeps; the largest logit is 0."""
    return jnp.where(arrays.min_p > 0, jnp.log(arrays.min_p), -jnp.inf)[:, None]


def _mass(scaled: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """The weight float32[B] of the tokens that min_p keeps; the most likely token weighs 1."""
    return jnp.where(scaled >= _floor(arrays), jnp.exp(scaled), 0.0).sum(-1)


def _keep_likely(
    scaled: jax.Array, arrays: SamplingArrays, mass: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Applies min_p, then top-k, then top-p on what is left; everything else becomes -inf. Ties at an edge all stay.

    Args:
        scaled: float32[B, n], 0 at the most likely token; the whole vocabulary or its most likely part.
        arrays: sampling parameters.
        mass: float32[B] `_mass` of the whole vocabulary.

    Returns:
        [B, n]; and float32[B] the least value that the result depends on.
    """
    scaled = jnp.where(scaled >= _floor(arrays), scaled, -jnp.inf)
    order = sortable(scaled)
    by_count, by_mass = arrays.top_k > 0, arrays.top_p < 1.0
    k = jnp.where(by_count, jnp.minimum(arrays.top_k, scaled.shape[1]), 0)
    nowhere = jnp.full(k.shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    edge = jax.lax.cond(
        by_count.any(),
        lambda: groups.largest_edge(order, jnp.ones_like(scaled), k.astype(jnp.float32)),
        lambda: nowhere,
    )
    counted = jnp.where(by_count[:, None] & (order < edge[:, None]), -jnp.inf, scaled)
    weights = jnp.exp(counted)
    needed = arrays.top_p * jnp.where(by_count, weights.sum(-1), mass)
    edge = groups.largest_edge(order, weights, needed)
    kept = jnp.where(by_mass[:, None] & (order < edge[:, None]), -jnp.inf, counted)
    decisive = jnp.where(by_count[:, None], counted, kept)
    return kept, jnp.where(decisive > -jnp.inf, decisive, jnp.inf).min(-1)

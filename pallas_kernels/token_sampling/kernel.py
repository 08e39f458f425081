"""Sampling on a GPU: one program per row, and one launch whatever the rows ask for.

A program walks over its logits, which stay in the L2 cache: once for the largest, once more to draw, and 16 times for
each of top-k and top-p, whose edges are found by bisection of the values' bits, two bits a walk. Rows that ask for
less walk less.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.token_sampling.numbers import gumbel, middle, sortable, token_hash
from pallas_kernels.token_sampling.reference import SamplingArrays
from pallas_kernels.triton import Ref, call, cdiv, iota, load

BLOCK = 2048  # 4 values in each of 512 threads
NUM_WARPS = 16
LOWEST = -(2**31)


def _sample_kernel(
    logits_ref: Ref,  # [B, V]
    keys_ref: Ref,  # [B, 2]
    temperature_ref: Ref,  # [B]
    top_k_ref: Ref,  # [B]
    top_p_ref: Ref,  # [B]
    min_p_ref: Ref,  # [B]
    banned_ref: Ref,  # [B, n]
    tokens_ref: Ref,  # [B]
):
    row = pl.program_id(0)
    vocab, blocks = logits_ref.shape[1], cdiv(logits_ref.shape[1], BLOCK)
    temperature = temperature_ref[row]
    random = temperature > 0
    none = jnp.full((BLOCK,), -jnp.inf, jnp.float32)
    nothing = jnp.zeros((BLOCK,), jnp.float32)

    ban_place = iota(banned_ref.shape[1])
    bans = load(banned_ref, row, ban_place, mask=ban_place < banned_ref.shape[1], other=-1)
    # The list of banned tokens is as wide as the longest of the batch; most rows have none, and their loop is empty.
    num_banned = jnp.max(jnp.where(bans >= 0, ban_place + 1, 0))  # hardly ever more than none

    def block(i: jax.Array):
        """Token ids and their logits, -inf where there is none or it is banned."""
        ids = i * BLOCK + iota(BLOCK)
        x = load(logits_ref, row, ids, mask=ids < vocab, other=-jnp.inf)
        ban = lambda j, x: jnp.where(ids == banned_ref[row, j], -jnp.inf, x)
        return ids, jax.lax.fori_loop(0, num_banned, ban, x)

    # Maxima of each lane first, across lanes once at the end. Of equal scores the first token wins, in any order of
    # blocks.
    def best(score: Callable):
        """First token of the largest score, and that score."""

        def look(i: jax.Array, carry: tuple):
            value, place = carry
            ids, x = block(i)
            x = score(ids, x)
            return jnp.where(x > value, x, value), jnp.where(x > value, ids, place)

        start = none, jnp.full((BLOCK,), vocab, jnp.int32)
        value, place = jax.lax.fori_loop(0, blocks, look, start)
        top = jnp.max(value)
        first = jnp.min(jnp.where(value == top, place, vocab))
        return jnp.where(first == vocab, 0, first), top

    # The largest logit is needed by all: it is the token of a greedy row, and what others are scaled by, so that no
    # exponential overflows.
    token, top = best(lambda ids, x: x)
    tokens_ref[row] = token

    # A greedy row is done after one walk; a branch skips all the rest.
    @pl.when(random)
    def _():
        min_p, top_p = min_p_ref[row], top_p_ref[row]
        floor = jnp.where(min_p > 0, jnp.log(min_p), -jnp.inf)

        def scaled(x: jax.Array):
            x = (x - top) / temperature
            return jnp.where(x >= floor, x, -jnp.inf)

        def largest_edge(asked: jax.Array, weight: Callable, needed: jax.Array):
            """Largest edge such that what weighs at or above it reaches `needed`, as bits; the lowest if not asked.

            Two steps of the bisection a walk.
            """

            # A bisection over the bits of the values: no sort, and exact. Three edges a walk halve the number of
            # walks, whose cost is reading.
            def walk(_: jax.Array, bounds: tuple):
                low, high = bounds
                half = middle(low, high)
                edges = (middle(low, half), half, middle(half, high))

                def add(i: jax.Array, sums: tuple):
                    _, x = block(i)
                    x = scaled(x)
                    order, weights = sortable(x), weight(x)
                    return tuple(
                        s + jnp.where(order >= edge, weights, 0.0)
                        for s, edge in zip(sums, edges, strict=True)
                    )

                sums = jax.lax.fori_loop(0, blocks, add, (nothing, nothing, nothing))
                first, second, third = (jnp.sum(s) >= needed for s in sums)
                low_if = jnp.where(third, edges[2], edges[1])
                high_if = jnp.where(third, high, edges[2])
                low_else = jnp.where(first, edges[0], low)
                high_else = jnp.where(first, edges[1], edges[0])
                return jnp.where(second, low_if, low_else), jnp.where(second, high_if, high_else)

            # 1 is above the bits of 0, the largest scaled logit there is.
            walks, start = jnp.where(asked, jnp.int32(16), 0), (jnp.int32(LOWEST), jnp.int32(1))
            return jax.lax.fori_loop(0, walks, walk, start)[0]

        top_k = jnp.minimum(top_k_ref[row], vocab)
        by_count = largest_edge(top_k > 0, jnp.ones_like, top_k.astype(jnp.float32))
        by_mass = top_p < 1.0

        # Top-p counts what top-k has kept, so the sum over that is made first.
        def mass(x: jax.Array):
            return jnp.where(sortable(x) >= by_count, jnp.exp(x), 0.0)

        def add_mass(i: jax.Array, total: jax.Array):
            return total + mass(scaled(block(i)[1]))

        total = jnp.sum(
            jax.lax.fori_loop(0, jnp.where(by_mass, jnp.int32(blocks), 0), add_mass, nothing)
        )
        edge = jnp.maximum(by_count, largest_edge(by_mass, mass, top_p * total))
        low, high = keys_ref[row, 0], keys_ref[row, 1]

        # The largest of score plus Gumbel noise is a draw by softmax: no sum over the row, and no dependence on the
        # batch.
        def drawn(ids: jax.Array, x: jax.Array):
            x = scaled(x)
            x = jnp.where(sortable(x) >= edge, x, -jnp.inf)
            return x + gumbel(token_hash(low, high, ids))

        token, _ = best(drawn)
        tokens_ref[row] = token


def sample_tokens_pallas(arrays: SamplingArrays) -> jax.Array:
    """See `api.sample_tokens`."""
    rows = arrays.logits.shape[0]
    (tokens,) = call(
        _sample_kernel,
        *arrays.keyed(),
        grid=(rows,),
        outputs=[jax.ShapeDtypeStruct((rows,), jnp.int32)],
        name="sample_tokens",
        num_warps=NUM_WARPS,
    )
    return tokens

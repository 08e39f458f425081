"""The largest values of a vocabulary, found by groups of neighbouring tokens and without a sort.

On a CPU, XLA sorts the whole input for `lax.top_k`, and its argmax is not vectorised. Taking the largest of a few
neighbours is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.token_sampling.numbers import middle, sortable

GROUP = 16  # tokens in a group
WIDE = 8  # groups that are looked at together first
DIRECT = 128  # up to so many columns argmax takes them as they are
MANY = 512  # from so many groups on they are chosen by bisection, not by a top-k


def maxima(x: jax.Array, size: int = GROUP) -> jax.Array:
    """The largest of every `size` neighbours: [B, V] to [B, ceil(V / size)]."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=-jnp.inf)
    return x.reshape(x.shape[0], -1, size).max(-1)


def take(x: jax.Array, places: jax.Array, size: int = GROUP) -> tuple[jax.Array, jax.Array]:
    """The values of groups int32[B, m] of x [B, V] and their columns, both [B, m * size]; -inf after the end of x."""
    ids = (places[:, :, None] * size + jnp.arange(size)).reshape(places.shape[0], -1)
    inside = ids < x.shape[1]
    values = jnp.take_along_axis(x, jnp.minimum(ids, x.shape[1] - 1), axis=1)
    return jnp.where(inside, values, -jnp.inf), ids


def best(of_groups: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` groups with the largest maxima [B, G]. The `count` largest tokens of a row lie in them.

    Of equal maxima the first counts as larger, as in `lax.top_k`, so both agree on equal tokens too (0.0 is larger than
    -0.0 there).

    Returns:
        Places int32[B, m], ascending; all groups if there are no more than `count`. And the least maximum [B] of these
        groups, which no group left out exceeds. It is -inf if nothing finite is left out. It is inf if `count` is at
        least MANY and equal maxima at the edge make it impossible to choose exactly `count`.
    """
    num_rows, num_groups = of_groups.shape
    if num_groups <= count:
        places = jnp.broadcast_to(jnp.arange(num_groups), of_groups.shape)
        return places, jnp.full(num_rows, -jnp.inf)
    wide = maxima(of_groups, WIDE)
    if wide.shape[1] <= count:
        return (_first if count < MANY else _reaching)(of_groups, count)
    outer, _ = _first(wide, count)
    inside, places = take(of_groups, outer, WIDE)
    inner, least = _first(inside, count)
    return jnp.take_along_axis(places, inner, axis=1), least


def _first(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    # XLA recognizes a top-k by slices that begin at 0. A slice of the last value alone would turn it into a sort.
    values, places = jax.lax.top_k(x, count)
    return jnp.sort(places, axis=-1), values.min(-1)


def _reaching(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Places of the values at or above the edge that `count` of them reach; after the end of x if fewer are finite."""
    order = sortable(x)
    edge = largest_edge(order, jnp.ones_like(x), jnp.full(x.shape[0], float(count)))
    chosen = (order >= edge[:, None]) & (x > -jnp.inf)
    ahead = jnp.cumsum(chosen, axis=1, dtype=jnp.int32)
    rows, size = x.shape
    slots = jnp.where(chosen, ahead - 1, count)  # what goes after the last slot is dropped
    places = jnp.full((rows, count), size, jnp.int32)
    own = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), x.shape)
    places = places.at[jnp.arange(rows)[:, None], slots].set(own, mode="drop")
    least = jnp.where(chosen, x, jnp.inf).min(-1)
    total = ahead[:, -1]
    least = jnp.where(total < count, -jnp.inf, jnp.where(total > count, jnp.inf, least))
    return places, least


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` on only those groups that hold the result, because on a CPU it sorts its whole input."""
    places, _ = best(maxima(x), count)
    values, ids = take(x, places)
    values, inner = jax.lax.top_k(values, count)
    return values, jnp.take_along_axis(ids, inner, axis=1)


def argmax(x: jax.Array) -> jax.Array:
    """The first of the largest values of each row, as int32[B]."""
    if x.shape[1] <= DIRECT:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    place = jnp.argmax(maxima(x, DIRECT), axis=-1)
    values, ids = take(x, place[:, None], DIRECT)
    return at(ids, jnp.argmax(values, axis=-1))


def at(x: jax.Array, places: jax.Array) -> jax.Array:
    """x int32[B, n] at one place int32[B] of each row."""
    return jnp.take_along_axis(x, places[:, None], axis=1)[:, 0].astype(jnp.int32)


# --- edges -----------------------------------------------------------------------------------------


def largest_edge(order: jax.Array, weight: jax.Array, needed: jax.Array) -> jax.Array:
    """The largest int32 edge per row for which the weight of entries >= edge reaches `needed`, by bisection."""

    def halve(_, bounds):
        low, high = bounds  # the edge `low` reaches it, `high` does not
        half = middle(low, high)
        reached = jnp.where(order >= half[:, None], weight, 0.0).sum(-1) >= needed
        return jnp.where(reached, half, low), jnp.where(reached, high, half)

    low = jnp.full(order.shape[0], jnp.iinfo(jnp.int32).min, jnp.int32)
    high = order.max(-1)
    top = jnp.where(order >= high[:, None], weight, 0.0).sum(-1) >= needed
    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jnp.where(top, high, low)

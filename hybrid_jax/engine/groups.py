"""The largest of a vocabulary: by groups of neighbours, without a sort.

XLA sorts all it is given for `lax.top_k` on a CPU, and its argmax does not vectorise; the largest of a few
neighbours does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.token_sampling.numbers import middle, sortable

GROUP = 16  # neighbours in a group
WIDE = 8  # groups that are looked at together first
DIRECT = 128  # columns that argmax is taken of as they are
MANY = 512  # groups from which on they are chosen by bisection, not by a top-k


def maxima(x: jax.Array, size: int = GROUP) -> jax.Array:
    """Largest of each `size` neighbours: [B, V] to [B, ceil(V / size)]."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=-jnp.inf)
    return x.reshape(x.shape[0], -1, size).max(-1)


def take(x: jax.Array, places: jax.Array, size: int = GROUP) -> tuple[jax.Array, jax.Array]:
    """The groups int32[B, m] of x [B, V] and where they lie, both [B, m * size]; -inf behind the end of x."""
    ids = (places[:, :, None] * size + jnp.arange(size)).reshape(places.shape[0], -1)
    inside = ids < x.shape[1]
    values = jnp.take_along_axis(x, jnp.minimum(ids, x.shape[1] - 1), axis=1)
    return jnp.where(inside, values, -jnp.inf), ids


def best(of_groups: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` groups with the largest maxima [B, G]: the `count` largest tokens of a row lie in them.

    Of equal maxima the first counts as larger, as in `lax.top_k`, so that both agree on equal tokens too (0.0 is
    larger than -0.0 there).

    Returns:
        places int32[B, m] ascending, all there are if no more than `count`; their least maximum [B], which
        nothing left out exceeds: -inf if nothing finite is left out, inf if `count` are at least MANY and equal
        maxima at the edge leave no choice of as many.
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
    # XLA knows a top-k by slices that begin at 0: one of its last value alone would make it a sort.
    values, places = jax.lax.top_k(x, count)
    return jnp.sort(places, axis=-1), values.min(-1)


def _reaching(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Places at or above the edge that `count` reach; behind the end of x where fewer are finite."""
    order = sortable(x)
    edge = largest_edge(order, jnp.ones_like(x), jnp.full(x.shape[0], float(count)))
    chosen = (order >= edge[:, None]) & (x > -jnp.inf)
    ahead = jnp.cumsum(chosen, axis=1, dtype=jnp.int32)
    rows, size = x.shape
    slots = jnp.where(chosen, ahead - 1, count)  # the one behind the last is dropped
    places = jnp.full((rows, count), size, jnp.int32)
    own = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), x.shape)
    places = places.at[jnp.arange(rows)[:, None], slots].set(own, mode="drop")
    least = jnp.where(chosen, x, jnp.inf).min(-1)
    total = ahead[:, -1]
    least = jnp.where(total < count, -jnp.inf, jnp.where(total > count, jnp.inf, least))
    return places, least


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, which on a CPU sorts all it is given, on the groups that hold the result."""
    places, _ = best(maxima(x), count)
    values, ids = take(x, places)
    values, inner = jax.lax.top_k(values, count)
    return values, jnp.take_along_axis(ids, inner, axis=1)


def argmax(x: jax.Array) -> jax.Array:
    """First of the largest of each row, int32[B]."""
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
    """Largest int32 edge per row such that the weight of entries >= edge reaches `needed`: bisection, no sort."""

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

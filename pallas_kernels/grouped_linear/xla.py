"""Experts on a CPU: blocks of visits in a loop, and of each block's expert a slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.grouped_linear.reference import Activation, ExpertArrays, activate

# From tokens [size, Z] and the number of an expert, a scalar, what the expert makes of them: [size, Z].
Visit = Callable[[jax.Array, jax.Array], jax.Array]


# From tokens [size, I], matrices of all experts and the number of one, its product [size, O].
Product = Callable[[jax.Array, Any, jax.Array], jax.Array]


def product_of_slice(x: jax.Array, weights: jax.Array, expert: jax.Array) -> jax.Array:
    """x [size, I] times the matrix of an expert in [X, I, O], by XLA."""
    return jnp.dot(x, weights[expert], precision=HIGHEST)


def mix_experts_xla(arrays: ExpertArrays, *, kind: Activation):
    """See `api.mix_experts`."""
    return mix_visits(arrays, kind=kind, num_experts=arrays.up.shape[0], product=product_of_slice)


def mix_visits(
    arrays: ExpertArrays,
    *,
    kind: Activation,
    num_experts: int,
    product: Product,
    in_place: bool = False,
) -> jax.Array:
    """As `api.mix_experts`, with products of the caller's.

    Args:
        arrays: `up` and `down` may be anything that `product` takes.
        in_place: it copies no matrix, so that visits of a single token need not be made together.
    """
    x, ids, weights, up, down, up_bias, down_bias = arrays

    def with_bias(
        x: jax.Array, matrices: Any, bias: jax.Array | None, expert: jax.Array
    ) -> jax.Array:
        y = product(x, matrices, expert)
        return y if bias is None else y + bias[expert]

    def visit(x: jax.Array, expert: jax.Array) -> jax.Array:
        hidden = activate(with_bias(x, up, up_bias, expert), kind)
        return with_bias(hidden, down, down_bias, expert)

    parts = visit_experts(x, ids, num_experts, visit, in_place=in_place)
    weights = jnp.where(ids < num_experts, weights, 0.0)
    mixed = jnp.zeros(x.shape, jnp.float32)
    for slot in range(
        weights.shape[1]
    ):  # one after the other, in which order XLA would not sum on a CPU
        mixed = mixed + weights[:, slot, None] * parts[:, slot]
    return mixed.astype(x.dtype)


def visit_experts(
    x: jax.Array, ids: jax.Array, num_experts: int, visit: Visit, *, in_place: bool = False
) -> jax.Array:
    """The outputs float32[S, k, Z] of each token's experts; zero where there is no visit.

    The S k visits are sorted by expert and done in blocks of one expert each. So the work grows with the visits, not
    with the number of experts. Visits to no expert come last and are left out. A block that is not full also computes
    visits of the next expert, but the next expert's own block then overwrites them.
    """
    count, top_k = ids.size, ids.shape[1]
    size = _block_size(*ids.shape, num_experts, x.dtype)
    if in_place and ids.shape[0] == 1:
        size = 1
    order = jnp.argsort(ids.reshape(-1), stable=True)
    place = jnp.argsort(order, stable=True)  # where a visit stands in that order
    padded = jnp.pad(order, (0, size))
    visits = jnp.sum(ids.reshape(-1, 1) == jnp.arange(num_experts), axis=0)  # [X]
    first_visit = jnp.cumsum(visits) - visits
    last_block = jnp.cumsum(-(-visits // size))
    first_block = last_block + visits // -size

    def run(block: jax.Array, parts: jax.Array) -> jax.Array:  # parts: [S k + size, Z]
        expert = jnp.sum(last_block <= block)
        start = first_visit[expert] + (block - first_block[expert]) * size
        tokens = jax.lax.dynamic_slice(padded, (start,), (size,)) // top_k
        out = _visited(x[tokens], expert, num_experts, visit)
        return jax.lax.dynamic_update_slice(parts, out.astype(jnp.float32), (start, 0))

    # This zero only exists once this layer's visits do. From a constant, XLA for GPUs would make the arrays of all
    # layers first and hold them together (12 GB for 40 layers of Granite-4.0-H-Tiny and 8,192 tokens).
    zero = jnp.minimum(visits.sum(), 0).astype(jnp.float32)
    parts = jnp.broadcast_to(zero, (count + size, x.shape[1]))
    parts = jax.lax.fori_loop(0, last_block[-1], run, parts)
    # Places without a visit may hold anything that a block left there, so they are set to zero.
    parts = jnp.where((jnp.arange(count + size) < visits.sum())[:, None], parts, 0.0)
    return parts[place].reshape(*ids.shape, -1)


def _block_size(num_tokens: int, top_k: int, num_experts: int, dtype: jnp.dtype) -> int:
    """How many visits a block has: the power of two above the mean of an expert's visits, 4 to 64.

    A single token visits each expert at most once. In float32 a product of one row is faster than one of four rows. In
    bfloat16 a CPU makes a float32 copy of the matrix for a product of one row.
    """
    if num_tokens == 1 and dtype == jnp.float32:
        return 1
    return min(64, max(4, 1 << (num_tokens * top_k // num_experts).bit_length()))


def _visited(x: jax.Array, expert: jax.Array, num_experts: int, visit: Visit) -> jax.Array:
    """Runs x [size, Z] through one expert: [size, Z]."""

    def inside_a_branch() -> jax.Array:
        return jax.lax.cond(
            expert < num_experts, lambda: visit(x, expert), lambda: jnp.zeros_like(x)
        )

    # The branch is always taken. Without it, XLA for CPUs up to jax 0.10 converts bfloat16 weights to float32 before it
    # slices them, and then moves the conversion out of the loop. Each call would then convert all experts.
    return jax.lax.platform_dependent(cpu=inside_a_branch, default=lambda: visit(x, expert))

"""Products as XLA makes them, at the precision that the exactness contract needs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., I] @ weight [I, O] + bias [O], in the dtype of x; float32 never becomes TF32."""
    y = _product(x, weight, "...i,io->...o")
    return y if bias is None else y + bias


def linear_transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., I] @ weight.T for a weight [O, I], which is read as it lies in memory."""
    return _product(x, weight, "...i,oi->...o")


def is_lone(x: jax.Array) -> bool:
    """Whether x [..., I] has only one row."""
    return x.size == x.shape[-1]


def _product(x: jax.Array, weight: jax.Array, subscripts: str) -> jax.Array:
    product = functools.partial(jnp.einsum, subscripts, precision=HIGHEST)

    def one_row(x: jax.Array, weight: jax.Array) -> jax.Array:
        return product(x, weight, preferred_element_type=jnp.float32).astype(x.dtype)

    def one_row_as_two(x: jax.Array, weight: jax.Array) -> jax.Array:
        row = x.reshape(1, -1)
        y = product(jnp.concatenate([row, jnp.zeros_like(row)]), weight)
        return y[:1].reshape(*x.shape[:-1], -1)

    if x.dtype != jnp.bfloat16 or not is_lone(x):
        return product(x, weight)
    # For a single bfloat16 row XLA's CPU backend widens the whole weight on every call; for two rows it does not. On a
    # GPU XLA multiplies and sums a single row in the dtype of the result, which would round every product to bfloat16.
    return jax.lax.platform_dependent(x, weight, cpu=one_row_as_two, default=one_row)


PRODUCTS: dict = {}  # none of its own: those of each format

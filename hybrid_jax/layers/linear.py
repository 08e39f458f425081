"""Matrix products at the precision the exactness contract asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.parts import num_parts

HIGHEST = jax.lax.Precision.HIGHEST
Linear = Callable[..., jax.Array]  # `linear`, or `linear_in_parts` for a kernel that reads parts


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., I] @ weight [I, O] + bias [O], in the dtype of x; float32 never becomes TF32."""
    y = _product(x, weight, "...i,io->...o")
    return y if bias is None else y + bias


def linear_in_parts(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`linear`, or parts float32[S, ..., O] that sum to it where x [..., I] has too few rows to fill a GPU."""
    inner, columns = weight.shape
    parts = num_parts(x.size // inner, inner, columns)
    if parts == 1 or bias is not None:
        return linear(x, weight, bias)
    x = x.reshape(*x.shape[:-1], parts, inner // parts)
    weight = weight.reshape(parts, inner // parts, columns)
    return jnp.einsum(
        "...si,sio->s...o", x, weight, precision=HIGHEST, preferred_element_type=jnp.float32
    )


def linear_transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., I] @ weight.T for a weight [O, I], which is read as it lies in memory."""
    return _product(x, weight, "...i,oi->...o")


def _product(x: jax.Array, weight: jax.Array, subscripts: str) -> jax.Array:
    product = functools.partial(jnp.einsum, subscripts, precision=HIGHEST)

    def one_row(x: jax.Array, weight: jax.Array) -> jax.Array:
        return product(x, weight, preferred_element_type=jnp.float32).astype(x.dtype)

    def one_row_as_two(x: jax.Array, weight: jax.Array) -> jax.Array:
        row = x.reshape(1, -1)
        y = product(jnp.concatenate([row, jnp.zeros_like(row)]), weight)
        return y[:1].reshape(*x.shape[:-1], -1)

    if x.dtype != jnp.bfloat16 or x.size != x.shape[-1]:
        return product(x, weight)
    # For a lone bfloat16 row XLA's CPU backend widens the whole weight on every call, for two it does not. On a GPU
    # it multiplies and sums such a row itself, in the dtype it is asked for: the products would be rounded to bfloat16.
    return jax.lax.platform_dependent(x, weight, cpu=one_row_as_two, default=one_row)

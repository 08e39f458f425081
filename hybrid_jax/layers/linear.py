"""Matrix products at the precision the exactness contract asks for."""

from __future__ import annotations

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., I] @ weight [I, O] + bias [O], in the dtype of x; float32 never becomes TF32."""
    if x.dtype == jnp.bfloat16 and x.size == x.shape[-1]:
        y = jax.lax.platform_dependent(x, weight, cpu=_one_row_as_two, default=_product)
    else:
        y = _product(x, weight)
    return y if bias is None else y + bias


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("...i,io->...o", x, weight, precision=HIGHEST)


def _one_row_as_two(x: jax.Array, weight: jax.Array) -> jax.Array:
    """For a lone bfloat16 row XLA's CPU backend widens the whole weight on every call, for two it does not."""
    row = x.reshape(1, -1)
    y = _product(jnp.concatenate([row, jnp.zeros_like(row)]), weight)
    return y[:1].reshape(*x.shape[:-1], -1)

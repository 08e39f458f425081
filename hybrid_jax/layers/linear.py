"""Matrix products at the precision that the exactness contract needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import Backend
from hybrid_jax.layers.parts import num_parts
from pallas_kernels.row_product import row_product

HIGHEST = jax.lax.Precision.HIGHEST
Linear = Callable[
    ..., jax.Array
]  # `linear`, `linear_on_kernels`, or `linear_in_parts` for a kernel that reads parts


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., I] @ weight [I, O] + bias [O], in the dtype of x; float32 never becomes TF32."""
    y = _product(x, weight, "...i,io->...o")
    return y if bias is None else y + bias


def linear_on_kernels(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`linear`, but a single row goes through a kernel that reads every weight once."""
    if not _is_lone(x):
        return linear(x, weight, bias)
    y = _parts_of_a_row(x, weight).sum(0).astype(x.dtype)
    return y if bias is None else y + bias


def linear_in_parts(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`linear_on_kernels`, or if x [..., I] has too few rows to fill a GPU, float32[S, ..., O] parts that sum to it."""
    inner, columns = weight.shape
    if bias is not None:
        return linear_on_kernels(x, weight, bias)
    if _is_lone(x):
        return _parts_of_a_row(x, weight)
    parts = num_parts(x.size // inner, inner, columns)
    if parts == 1:
        return linear(x, weight)
    x = x.reshape(*x.shape[:-1], parts, inner // parts)
    weight = weight.reshape(parts, inner // parts, columns)
    return jnp.einsum(
        "...si,sio->s...o", x, weight, precision=HIGHEST, preferred_element_type=jnp.float32
    )


def _is_lone(x: jax.Array) -> bool:
    """Whether x [..., I] has only one row."""
    return x.size == x.shape[-1]


def _parts_of_a_row(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The product of a single row in float32[S, ..., O] parts."""
    parts = row_product(x.reshape(-1), weight, implementation="pallas")
    return parts.reshape(-1, *x.shape[:-1], weight.shape[1])


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

    if x.dtype != jnp.bfloat16 or not _is_lone(x):
        return product(x, weight)
    # For a single bfloat16 row XLA's CPU backend widens the whole weight on every call; for two rows it does not. On a
    # GPU XLA multiplies and sums a single row in the dtype of the result, which would round every product to bfloat16.
    return jax.lax.platform_dependent(x, weight, cpu=one_row_as_two, default=one_row)


class Products(NamedTuple):
    """How a backend multiplies. whole: the product. parts: for one whose parts are summed by what follows."""

    whole: Linear
    parts: Linear


PRODUCTS = {
    "xla": Products(linear, linear),
    "pallas": Products(linear_on_kernels, linear_in_parts),
}


def products_of(backend: Backend) -> Products:
    """How a backend multiplies."""
    return PRODUCTS[backend.products]

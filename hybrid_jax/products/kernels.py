"""Products on a GPU: a single row goes through a kernel, and one of few rows may come in parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config.backend import Backend
from hybrid_jax.config.formats import Dense
from hybrid_jax.products.parts import num_parts
from hybrid_jax.products.xla import HIGHEST, is_lone, linear
from pallas_kernels.row_product import row_product


def linear_on_kernels(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, backend: Backend
) -> jax.Array:
    """`linear`, but a single row goes through a kernel that reads every weight once."""
    if not is_lone(x):
        return linear(x, weight, bias)
    y = _parts_of_a_row(x, weight, backend).sum(0).astype(x.dtype)
    return y if bias is None else y + bias


def linear_in_parts(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, backend: Backend
) -> jax.Array:
    """`linear_on_kernels`, or if x [..., I] has too few rows to fill a GPU, float32[S, ..., O] parts that sum to it."""
    inner, columns = weight.shape
    if bias is not None:
        return linear_on_kernels(x, weight, bias, backend=backend)
    if is_lone(x):
        return _parts_of_a_row(x, weight, backend)
    parts = num_parts(x.size // inner, inner, columns, backend.chip.num_sms)
    if parts == 1:
        return linear(x, weight)
    x = x.reshape(*x.shape[:-1], parts, inner // parts)
    weight = weight.reshape(parts, inner // parts, columns)
    return jnp.einsum(
        "...si,sio->s...o", x, weight, precision=HIGHEST, preferred_element_type=jnp.float32
    )


def linear_in_float32(x: jax.Array, weight: jax.Array, *, backend: Backend) -> jax.Array:
    """`linear` in float32. XLA would write all products of a single row to memory before it sums them."""
    if is_lone(x):
        return _parts_of_a_row(x, weight, backend).sum(0)
    return linear(x.astype(jnp.float32), weight.astype(jnp.float32))


def _parts_of_a_row(x: jax.Array, weight: jax.Array, backend: Backend) -> jax.Array:
    """The product of a single row in float32[S, ..., O] parts."""
    parts = row_product(x.reshape(-1), weight, chip=backend.chip, implementation="pallas")
    return parts.reshape(-1, *x.shape[:-1], weight.shape[1])


PRODUCTS = {
    Dense: {
        "whole": linear_on_kernels,
        "parts": linear_in_parts,
        "float32": linear_in_float32,
    }
}

"""How steps call products of our own, and which ones stay with XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hybrid_jax.config.backend import Backend
from hybrid_jax.config.formats import Dense
from hybrid_jax.products.cpu.source import Target, target_name
from hybrid_jax.products.xla import linear, linear_transposed
from pallas_kernels.grouped_linear import ExpertArrays, mix_visits, product_of_slice

ROWS = 32  # of more rows XLA's products are as fast
LEAST = 64  # K and N: a block of columns of the widest variant
MULTIPLES = {"columns": 2, "rows": 32}  # of which K is one, by layout
NAMES = {jnp.dtype(jnp.float32): "f32", jnp.dtype(jnp.bfloat16): "bf16"}


def linear_on_cpu(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, backend: Backend
) -> jax.Array:
    """`linear`, but few rows are multiplied by our own code."""
    if x.dtype != weight.dtype or not takes(x, weight):
        return linear(x, weight, bias)
    y = call(backend.version, target_of(weight), x, weight)
    return y if bias is None else y + bias


def linear_in_float32(x: jax.Array, weight: jax.Array, *, backend: Backend) -> jax.Array:
    """`linear` in float32. Our own code makes float32 numbers of the weights as it reads them."""
    x = x.astype(jnp.float32)
    if not takes(x, weight):
        return linear(x, weight.astype(jnp.float32))
    return call(backend.version, target_of(weight), x, weight)


def transposed_on_cpu(x: jax.Array, weight: jax.Array, *, backend: Backend) -> jax.Array:
    """`linear_transposed`, but few rows are multiplied by our own code."""
    if x.dtype != weight.dtype or not takes(x, weight.mT, "rows"):
        return linear_transposed(x, weight)
    return call(backend.version, target_of(weight, "rows"), x, weight)


def mixed_on_cpu(arrays: ExpertArrays, *, kind: Any, backend: Backend) -> jax.Array:
    """`mix_experts`, but few rows are multiplied by our own code, which finds an expert by its number."""

    up, down = arrays.up, arrays.down
    of_one = (jax.ShapeDtypeStruct(weights.shape[1:], weights.dtype) for weights in (up, down))
    row = jax.ShapeDtypeStruct((1, up.shape[1]), arrays.x.dtype)
    in_place = arrays.x.dtype == up.dtype and all(takes(row, one) for one in of_one)

    def product(x: jax.Array, weights: jax.Array, expert: jax.Array) -> jax.Array:
        one = jax.ShapeDtypeStruct(weights.shape[1:], weights.dtype)
        if x.dtype != weights.dtype or not takes(x, one):
            return product_of_slice(x, weights, expert)
        which = expert.reshape(1).astype(jnp.int32)
        return call(backend.version, target_of(weights, chosen=True), x, weights, which)

    return mix_visits(
        arrays, kind=kind, num_experts=up.shape[0], product=product, in_place=in_place
    )


PRODUCTS = {
    Dense: {
        "whole": linear_on_cpu,
        "float32": linear_in_float32,
        "transposed": transposed_on_cpu,
        "mixed": mixed_on_cpu,
    }
}


def target_of(weight: jax.Array, layout: str = "columns", *, chosen: bool = False) -> Target:
    """The kind of product for such weights."""
    return Target(layout, NAMES[weight.dtype], chosen)


def takes(x: jax.Array, weight: jax.ShapeDtypeStruct | jax.Array, layout: str = "columns") -> bool:
    """Whether our own code multiplies x [..., K] with a weight [K, N] that lies in memory as the layout says."""
    (K, N), rows = weight.shape, x.size // max(1, x.shape[-1])
    fits = K >= LEAST and N >= LEAST and K % MULTIPLES[layout] == 0
    return fits and 1 <= rows <= ROWS and {x.dtype, weight.dtype} <= NAMES.keys()


def call(
    version: str,
    target: Target,
    x: jax.Array,
    weight: jax.Array,
    which: jax.Array | None = None,
) -> jax.Array:
    """A product by our own code: [..., N] in the dtype of x.

    Args:
        version: of the code. x: [..., K]. weight: as the target has it.
        which: int32[1], the number of a matrix if the target has several.
    """
    inner, columns = weight.shape[-2:] if target.layout == "columns" else weight.shape[::-1]
    rows = x.reshape(-1, inner)
    result = jax.ShapeDtypeStruct((rows.shape[0], columns), x.dtype)
    run = jax.ffi.ffi_call(target_name(version, target.name), result)
    y = run(rows, weight) if which is None else run(rows, weight, which)
    return y.reshape(*x.shape[:-1], columns)

"""A format of matrices as a test of the place for one: 8-bit codes with a scale for each column."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.products.formats import Format
from hybrid_jax.products.operations import Operations
from tests.products.case import FormatCase

Arrays = dict[str, jax.Array]  # codes int8[..., I, O] and scales [..., 1, O]


class Int8(Format):
    name = "int8"

    def specs(self, shape: tuple[int, ...], dtype: str) -> dict[str, ArraySpec]:
        scales = (*shape[:-2], 1, shape[-1])
        return {"codes": ArraySpec(shape, "int8"), "scales": ArraySpec(scales, dtype)}


class Int8Operations(Operations):
    def values(self, arrays: Arrays) -> jax.Array:
        return arrays["codes"].astype(arrays["scales"].dtype) * arrays["scales"]

    def columns(self, arrays: Arrays, which: slice) -> Arrays:
        return {name: array[:, which] for name, array in arrays.items()}

    def rows(self, arrays: Arrays, which: jax.Array) -> jax.Array:
        return arrays["codes"][which].astype(arrays["scales"].dtype) * arrays["scales"][0]

    def encode(self, values: jax.Array) -> Arrays:
        wide = values.astype(jnp.float32)
        scales = (jnp.abs(wide).max(-2, keepdims=True) / 127).astype(values.dtype)
        codes = jnp.round(wide / jnp.maximum(scales, 1e-30).astype(jnp.float32))
        return {"codes": jnp.clip(codes, -127, 127).astype(jnp.int8), "scales": scales}


CASE = FormatCase(format=Int8(), operations=Int8Operations(), share=0.4, error=1 / 127)

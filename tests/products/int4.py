"""4-bit codes, two in a byte, with a scale for each group of rows: a format with a product of its own.

A matrix whose rows make no whole groups stays one array.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp

from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.products.formats import Format, Specs
from hybrid_jax.products.operations import Operations
from hybrid_jax.products.xla import HIGHEST, linear
from tests.products.case import FormatCase

GROUP = 4
# Codes uint8[..., I / 2, O], of which the first half of a group has the lower bits, and scales [..., I / GROUP, O]; or
# the numbers [..., I, O].
Arrays: TypeAlias = dict[str, jax.Array] | jax.Array


class Int4(Format):
    name = "int4"

    def specs(self, shape: tuple[int, ...], dtype: str) -> Specs:
        *lead, inner, columns = shape
        if inner % GROUP:
            return ArraySpec(shape, dtype)
        return {
            "codes": ArraySpec((*lead, inner // 2, columns), "uint8"),
            "scales": ArraySpec((*lead, inner // GROUP, columns), dtype),
        }

    def made_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        return ArraySpec(shape, "float32").num_bytes  # codes, unpacked for the product

    def token_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        inner, columns = shape
        return 2 * ArraySpec((inner // GROUP, columns), "float32").num_bytes  # XLA turns them round


def unpacked(codes: jax.Array) -> jax.Array:
    """Codes float32[..., I / GROUP, GROUP, O]."""
    halves = codes.reshape(*codes.shape[:-2], -1, GROUP // 2, codes.shape[-1])
    return jnp.concatenate([halves & 15, halves >> 4], axis=-2).astype(jnp.float32) - 8


class Int4Operations(Operations):
    def values(self, arrays: Arrays) -> jax.Array:
        if not isinstance(arrays, dict):
            return arrays
        scales = arrays["scales"]
        wide = unpacked(arrays["codes"]).astype(scales.dtype) * scales[..., None, :]
        return wide.reshape(*scales.shape[:-2], -1, scales.shape[-1])

    def columns(self, arrays: Arrays, which: slice) -> Arrays:
        return jax.tree.map(lambda array: array[:, which], arrays)

    def rows(self, arrays: Arrays, which: jax.Array) -> jax.Array:
        return self.values(arrays)[which]

    def encode(self, values: jax.Array) -> Arrays:
        *lead, inner, columns = values.shape
        if inner % GROUP:
            return values
        wide = values.astype(jnp.float32).reshape(*lead, -1, GROUP, columns)
        scales = (jnp.abs(wide).max(-2) / 7).astype(values.dtype)
        steps = jnp.maximum(scales, 1e-30).astype(jnp.float32)[..., None, :]
        codes = (jnp.clip(jnp.round(wide / steps), -7, 7) + 8).astype(jnp.uint8)
        low, high = jnp.split(codes, 2, axis=-2)
        return {"codes": (low | high << 4).reshape(*lead, -1, columns), "scales": scales}

    def whole(self, x: jax.Array, arrays: Arrays, bias: jax.Array | None = None) -> jax.Array:
        """The sum of each group, and then of these times their scales."""
        if not isinstance(arrays, dict):
            return linear(x, arrays, bias)
        groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, GROUP)
        sums = jnp.einsum("...gi,gio->...go", groups, unpacked(arrays["codes"]), precision=HIGHEST)
        y = (sums * arrays["scales"].astype(jnp.float32)).sum(-2).astype(x.dtype)
        return y if bias is None else y + bias


CASE = FormatCase(format=Int4(), operations=Int4Operations(), share=0.6, error=1 / 7)

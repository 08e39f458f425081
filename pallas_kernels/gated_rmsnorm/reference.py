"""The definition, one block after another."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import FLOATS
from pallas_kernels.operands import whole


class Arrays(NamedTuple):
    """Arrays of `api.gated_rmsnorm`."""

    y: Annotated[jax.Array, FLOATS, "... channels"]
    gate: Annotated[jax.Array, FLOATS, "parts? ... columns"]
    weight: Annotated[jax.Array, FLOATS, "channels"]


def gated_rmsnorm_reference(arrays: Arrays, *, eps: float, groups: int):
    """See `api.gated_rmsnorm`."""
    y, gate, weight = arrays
    size, gate = y.shape[-1] // groups, whole(gate, y.ndim, weight.dtype)
    dtype = widest(gate.dtype, weight.dtype)
    parts = []
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        z = gate[..., own].astype(jnp.float32)
        gated = y[..., own].astype(jnp.float32) * z * jax.nn.sigmoid(z)
        square = jnp.sum(gated * gated, axis=-1, keepdims=True) / size
        normed = (gated / jnp.sqrt(square + eps)).astype(gate.dtype)
        parts.append(normed.astype(dtype) * weight[own].astype(dtype))
    return jnp.concatenate(parts, axis=-1)


def widest(a: jnp.dtype, b: jnp.dtype) -> jnp.dtype:
    """The wider of two float dtypes, the first if they are as wide."""
    return max(jnp.dtype(a), jnp.dtype(b), key=lambda dtype: dtype.itemsize)

"""The definitions, block by block and rounding by rounding."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import FLAGS, FLOATS
from pallas_kernels.operands import as_parts, summed


class Gated(NamedTuple):
    """Arrays of `api.gated_rmsnorm`."""

    y: Annotated[jax.Array, FLOATS, "... channels"]
    gate: Annotated[jax.Array, FLOATS, "parts? ... columns"]
    weight: Annotated[jax.Array, FLOATS, "weights"]


class Residual(NamedTuple):
    """Arrays of `api.residual_rmsnorm`."""

    h: Annotated[jax.Array, FLOATS, "... channels"]
    update: Annotated[jax.Array, FLOATS, "parts? ... channels"]
    weight: Annotated[jax.Array, FLOATS, "channels"]
    valid: Annotated[jax.Array | None, FLAGS, "None ..."]


def gated_rmsnorm_reference(arrays: Gated, *, eps: float, groups: int, norm_before_gate: bool):
    """See `api.gated_rmsnorm`."""
    y, gate, weight = arrays
    size, gate = y.shape[-1] // groups, summed(gate, y.ndim, weight.dtype)
    dtype = widest(gate.dtype, weight.dtype)
    parts = []
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        weights = weight if weight.size == size else weight[own]
        z = gate[..., own].astype(jnp.float32)
        silu, normed = z * jax.nn.sigmoid(z), y[..., own].astype(jnp.float32)
        if not norm_before_gate:
            normed = normed * silu
        square = jnp.sum(normed * normed, axis=-1, keepdims=True) / size
        normed = (normed / jnp.sqrt(square + eps)).astype(gate.dtype)
        if norm_before_gate:
            weighed = normed.astype(jnp.float32) * weights.astype(jnp.float32) * silu
            parts.append(weighed.astype(dtype))
        else:
            parts.append(normed.astype(dtype) * weights.astype(dtype))
    return jnp.concatenate(parts, axis=-1)


def residual_rmsnorm_reference(
    arrays: Residual, *, eps: float, multiplier: float, dtype: jnp.dtype
):
    """See `api.residual_rmsnorm`."""
    h, update, weight, valid = arrays
    rounded = dtype if update.ndim > h.ndim else update.dtype
    wide = jnp.zeros(h.shape, jnp.float32)
    for part in as_parts(update, h.ndim):
        wide = wide + part.astype(jnp.float32)
    wide = wide.astype(rounded).astype(jnp.float32)
    if multiplier != 1.0:
        factor = jnp.asarray(multiplier, rounded).astype(jnp.float32)
        wide = (wide * factor).astype(rounded).astype(jnp.float32)
    h = (h.astype(jnp.float32) + wide).astype(h.dtype)
    if valid is not None:
        h = jnp.where(valid[..., None], h, 0)
    wide = h.astype(jnp.float32)
    square = jnp.sum(wide * wide, axis=-1, keepdims=True) / h.shape[-1]
    wider = widest(h.dtype, weight.dtype)
    normed = (wide / jnp.sqrt(square + eps)).astype(wider)
    return h, (normed * weight.astype(wider)).astype(dtype)


def widest(a: jnp.dtype, b: jnp.dtype) -> jnp.dtype:
    """The wider of two float dtypes, the first if they are as wide."""
    return max(jnp.dtype(a), jnp.dtype(b), key=lambda dtype: dtype.itemsize)

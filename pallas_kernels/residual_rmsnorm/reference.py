"""The definition, rounding by rounding."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import FLAGS, FLOATS
from pallas_kernels.gated_rmsnorm.reference import widest
from pallas_kernels.operands import as_parts


class Arrays(NamedTuple):
    """Arrays of `api.residual_rmsnorm`."""

    h: Annotated[jax.Array, FLOATS, "... channels"]
    update: Annotated[jax.Array, FLOATS, "parts? ... channels"]
    weight: Annotated[jax.Array, FLOATS, "channels"]
    valid: Annotated[jax.Array | None, FLAGS, "None ..."]


def residual_rmsnorm_reference(arrays: Arrays, *, eps: float, multiplier: float):
    """See `api.residual_rmsnorm`."""
    h, update, weight, valid = arrays
    rounded = weight.dtype if update.ndim > h.ndim else update.dtype
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
    normed = (wide / jnp.sqrt(square + eps)).astype(h.dtype)
    dtype = widest(h.dtype, weight.dtype)
    return h, (normed.astype(dtype) * weight.astype(dtype)).astype(weight.dtype)

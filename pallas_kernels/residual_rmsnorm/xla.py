"""The sum and the norm one after another, as XLA fuses them with what stands around them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gated_rmsnorm.reference import widest
from pallas_kernels.operands import whole
from pallas_kernels.residual_rmsnorm.reference import Arrays


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * x / rms(x) over the last axis, rounded to the dtype of x before the weight."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    dtype = widest(x.dtype, weight.dtype)
    return (wide * scale).astype(x.dtype).astype(dtype) * weight.astype(dtype)


def residual_sum(h: jax.Array, update: jax.Array, dtype: jnp.dtype, multiplier: float) -> jax.Array:
    """h + multiplier * update in the dtype of h; the sum of an update in parts is rounded to `dtype`."""
    update = whole(update, h.ndim, dtype)
    if multiplier != 1.0:
        update = update * multiplier
    return h + update.astype(h.dtype)


def residual_rmsnorm_xla(arrays: Arrays, *, eps: float, multiplier: float):
    """See `api.residual_rmsnorm`."""
    h, update, weight, valid = arrays
    h = residual_sum(h, update, weight.dtype, multiplier)
    if valid is not None:
        h = jnp.where(valid[..., None], h, 0)
    return h, rms_norm(h, weight, eps).astype(weight.dtype)

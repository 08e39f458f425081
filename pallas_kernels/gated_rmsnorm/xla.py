"""All blocks at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gated_rmsnorm.reference import Arrays, widest
from pallas_kernels.operands import whole


def gated_rmsnorm_xla(arrays: Arrays, *, eps: float, groups: int):
    """See `api.gated_rmsnorm`."""
    y, gate, weight = arrays
    gate = whole(gate, y.ndim, weight.dtype)
    gate = jax.lax.slice_in_dim(gate, 0, y.shape[-1], axis=-1)
    wide = y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    blocks = wide.reshape(*wide.shape[:-1], groups, -1)
    scale = jax.lax.rsqrt(jnp.mean(blocks * blocks, axis=-1, keepdims=True) + eps)
    normed = (blocks * scale).reshape(wide.shape).astype(gate.dtype)
    dtype = widest(gate.dtype, weight.dtype)
    return normed.astype(dtype) * weight.astype(dtype)

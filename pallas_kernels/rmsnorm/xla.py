"""The norms as XLA fuses them with what stands around them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.operands import summed
from pallas_kernels.rmsnorm.reference import Gated, Residual, widest


def gated_rmsnorm_xla(
    arrays: Gated,
    *,
    eps: float,
    groups: int,
    norm_before_gate: bool,
    across: Callable[[jax.Array], jax.Array] = lambda mean: mean,
):
    """See `api.gated_rmsnorm`; all blocks at once.

    Args:
        across: from the mean squares of the blocks [..., groups, 1], those of larger blocks of which these are parts.
    """
    y, gate, weight = arrays
    gate = summed(gate, y.ndim, weight.dtype)
    gate = jax.lax.slice_in_dim(gate, 0, y.shape[-1], axis=-1)
    silu, wide = jax.nn.silu(gate.astype(jnp.float32)), y.astype(jnp.float32)
    blocks = (wide if norm_before_gate else wide * silu).reshape(*wide.shape[:-1], groups, -1)
    scale = jax.lax.rsqrt(across(jnp.mean(blocks * blocks, axis=-1, keepdims=True)) + eps)
    normed, dtype = (blocks * scale).astype(gate.dtype), widest(gate.dtype, weight.dtype)
    if weight.size != wide.shape[-1]:  # all blocks share it
        weight = weight[None]
    else:
        weight = weight.reshape(groups, -1)
    if not norm_before_gate:
        return (normed.astype(dtype) * weight.astype(dtype)).reshape(wide.shape)
    weighed = normed.astype(jnp.float32) * weight.astype(jnp.float32)
    return (weighed.reshape(wide.shape) * silu).astype(dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * x / rms(x) over the last axis, rounded to the wider dtype of both before and after the weight."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    dtype = widest(x.dtype, weight.dtype)
    return (wide * scale).astype(dtype) * weight.astype(dtype)


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """gain * (x - mean) / deviation + bias over the last axis, rounded as `rms_norm`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    dtype = widest(x.dtype, gain.dtype)
    return (centred * scale).astype(dtype) * gain.astype(dtype) + bias.astype(dtype)


def residual_sum(h: jax.Array, update: jax.Array, dtype: jnp.dtype, multiplier: float) -> jax.Array:
    """h + multiplier * update in the dtype of h; the sum of an update in parts is rounded to `dtype`."""
    update = summed(update, h.ndim, dtype)
    if multiplier != 1.0:
        update = update * multiplier
    return h + update.astype(h.dtype)


def residual_rmsnorm_xla(arrays: Residual, *, eps: float, multiplier: float, dtype: jnp.dtype):
    """See `api.residual_rmsnorm`: the sum and the norm one after another."""
    h, update, weight, valid = arrays
    h = residual_sum(h, update, dtype, multiplier)
    if valid is not None:
        h = jnp.where(valid[..., None], h, 0)
    return h, rms_norm(h, weight, eps).astype(dtype)

"""RMS norms, computed in float32 and returned in the input's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gated_rmsnorm import gated_rmsnorm


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * x / rms(x) over the last axis, rounded before the weight as Llama does."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return _scaled((wide * scale).astype(x.dtype), weight)


def gated_rms_norm(
    x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float, groups: int
) -> jax.Array:
    """weight * norm(x * silu(gate)); the mean square is over each of `groups` equal blocks."""
    return gated_rmsnorm(x, gate, weight, eps=eps, groups=groups, implementation="xla")


def _scaled(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x * weight in the wider of the two dtypes: the residual stream may be float32 and the weight not."""
    dtype = max(x.dtype, weight.dtype, key=lambda d: d.itemsize)
    return x.astype(dtype) * weight.astype(dtype)

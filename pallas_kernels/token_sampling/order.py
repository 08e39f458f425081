"""float32 values as integers of the same order, for bisections that need no sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sortable(x: jax.Array) -> jax.Array:
    """float32 to int32 of the same order; both zeros are one."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    bits = jnp.where(x == 0, 0, bits)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """Half way between two int32, rounded down; their sum need not be one."""
    return (low >> 1) + (high >> 1) + (low & high & 1)

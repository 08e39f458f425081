"""Floats and their bits: an engine keeps bfloat16 as uint16, since XLA would widen a bfloat16 buffer on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def floats(array: jax.Array) -> jax.Array:
    """Floats as they are; unsigned integers are the bits of bfloat16 or float32."""
    if not jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        return array
    return jax.lax.bitcast_convert_type(
        array, {2: jnp.bfloat16, 4: jnp.float32}[array.dtype.itemsize]
    )


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x as a ring of this dtype keeps it; the inverse of `floats`."""
    if not jnp.issubdtype(dtype, jnp.unsignedinteger):
        return x.astype(dtype)
    x = x.astype({2: jnp.bfloat16, 4: jnp.float32}[jnp.dtype(dtype).itemsize])
    return jax.lax.bitcast_convert_type(x, dtype)


def widen(array: jax.Array) -> jax.Array:
    """float32 of floats or of their bits."""
    return floats(array).astype(jnp.float32)

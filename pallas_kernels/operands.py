"""Forms in which numbers reach an operation: as floats or as their bits, whole or in parts.

An engine keeps bfloat16 as uint16, since XLA would widen a bfloat16 buffer on a CPU.

Products whose inner dimension is split come in parts, so that few rows still fill the chip. XLA splits such products by
itself, from the chip's description, and sums their parts in a launch of its own. Split beforehand, they stay parts,
float32[S, ...], for a kernel that reads them anyway: it adds them up, and rounds the sum as the product would have
been.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.triton import Ref, load


def floats(array: jax.Array) -> jax.Array:
    """Floats as they are; unsigned integers are the bits of bfloat16 or float32. Of a NumPy array, one of NumPy."""
    if not jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        return array
    dtype = {2: jnp.bfloat16, 4: jnp.float32}[array.dtype.itemsize]
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    return jax.lax.bitcast_convert_type(array, dtype)


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x as a ring of this dtype keeps it; the inverse of `floats`."""
    if not jnp.issubdtype(dtype, jnp.unsignedinteger):
        return x.astype(dtype)
    x = x.astype({2: jnp.bfloat16, 4: jnp.float32}[jnp.dtype(dtype).itemsize])
    return jax.lax.bitcast_convert_type(x, dtype)


def widen(array: jax.Array) -> jax.Array:
    """float32 of floats or of their bits."""
    return floats(array).astype(jnp.float32)


def summed(array: jax.Array, rank: int, dtype: jnp.dtype) -> jax.Array:
    """An array of `rank` dimensions as it is; the sum of parts in `dtype`."""
    return array if array.ndim == rank else array.sum(0).astype(dtype)


def as_parts(array: jax.Array, rank: int) -> jax.Array:
    """Parts as they are; an array of `rank` dimensions as the only part, of its own dtype."""
    return array[None] if array.ndim == rank else array


def load_sum(ref: Ref, *index: jax.Array | int, mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`summed` at the broadcast indices of `as_parts`, inside a kernel; zero where the mask is false."""
    first, *more = (load(ref, part, *index, mask=mask) for part in range(ref.shape[0]))
    return sum(more, first).astype(dtype)

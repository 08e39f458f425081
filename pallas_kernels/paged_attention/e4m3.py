"""FP8 numbers of four exponent and three mantissa bits (e4m3fn, arXiv 2209.05433), as codes of eight bits.

By integer operations, which XLA and kernels do alike.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LARGEST = 448.0
_SMALLEST_NORMAL = 2.0**-6
_STEP = 2.0**-9  # between numbers below that
_SHIFT = 20  # bits of a float32 mantissa after the three that stay
_BIAS = (127 - 7) << 3  # difference of the exponents' biases, in units of a code's last bit
# The least float32 number at which numbers are _STEP apart, so that adding it rounds to a multiple of that; its bits.
_MAGIC = 2.0**14
_MAGIC_BITS = (127 + 14) << 23


def to_codes(x: jax.Array) -> jax.Array:
    """float32 of at most `LARGEST` in size to codes in uint32, to the nearest number, halfway to the even code."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign, size = (bits >> 24) & jnp.uint32(0x80), bits & jnp.uint32(0x7FFFFFFF)
    last = (size >> _SHIFT) & jnp.uint32(1)
    normal = ((size + jnp.uint32((1 << (_SHIFT - 1)) - 1) + last) >> _SHIFT) - jnp.uint32(_BIAS)
    raised = jax.lax.bitcast_convert_type(size, jnp.float32) + jnp.float32(_MAGIC)
    small = jax.lax.bitcast_convert_type(raised, jnp.uint32) - jnp.uint32(_MAGIC_BITS)
    is_small = jnp.abs(x) < _SMALLEST_NORMAL
    return sign | jnp.where(is_small, small, normal)


def from_codes(codes: jax.Array) -> jax.Array:
    """Codes in uint32 to float32; the code of NaN, which `to_codes` does not make, becomes 480.

    By float16, whose exponents have a bit more: a code has the bits of its number divided by 2^8, also where the number
    is too small for a leading one.
    """
    half = (codes & jnp.uint32(0x80)) << 8 | (codes & jnp.uint32(0x7F)) << 7
    value = jax.lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16)
    return value.astype(jnp.float32) * 2.0**8

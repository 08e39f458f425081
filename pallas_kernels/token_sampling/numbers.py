"""What all ways to sample share: keys of rows, noise as a hash of a row's key and a token's id, and float32 values as
integers of the same order, for bisections that need no sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def noise_keys(seeds: jax.Array, *numbers: jax.Array) -> jax.Array:
    """A key uint32[B, 2] for each row, made by threefry from its seed uint32[B, 2] and its numbers, each int32[B]."""

    def fold(seed, *numbers):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return jax.random.key_data(key)

    return jax.vmap(fold)(seeds, *numbers)


def token_noise(keys: jax.Array, tokens: jax.Array) -> jax.Array:
    """Standard Gumbel noise float32[B, n] of keys uint32[B, 2] at token ids int32[B, n] (or [1, n]).

    The noise is a hash of key and token. So a part of a vocabulary costs only as much as it is large, and a whole
    vocabulary costs a fifth of threefry's bits.
    """
    return gumbel(token_hash(keys[:, :1], keys[:, 1:], tokens))


def token_hash(key_low: jax.Array, key_high: jax.Array, tokens: jax.Array) -> jax.Array:
    """uint32 of token ids int32: the smaller, the larger the noise. Two rounds of 32-bit mixing, with constants by
    C. Wellons' hash-prospector."""
    return _mix(_mix(tokens.astype(jnp.uint32) + key_low) ^ key_high)


def gumbel(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise of uniform 32 bits."""
    # Precise where it matters: small values are large noise. Never 1, whose logarithm would be infinite.
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    uniform = jnp.minimum(uniform, jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def sortable(x: jax.Array) -> jax.Array:
    """float32 to int32 of the same order; both zeros are one."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    bits = jnp.where(x == 0, 0, bits)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """Half way between two int32, rounded down; their sum need not be one."""
    return (low >> 1) + (high >> 1) + (low & high & 1)

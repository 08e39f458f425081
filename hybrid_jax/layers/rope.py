"""Rotary position embedding, half-split convention, on the first channels of each head."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import Rope


def frequencies(rope: Rope) -> np.ndarray:
    """float32[dim / 2] radians per position, scaling applied."""
    exponent = np.arange(0, rope.dim, 2, dtype=np.float32) / rope.dim
    base = (1.0 / (np.float32(rope.theta) ** exponent)).astype(np.float32)
    scaling = rope.scaling
    if scaling is None:
        return base
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32)
    # Llama 3: long wavelengths are divided, short ones kept, a linear blend in between.
    wavelength = 2 * math.pi / base
    turns = scaling.original_max_position / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return ((1 - blend) * base / scaling.factor + blend * base).astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Rotates x [B, T, N, H] by positions int32[B, T], in float32; returns the dtype of x."""
    angle = positions[..., None].astype(jnp.float32) * frequencies(rope)  # [B, T, dim / 2]
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    half = rope.dim // 2
    wide = x.astype(jnp.float32)
    low, high, rest = wide[..., :half], wide[..., half : rope.dim], x[..., rope.dim :]
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)

"""Rotary position embedding on the first channels of each head, in the half-split convention."""

from __future__ import annotations

import math

import jax
import numpy as np

from hybrid_jax.config import Rope
from pallas_kernels.append_kv import heads


def frequencies(rope: Rope) -> np.ndarray:
    """Radians per position, float32[dim / 2], with scaling applied."""
    exponent = np.arange(0, rope.dim, 2, dtype=np.float32) / rope.dim
    base = (1.0 / (np.float32(rope.theta) ** exponent)).astype(np.float32)
    scaling = rope.scaling
    if scaling is None:
        return base
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32)
    # As in Llama 3: long wavelengths are divided, short ones are kept, and those in between are blended linearly.
    wavelength = 2 * math.pi / base
    turns = scaling.original_max_position / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return ((1 - blend) * base / scaling.factor + blend * base).astype(np.float32)


def turns(positions: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32[B, T, dim / 2], of the angles at positions int32[B, T]."""
    return heads.turns(positions, frequencies(rope))

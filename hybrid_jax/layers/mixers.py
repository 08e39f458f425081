"""Each kind of mixer over whole sequences from a zero state: the definition that engines are tested against."""

from __future__ import annotations

from collections.abc import Callable

import jax

from hybrid_jax.config import Attention, Mamba2
from hybrid_jax.layers import attention, mamba2

# By the class of the spec. Each takes weights, normed inputs [B, T, D], positions int32[B, T], lengths int32[B], spec.
MIXERS: dict[type, Callable[..., jax.Array]] = {
    Attention: attention.whole,
    Mamba2: mamba2.whole,
}

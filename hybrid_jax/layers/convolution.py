"""The causal depthwise convolution in front of a recurrence."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def depthwise(columns: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Outputs float32[B, T, E] from raw columns [B, W - 1 + T, E] and taps [W, E], the token's own last."""
    taps = weight.astype(jnp.float32)
    tokens, wide = columns.shape[1] - (len(taps) - 1), columns.astype(jnp.float32)
    y = sum(wide[:, w : w + tokens] * taps[w] for w in range(len(taps)))
    return y if bias is None else y + bias.astype(jnp.float32)

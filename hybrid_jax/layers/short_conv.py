"""The gated short convolution.

Parameters: in_proj [D, B | C | x], conv [W, E], out_proj [E, D], optional in_bias, conv_bias [E], out_bias.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import ShortConv
from hybrid_jax.layers.convolution import depthwise
from hybrid_jax.products.matrix import product


def project(params: dict, h: jax.Array, spec: ShortConv) -> tuple[jax.Array, jax.Array]:
    """From h [B, T, D], what is convolved, B * x [B, T, E], and what gates the result, C [B, T, E]."""
    projected = product(h, params["in_proj"], params.get("in_bias"))
    B, C, x = jnp.split(projected, 3, axis=-1)
    return B * x, C


def convolve(params: dict, columns: jax.Array, spec: ShortConv) -> jax.Array:
    """Causal depthwise convolution of columns [B, W - 1 + T, E] to [B, T, E], without an activation."""
    y = depthwise(columns, params["conv"], params.get("conv_bias"))
    return y.astype(columns.dtype)


def output(params: dict, y: jax.Array, C: jax.Array) -> jax.Array:
    """Gates the convolution's result y [B, T, E] and projects it to [B, T, D]."""
    return product(C * y, params["out_proj"], params.get("out_bias"))


def whole(
    params: dict, h: jax.Array, positions: jax.Array, lengths: jax.Array, spec: ShortConv
) -> jax.Array:
    """Runs whole sequences h [B, T, D] from nothing: [B, T, D]."""
    raw, C = project(params, h, spec)
    columns = jnp.pad(raw, ((0, 0), (spec.conv_width - 1, 0), (0, 0)))
    return output(params, convolve(params, columns, spec), C)

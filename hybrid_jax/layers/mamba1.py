"""The Mamba mixer.

Parameters: in_proj [D, x | z], conv [W, E], optional conv_bias [E], x_proj [E, dt | B | C], dt_proj [rank, E], dt_bias,
D [E] and A_log [E, R] float32, out_proj [E, D], optional in_bias, out_bias, dt_norm [rank], B_norm, C_norm [R].
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import Mamba1
from hybrid_jax.layers.convolution import depthwise
from hybrid_jax.layers.shards import summed_over
from hybrid_jax.products.matrix import product
from pallas_kernels.dispatch import Implementation
from pallas_kernels.rmsnorm.xla import rms_norm
from pallas_kernels.selective_scan import selective_scan


class Convolved(NamedTuple):
    """What follows from the convolution.

    x: [B, T, E] in the activation dtype. dt: float32[B, T, E] step sizes. B, C: [B, T, R] in the activation dtype.
    """

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: jax.Array


def project(params: dict, h: jax.Array, spec: Mamba1) -> tuple[jax.Array, jax.Array]:
    """Projects h [B, T, D] to the convolution's inputs x and the gates z, [B, T, E] each."""
    projected = product(h, params["in_proj"], params.get("in_bias"))
    x, z = jnp.split(projected, 2, axis=-1)
    return x, z


def convolve(params: dict, columns: jax.Array, spec: Mamba1) -> Convolved:
    """Causal depthwise convolution and SiLU of columns [B, W - 1 + T, E]; from its result step sizes, B and C."""
    y = depthwise(columns, params["conv"], params.get("conv_bias"))
    x = jax.nn.silu(y).astype(columns.dtype)
    cuts = [spec.dt_rank, spec.dt_rank + spec.state_size]
    projected = summed_over(product(x, params["x_proj"]), spec.shards)
    parts = jnp.split(projected, cuts, axis=-1)
    if spec.norms != "none":
        names = ("dt_norm", "B_norm", "C_norm")
        parts = [
            _norm(part, params.get(name), spec) for part, name in zip(parts, names, strict=True)
        ]
    dt, B, C = parts
    dt = product(dt, params["dt_proj"]).astype(jnp.float32)
    return Convolved(x, jax.nn.softplus(dt + params["dt_bias"].astype(jnp.float32)), B, C)


def _norm(x: jax.Array, weight: jax.Array | None, spec: Mamba1) -> jax.Array:
    weight = jnp.ones(x.shape[-1], x.dtype) if weight is None else weight
    return rms_norm(x, weight, spec.norm_eps).astype(x.dtype)


def advance(
    params: dict,
    convolved: Convolved,
    state: jax.Array,
    valid: jax.Array,
    kept: jax.Array,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs T tokens from a state [B, E, R]: y float32[B, T, E] with the skip D x, and the states [B, K, E, R] after
    `kept` int32[B, K] tokens. Tokens that are not `valid` bool[B, T] change nothing."""
    x, dt, B, C = convolved
    A = -jnp.exp(params["A_log"].astype(jnp.float32))
    y, states = selective_scan(
        x,
        dt,
        A,
        B,
        C,
        state=state,
        valid=valid,
        kept=kept,
        implementation=implementation,
    )
    return y + params["D"].astype(jnp.float32) * x.astype(jnp.float32), states


def output(params: dict, y: jax.Array, z: jax.Array) -> jax.Array:
    """Gates y float32[B, T, E] and projects it to [B, T, D]."""
    y = (y * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)
    return product(y, params["out_proj"], params.get("out_bias"))


def whole(
    params: dict, h: jax.Array, positions: jax.Array, lengths: jax.Array, spec: Mamba1
) -> jax.Array:
    """Runs whole sequences h [B, T, D] from a zero state, with lengths int32[B] real tokens: [B, T, D]."""
    raw, z = project(params, h, spec)
    columns = jnp.pad(raw, ((0, 0), (spec.conv_width - 1, 0), (0, 0)))
    state = jnp.zeros((h.shape[0], spec.inner_size, spec.state_size), jnp.float32)
    valid = jnp.arange(h.shape[1]) < lengths[:, None]
    convolved = convolve(params, columns, spec)
    return output(params, advance(params, convolved, state, valid, lengths[:, None])[0], z)

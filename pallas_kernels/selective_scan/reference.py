"""The definition, token by token."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import FLAGS, FLOAT32, FLOATS, INTS
from pallas_kernels.dispatch import HIGHEST


class SelectiveScan(NamedTuple):
    """Arrays of `api.selective_scan`."""

    x: Annotated[jax.Array, FLOATS, "B T E"]
    dt: Annotated[jax.Array, FLOAT32, "B T E"]
    A: Annotated[jax.Array, FLOATS, "E R"]
    B: Annotated[jax.Array, FLOATS, "B T R"]
    C: Annotated[jax.Array, FLOATS, "B T R"]
    state: Annotated[jax.Array, FLOAT32, "B E R"]
    valid: Annotated[jax.Array, FLAGS, "B T"]
    kept: Annotated[jax.Array, INTS, "B K"]


def selective_scan_reference(arrays: SelectiveScan):
    """See `api.selective_scan`."""
    x, dt, A, B, C, state, valid, kept = arrays

    def step(carry: tuple, token: tuple):
        state, states = carry
        t, x, dt, B, C, valid = token
        decayed = jnp.exp(dt[..., None] * A) * state
        new = decayed + (dt * x.astype(jnp.float32))[..., None] * B.astype(jnp.float32)[:, None]
        state = jnp.where(valid[:, None, None], new, state)
        states = jnp.where((kept == t + 1)[..., None, None], state[:, None], states)
        y = jnp.einsum("ber,br->be", state, C.astype(jnp.float32), precision=HIGHEST)
        return (state, states), jnp.where(valid[:, None], y, 0)

    states = jnp.repeat(state[:, None], kept.shape[1], axis=1)
    tokens = [jnp.moveaxis(a, 1, 0) for a in (x, dt, B, C, valid.astype(bool))]
    (_, states), y = jax.lax.scan(step, (state, states), (jnp.arange(x.shape[1]), *tokens))
    return jnp.moveaxis(y, 0, 1), states

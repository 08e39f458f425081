"""Running sums of decay exponents whose differences keep full precision."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

LOWEST = -128.0  # exp of it is zero in float32
STEPS_PER_UNIT = 1024.0  # 128 summands of LOWEST, in these steps, are still exact in float32


def running_decay(exponents: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Running sums of `exponents` <= 0 along an axis of at most 128, as a coarse and a fine part.

    exp(c_q - c_k) of two plain running sums is wrong by |c| * 6e-8, which is much where a head forgets
    fast: c reaches hundreds while the exponents between q and k are small. The coarse sums are exact and
    the fine ones small, so `lag` of both parts is as good as summing only what lies between.
    """
    exponents = jnp.maximum(exponents, LOWEST)
    coarse = jnp.round(exponents * STEPS_PER_UNIT) / STEPS_PER_UNIT
    return jnp.cumsum(coarse, axis=axis), jnp.cumsum(exponents - coarse, axis=axis)


def lag(late: tuple[jax.Array, jax.Array], early: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Sum of the exponents after `early` up to `late`, two places in `running_decay`'s result."""
    return (late[0] - early[0]) + (late[1] - early[1])


def coarse_and_fine(exponents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exponents as two parts whose running sums keep full precision: `running_decay` for kernels, without rounding."""
    exponents = jnp.maximum(exponents, LOWEST)
    coarse = jnp.floor(exponents * STEPS_PER_UNIT + 0.5) / STEPS_PER_UNIT
    return coarse, exponents - coarse


def lags(parts: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Sums of both parts of `coarse_and_fine`, and of the exponents after each slot [S, 1]; for kernels."""
    totals = [jnp.sum(part) for part in parts]
    behind = sum(
        total - jnp.cumsum(part, axis=0) for total, part in zip(totals, parts, strict=True)
    )
    return totals, behind

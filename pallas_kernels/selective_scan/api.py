"""Public entry of the selective scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.selective_scan import reference, xla
from pallas_kernels.selective_scan.reference import SelectiveScan

IMPLEMENTATIONS = {
    "reference": reference.selective_scan_reference,
    "xla": xla.selective_scan_xla,
}


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    *,
    state: jax.Array,
    valid: jax.Array | None = None,
    kept: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence of Mamba over padded rows and returns what tokens read, and states.

    For each channel, state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t and y_t = state_t . C_t (arXiv 2312.00752,
    equation 2, with the simpler discretisation of B that the published code has).

    Args:
        x: [B, T, E] inputs, after convolution and activation.
        dt: float32[B, T, E] step sizes, after softplus.
        A: [E, R] decay rates, negative.
        B, C: [B, T, R] input and output projections, which all channels share.
        state: float32[B, E, R] before the first token.
        valid: bool[B, T] tokens that are real, or None for all; others change nothing.
        kept: int32[B, K] numbers of tokens after which a state is wanted, 0 to T; None for T alone.
        implementation: "reference", "xla", or None to choose. A named one never falls back.

    Returns:
        y float32[B, T, E], zero where a token is not valid; states float32[B, K, E, R].

    Example:
        >>> import jax.numpy as jnp
        >>> x, BC = jnp.ones((1, 8, 4)), jnp.ones((1, 8, 16))
        >>> y, states = selective_scan(x, 0.1 * x, -jnp.ones((4, 16)), BC, BC, state=jnp.zeros((1, 4, 16)))
        >>> y.shape, states.shape
        ((1, 8, 4), (1, 1, 4, 16))
    """
    where = "selective_scan"
    if valid is None:
        valid = jnp.ones(x.shape[:2], bool)
    if kept is None:
        kept = jnp.full((x.shape[0], 1), x.shape[1], jnp.int32)
    arrays = SelectiveScan(x, dt, A, B, C, state, valid, kept)
    check(where, arrays)
    return run(where, implementation, IMPLEMENTATIONS, arrays)

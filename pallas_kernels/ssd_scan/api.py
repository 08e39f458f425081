"""Public entry of the scan: checks, choice of implementation, call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, check_rank, check_shape, run
from pallas_kernels.ssd_scan.reference import ssd_scan_reference
from pallas_kernels.ssd_scan.xla import ssd_scan_xla

IMPLEMENTATIONS = {"reference": ssd_scan_reference, "xla": ssd_scan_xla}


def ssd_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    state_lengths: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the SSD recurrence over padded rows and returns outputs and states.

    Per head, state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t^T and y_t = state_t C_t
    (arXiv 2405.21060).

    Args:
        x: [B, T, M, P] inputs, after convolution and activation.
        dt: [B, T, M] step sizes, after softplus.
        A: [M] decay rates, negative.
        B, C: [B, T, G, R] input and output projections; head m uses group m // (M / G).
        initial_state: [B, M, P, R] float32, or None for zeros.
        lengths: int32[B] valid tokens per row, or None for T. Padding changes nothing.
        state_lengths: int32[B] tokens after which the returned state stands, at most `lengths`;
            None for `lengths`. The tokens between the two must lie in one tile of 64 tokens.
        implementation: "reference", "xla", or None to choose. A named one never falls back.

    Returns:
        y [B, T, M, P] in the dtype of x, zero on padding; state [B, M, P, R] float32.

    Raises:
        ValueError: a shape does not fit, or the implementation is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> x, dt, BC = jnp.ones((1, 8, 2, 4)), jnp.full((1, 8, 2), 0.1), jnp.ones((1, 8, 1, 16))
        >>> y, state = ssd_scan(x, dt, -jnp.ones(2), BC, BC, lengths=jnp.array([5]))
        >>> y.shape, state.shape
        ((1, 8, 2, 4), (1, 2, 4, 16))
    """
    where = "ssd_scan"
    check_rank(where, "x", x, 4)
    check_rank(where, "B", B, 4)
    rows, tokens, heads, width = x.shape
    groups, size = B.shape[2:]
    check_shape(where, "dt", dt, (rows, tokens, heads))
    check_shape(where, "A", A, (heads,))
    check_shape(where, "B", B, (rows, tokens, groups, size))
    check_shape(where, "C", C, B.shape)
    if heads % groups:
        raise ValueError(
            f"{where}: groups of B must divide the heads of x, got {groups} and {heads}"
        )
    if initial_state is None:
        initial_state = jnp.zeros((rows, heads, width, size), jnp.float32)
    check_shape(where, "initial_state", initial_state, (rows, heads, width, size))
    if lengths is None:
        lengths = jnp.full(rows, tokens, jnp.int32)
    if state_lengths is None:
        state_lengths = lengths
    check_shape(where, "lengths", lengths, (rows,))
    check_shape(where, "state_lengths", state_lengths, (rows,))
    initial_state = initial_state.astype(jnp.float32)
    arrays = (x, dt, A, B, C, initial_state, lengths, state_lengths)
    return run(where, implementation, IMPLEMENTATIONS, *arrays)

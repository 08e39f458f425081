"""Public entry of the scan: checks, choice of implementation, call."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.plan import H200, Chip
from pallas_kernels.records import RecordSizes, check_frames, check_groups
from pallas_kernels.ssd_scan import kernel, reference, triton_scan, xla
from pallas_kernels.ssd_scan.reference import Scan, ScanFrames

IMPLEMENTATIONS = {
    "reference": reference.ssd_scan_reference,
    "xla": xla.ssd_scan_xla,
    "pallas": kernel.ssd_scan_pallas,
}
FRAMES = {
    "reference": reference.ssd_scan_frames_reference,
    "xla": functools.partial(reference.ssd_scan_frames_reference, scan=xla.ssd_scan_xla),
    "pallas": kernel.ssd_scan_frames_pallas,
    "triton": triton_scan.ssd_scan_frames_triton,
}
STATES = {
    **{name: FRAMES[name] for name in ("reference", "xla")},
    "pallas": functools.partial(kernel.ssd_scan_frames_pallas, outputs=False),
}


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
            None for `lengths`.
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        y [B, T, M, P] in the dtype of x, zero on padding; state [B, M, P, R] float32.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation is unknown.
        NotImplementedError: "pallas" was asked for and cannot take this.

    Example:
        >>> import jax.numpy as jnp
        >>> x, dt, BC = jnp.ones((1, 8, 2, 4)), jnp.full((1, 8, 2), 0.1), jnp.ones((1, 8, 1, 16))
        >>> y, state = ssd_scan(x, dt, -jnp.ones(2), BC, BC, lengths=jnp.array([5]))
        >>> y.shape, state.shape
        ((1, 8, 2, 4), (1, 2, 4, 16))
    """
    where = "ssd_scan"
    sizes = check(where, Scan(x, dt, A, B, C, initial_state, lengths, state_lengths))
    check_groups(where, sizes.G, sizes.M)
    if initial_state is None:
        initial_state = jnp.zeros((sizes.B, sizes.M, sizes.P, sizes.R), jnp.float32)
    if lengths is None:
        lengths = jnp.full(sizes.B, sizes.T, jnp.int32)
    if state_lengths is None:
        state_lengths = lengths
    initial_state = initial_state.astype(jnp.float32)
    arrays = Scan(x, dt, A, B, C, initial_state, lengths, state_lengths)
    reason = kernel.why_unsupported(RecordSizes.of(x, B), x.dtype)
    return run(
        where, implementation, IMPLEMENTATIONS, arrays, unsupported=reason, differentiable=True
    )


def ssd_states_frames(
    arrays: ScanFrames,
    *,
    records: RecordSizes,
    first_frame: int = 0,
    chip: Chip = H200,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The states of `ssd_scan_frames` alone, for tokens whose outputs nobody needs; arguments as there, but "triton".

    Returns:
        The arena.
    """
    where = "ssd_states_frames"
    check(where, arrays, **records.dimensions)
    check_frames(where, arrays.arena, "read", arrays.read, records, first=first_frame)
    static = {"records": records, "first_frame": first_frame, "launch": {"chip": chip}}
    reason = kernel.why_unsupported(records, arrays.xBC.dtype)
    found = run(where, implementation, STATES, arrays, unsupported=reason, **static)
    return found[1]


def ssd_scan_frames(
    arrays: ScanFrames,
    *,
    records: RecordSizes,
    first_frame: int = 0,
    chip: Chip = H200,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`ssd_scan` from states in frames to states in frames, with the skip D x added to the outputs.

    Args:
        records: how x and B lie in xBC.
        first_frame: where the layer's begin among the frames of a row.
        chip: the GPU, by which launches are cut up and tiles are chosen.
        implementation: "reference", "xla", "pallas", "triton" (bfloat16 on an NVIDIA GPU, with the packages jax-triton
            and triton), or None to choose among "xla" and "pallas". A named one never falls back. With "triton", the
            tokens between `state_lengths` and `lengths` must lie in one chunk of 64.

    Returns:
        y [B, T, M P] in the dtype of xBC, zero on padding; the arena.
    """
    where = "ssd_scan_frames"
    tokens = check(where, arrays, **records.dimensions).T
    check_frames(where, arrays.arena, "read", arrays.read, records, first=first_frame)
    dtype = arrays.xBC.dtype
    static = {"records": records, "first_frame": first_frame, "launch": {"chip": chip}}
    static |= {"unsupported": kernel.why_unsupported(records, dtype)}
    if implementation == "triton":
        static["no_triton"] = triton_scan.why_unsupported(records, dtype, tokens)
    return run(where, implementation, FRAMES, arrays, **static)

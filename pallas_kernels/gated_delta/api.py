"""Public entries: the scan, window outputs and the fold."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check, check_result_dtype, check_tree
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.gated_delta import reference, scan_kernel, window_kernel, xla
from pallas_kernels.gated_delta.reference import (
    DeltaFold,
    DeltaRings,
    DeltaScan,
    DeltaScanFrames,
    DeltaWindow,
)
from pallas_kernels.plan import H200, Chip
from pallas_kernels.records import RecordSizes, check_frames, check_groups, check_rings

SCANS = {"reference": reference.gated_delta_scan_reference, "xla": xla.gated_delta_scan_xla}
SCAN_FRAMES = {
    "reference": reference.gated_delta_scan_frames_reference,
    "xla": functools.partial(
        reference.gated_delta_scan_frames_reference, scan=xla.gated_delta_scan_xla
    ),
    "pallas": scan_kernel.gated_delta_scan_frames_pallas,
}
FRAMES = {
    "reference": reference.gated_delta_window_frames_reference,
    "xla": xla.gated_delta_window_frames_xla,
}
RINGS = {
    "reference": reference.gated_delta_window_rings_reference,
    "pallas": window_kernel.gated_delta_window_rings_pallas,
}
FOLDS = {"reference": reference.gated_delta_fold_reference, "xla": xla.gated_delta_fold_xla}


def gated_delta_scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    state_lengths: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the gated delta rule over padded rows and returns outputs, what was written, and states.

    Per head, with S' = exp(log_decay_t) state_{t-1}: u_t = beta_t (v_t - S' k_t), state_t = S' + u_t k_t^T, and
    y_t = state_t q_t (arXiv 2412.06464, equation 10).

    Args:
        q, k: [B, T, G, R]. For a rule that is stable, k has length 1. Head m of v uses head m // (M / G).
        v: [B, T, M, P].
        log_decay: [B, T, M] logarithms of the decays, at most 0. beta: [B, T, M] rates of writing, 0 to 2.
        initial_state: [B, M, P, R] float32, or None for zeros.
        lengths: int32[B] valid tokens per row, or None for T. Padding changes nothing.
        state_lengths: int32[B] tokens after which the returned state stands, at most `lengths`;
            None for `lengths`.
        implementation: "reference", "xla", or None to choose. A named one never falls back.

    Returns:
        y [B, T, M, P] in the dtype of v, and u [B, T, M, P] float32, both zero on padding; state [B, M, P, R] float32.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> v, rates = jnp.ones((1, 8, 4, 6)), jnp.full((1, 8, 4), 0.5)
        >>> k = jnp.ones((1, 8, 2, 16)) / 4
        >>> y, u, state = gated_delta_scan(k, k, v, -rates, rates, lengths=jnp.array([5]))
        >>> y.shape, u.shape, state.shape
        ((1, 8, 4, 6), (1, 8, 4, 6), (1, 4, 6, 16))
    """
    where = "gated_delta_scan"
    arrays = DeltaScan(q, k, v, log_decay, beta, initial_state, lengths, state_lengths)
    sizes = check(where, arrays)
    check_groups(where, sizes.G, sizes.M, "k", "v")
    if initial_state is None:
        initial_state = jnp.zeros((sizes.B, sizes.M, sizes.P, sizes.R), jnp.float32)
    if lengths is None:
        lengths = jnp.full(sizes.B, sizes.T, jnp.int32)
    if state_lengths is None:
        state_lengths = lengths
    state = initial_state.astype(jnp.float32)
    arrays = DeltaScan(q, k, v, log_decay, beta, state, lengths, state_lengths)
    return run(where, implementation, SCANS, arrays)


def gated_delta_scan_frames(
    arrays: DeltaScanFrames,
    *,
    records: RecordSizes,
    first_frame: int = 0,
    chip: Chip = H200,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`gated_delta_scan` from states in frames to states in frames, of what the convolution gave.

    Keys are scaled to length 1, queries to length R^-1/2, and the rates of writing are the sigmoids of b.

    Args:
        records: how v and k lie in vkq: v as x, and k as B.
        first_frame: where the layer's begin among the frames of a row.
        chip: the GPU, by which tiles are chosen.
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        y [B, T, M P]; the records u | k | q [B, T, E], of which the first M P + G R columns are what a ring keeps; both
        in the dtype of vkq, and zero on padding. The arena.
    """
    where = "gated_delta_scan_frames"
    sizes = check(where, arrays, **records.dimensions)
    if sizes.columns < records.num_heads:
        raise ValueError(
            f"{where}: projected must end in {records.num_heads} columns of b, got {sizes.columns} in all"
        )
    check_frames(where, arrays.arena, "read", arrays.read, records, first=first_frame)
    reason = scan_kernel.why_unsupported(records, arrays.vkq.dtype)
    static = {"records": records, "first_frame": first_frame, "unsupported": reason}
    return run(where, implementation, SCAN_FRAMES, arrays, launch={"chip": chip}, **static)


def gated_delta_window_frames(
    arrays: DeltaWindow, *, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs of T new tokens per row from a checkpoint in frames and a ring, and what they write.

    Token t of row b stands at ring slot starts[b] + t, where its k and log decay already lie. Every frame is read once,
    and no state is written.

    Args:
        implementation: "reference", "xla", or None for "xla".

    Returns:
        y [B, T, M, P] float32 and u [B, T, M, P] as the ring keeps it, both zero where a token does not count; the
        arena, as it was.
    """
    where = "gated_delta_window_frames"
    sizes = check(where, arrays)
    check_groups(where, sizes.G, sizes.M, "k", "v")
    check_tree(where, arrays.ancestors)
    records = RecordSizes.of(arrays.u, arrays.k)
    check_frames(where, arrays.arena, "frames", arrays.frames, records)
    return run(where, implementation, FRAMES, arrays)


def gated_delta_window_rings(
    arrays: DeltaRings,
    *,
    layer: int,
    first_frame: int = 0,
    records: RecordSizes,
    dtype: jnp.dtype = jnp.float32,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_window_frames` with one layer's records where an engine keeps them, and written there.

    Args:
        layer: which of the rings, and of the rates.
        first_frame: where the layer's begin among the frames of a row.
        records: how u and k lie in a record: M P of u, then G R of k.
        dtype: of the outputs.
        implementation: "reference", "pallas", or None to choose. A named one never falls back.

    Returns:
        y [B, T, M, P], zero where a token is not new; uk, with the u of the new tokens.
    """
    where = "gated_delta_window_rings"
    sizes = check(where, arrays, **records.dimensions)
    check_result_dtype(where, dtype)
    check_rings(where, arrays.uk, layer, sizes.B)
    check_tree(where, arrays.ancestors)
    check_frames(where, arrays.arena, "frames", arrays.frames, records, first=first_frame)
    reason = window_kernel.why_unsupported(records, sizes.S)
    static = {"layer": layer, "first_frame": first_frame, "records": records, "dtype": dtype}
    return run(where, implementation, RINGS, arrays, unsupported=reason, **static)


def gated_delta_fold(
    state: jax.Array,
    u: jax.Array,
    k: jax.Array,
    log_decay: jax.Array,
    *,
    lengths: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Checkpoint and ring records to the next checkpoint.

    Args:
        state: [B, M, P, R] float32 checkpoints.
        u, k, log_decay: ring records, as in `DeltaWindow`.
        lengths: int32[B] records that count, or None for all.
        implementation: "reference", "xla", or None for "xla".

    Returns:
        [B, M, P, R] float32, the state after the last record that counts.

    Example:
        >>> import jax.numpy as jnp
        >>> u, k, log_decay = jnp.ones((1, 32, 2, 4)), jnp.ones((1, 32, 1, 16)), -jnp.ones((1, 32, 2))
        >>> gated_delta_fold(jnp.zeros((1, 2, 4, 16)), u, k, log_decay).shape
        (1, 2, 4, 16)
    """
    where = "gated_delta_fold"
    arrays = DeltaFold(u, k, log_decay, state, lengths)
    sizes = check(where, arrays)
    check_groups(where, sizes.G, sizes.M, "k", "u")
    if lengths is None:
        arrays = arrays._replace(lengths=jnp.full(sizes.B, sizes.S, jnp.int32))
    return run(where, implementation, FOLDS, arrays)

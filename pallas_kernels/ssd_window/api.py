"""Public entries: window outputs and the fold."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check, check_tree
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.records import RecordSizes, check_frames, check_groups, check_rings
from pallas_kernels.ssd_window import kernel, reference, xla
from pallas_kernels.ssd_window.reference import (
    Fold,
    FoldFrames,
    WindowFrames,
    WindowRings,
    WindowScores,
)

FRAMES = {
    "reference": reference.ssd_window_frames_reference,
    "xla": xla.ssd_window_frames_xla,
}
RINGS = {
    "reference": reference.ssd_window_rings_reference,
    "pallas": kernel.ssd_window_rings_pallas,
}
SCORES = {
    "reference": reference.ssd_window_scores_reference,
    "pallas": kernel.ssd_window_scores_pallas,
}
FOLDS = {"reference": reference.fold_reference, "xla": xla.fold_xla}
FRAME_FOLDS = {
    "reference": reference.fold_frames_reference,
    "pallas": kernel.fold_frames_pallas,
}


def ssd_window_frames(
    arrays: WindowFrames, *, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """Outputs of T new tokens per row from a checkpoint in frames and a ring; no state is written.

    Query t of row b stands at ring slot starts[b] + t, where its record already lies. Every frame is read once.

    Args:
        implementation: "reference", "xla", or None for "xla".

    Returns:
        y [B, T, M, P] float32, zero where a token does not count; the arena, as it was.

    Example:
        >>> import jax.numpy as jnp
        >>> x, dt, B = jnp.ones((1, 32, 2, 4)), jnp.ones((1, 32, 2)), jnp.ones((1, 32, 1, 16))
        >>> arena, frames, C = jnp.zeros((2, 128), jnp.uint32), jnp.array([[1]]), jnp.ones((1, 1, 1, 16))
        >>> records, row = (x, dt, -jnp.ones(2), B, C), {"exists": jnp.array([True]), "starts": jnp.array([3])}
        >>> y, _ = ssd_window_frames(WindowFrames(*records, arena, frames, **row))
        >>> y.shape
        (1, 1, 2, 4)
    """
    where = "ssd_window_frames"
    sizes = check(where, arrays)
    check_groups(where, sizes.G, sizes.M)
    check_tree(where, arrays.ancestors)
    records = RecordSizes.of(arrays.x, arrays.B)
    check_frames(where, arrays.arena, "frames", arrays.frames, records)
    if arrays.num_valid is None:
        arrays = arrays._replace(num_valid=jnp.full(sizes.B, sizes.T, jnp.int32))
    return run(where, implementation, FRAMES, arrays)


def ssd_window_rings(
    arrays: WindowRings,
    *,
    layer: int,
    first_frame: int = 0,
    records: RecordSizes,
    dtype: jnp.dtype = jnp.float32,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`ssd_window_frames` with one layer's records where an engine keeps them, and the skip D x added.

    Args:
        layer: which of the rings, and of the rates.
        first_frame: where the layer's begin among the frames of a row.
        records: how x and B lie in a record.
        dtype: of the outputs.
        implementation: "reference", "pallas", or None to choose. A named one never falls back.

    Returns:
        y [B, T, M, P], zero where a token does not count.
    """
    where = "ssd_window_rings"
    sizes = check(where, arrays, **records.dimensions)
    check_rings(where, arrays.xB, layer, sizes.B)
    check_tree(where, arrays.ancestors)
    check_frames(where, arrays.arena, "frames", arrays.frames, records, first=first_frame)
    reason = kernel.why_unsupported(records, sizes.S)
    static = {"layer": layer, "first_frame": first_frame, "records": records, "dtype": dtype}
    return run(where, implementation, RINGS, arrays, unsupported=reason, **static)


def ssd_window_scores(
    arrays: WindowScores,
    *,
    layer: int,
    records: RecordSizes,
    implementation: Implementation | None = None,
) -> jax.Array:
    """C . B of every new token and slot, for layers that read the records of another with a C of their own.

    Where the layer makes its records itself, `causal_conv_window` leaves these scores.

    Args:
        layer: which of the rings. records: how x and B lie in a record.
        implementation: "reference", "pallas", or None to choose. A named one never falls back.

    Returns:
        float32[B, T, G, S], zero for tokens that do not count, and for slots after a token's own.
    """
    where = "ssd_window_scores"
    sizes = check(where, arrays, **records.dimensions)
    check_rings(where, arrays.xB, layer, sizes.B)
    static = {"layer": layer, "records": records}
    reason = records.why_unsupported()
    return run(where, implementation, SCORES, arrays, unsupported=reason, **static)


def fold(
    state: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    *,
    lengths: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Checkpoint and ring records to the next checkpoint.

    Args:
        state: [B, M, P, R] float32 checkpoints.
        x, dt, B: ring records, as in `WindowFrames`.
        A: [M] decay rates, negative.
        lengths: int32[B] records that count, or None for all.
        implementation: "reference", "xla", or None for "xla".

    Returns:
        [B, M, P, R] float32, the state after the last record that counts.

    Example:
        >>> import jax.numpy as jnp
        >>> x, dt, B = jnp.ones((1, 32, 2, 4)), jnp.ones((1, 32, 2)), jnp.ones((1, 32, 1, 16))
        >>> fold(jnp.zeros((1, 2, 4, 16)), x, dt, -jnp.ones(2), B).shape
        (1, 2, 4, 16)
    """
    where = "fold"
    arrays = Fold(x, dt, A, B, state, lengths)
    sizes = check(where, arrays)
    check_groups(where, sizes.G, sizes.M)
    if lengths is None:
        arrays = arrays._replace(lengths=jnp.full(sizes.B, sizes.S, jnp.int32))
    return run(where, implementation, FOLDS, arrays)


def fold_frames(
    arrays: FoldFrames,
    *,
    records: RecordSizes,
    per_layer: int,
    scaled: bool = True,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`fold` of all layers of some rows, from frames to frames of one arena; returns the arena.

    Args:
        records: how x and B lie in a record. per_layer: frames of one layer.
        scaled: what a record adds is multiplied by its step size, as in Mamba-2; false for a gated delta net, whose
            step sizes only make the decays.
        implementation: "reference", "pallas", or None to choose.
    """
    where = "fold_frames"
    sizes = check(where, arrays, **records.dimensions)
    needed = sizes.L * per_layer
    if sizes.B > sizes.rows:
        raise ValueError(f"{where}: {sizes.B} rows must lie within the rings {arrays.xB.shape[:2]}")
    if per_layer < 1:
        raise ValueError(f"{where}: per_layer must be at least 1, got {per_layer}")
    check_frames(where, arrays.arena, "read", arrays.read, records, last=per_layer)
    if sizes.F < needed:
        raise ValueError(
            f"{where}: read and write must have {needed} frames a row for {sizes.L} layers, got {sizes.F}"
        )
    reason = kernel.why_unsupported(records, sizes.S)
    static = {"records": records, "per_layer": per_layer, "scaled": scaled}
    return run(where, implementation, FRAME_FOLDS, arrays, unsupported=reason, **static)

"""Public entries: window outputs and the fold."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check, check_tree
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.mamba2 import RecordSizes, check_frames, check_groups, check_rings
from pallas_kernels.ssd_window import kernel, reference, xla
from pallas_kernels.ssd_window.reference import Fold, FoldFrames, WindowFrames, WindowRings

FRAMES = {
    "reference": reference.ssd_window_frames_reference,
    "xla": xla.ssd_window_frames_xla,
}
RINGS = {
    "reference": reference.ssd_window_rings_reference,
    "pallas": kernel.ssd_window_rings_pallas,
}
FOLDS = {"reference": reference.fold_reference, "xla": xla.fold_xla}
FRAME_FOLDS = {
    "reference": reference.fold_frames_reference,
    "pallas": kernel.fold_frames_pallas,
}


def ssd_window_frames(
    arena: jax.Array,
    frames: jax.Array,
    exists: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    *,
    starts: jax.Array,
    num_valid: jax.Array | None = None,
    ancestors: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of T new tokens per row from a checkpoint in frames and a ring; no state is written.

    Query t of row b stands at ring slot starts[b] + t, where its record already lies. Every frame is read once.

    Args:
        arena: uint32[U, W] frames; a frame holds W // (P R) whole heads of float32 bits, [h, P, R].
        frames: int32[B, n] frames of each row's state, in the order of its heads; the last one may be
            partly empty.
        exists: bool[B]; where false the state is zero, and what its frames hold does not matter.
        x: [B, S, M, P] ring records; slots past the last valid query are never read.
        dt: [B, S, M] float32 ring step sizes.
        A: [M] decay rates, negative.
        B: [B, S, G, R] ring records.
        C: [B, T, G, R] of the new tokens.
        starts: int32[B] slot of the first new token; starts + num_valid is at most S.
        num_valid: int32[B] new tokens that count, or None for T.
        ancestors: int32[B, T] of a tree of new tokens: bit j of ancestors[b, t] is set where token j is an
            ancestor of token t, or t itself. None for a chain.
        implementation: "reference", "xla", or None for "xla".

    Returns:
        y [B, T, M, P] float32, zero where a token does not count; the arena, as it was.

    Example:
        >>> import jax.numpy as jnp
        >>> x, dt, B = jnp.ones((1, 32, 2, 4)), jnp.ones((1, 32, 2)), jnp.ones((1, 32, 1, 16))
        >>> arena, frames, C = jnp.zeros((2, 128), jnp.uint32), jnp.array([[1]]), jnp.ones((1, 1, 1, 16))
        >>> records = x, dt, -jnp.ones(2), B, C
        >>> y, _ = ssd_window_frames(arena, frames, jnp.array([True]), *records, starts=jnp.array([3]))
        >>> y.shape
        (1, 1, 2, 4)
    """
    where = "ssd_window_frames"
    own = (arena, frames, exists, starts, num_valid, ancestors)
    arrays = WindowFrames(x, dt, A, B, C, *own)
    sizes = check(where, arrays)
    check_groups(where, sizes.G, sizes.M)
    check_tree(where, ancestors)
    check_frames(where, arena, "frames", frames, RecordSizes.of(x, B))
    if num_valid is None:
        arrays = arrays._replace(num_valid=jnp.full(sizes.B, sizes.T, jnp.int32))
    return run(where, implementation, FRAMES, arrays)


def ssd_window_rings(
    arena: jax.Array,
    frames: jax.Array,
    exists: jax.Array,
    xB: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    C: jax.Array,
    *,
    layer: int,
    first_frame: int = 0,
    records: RecordSizes,
    starts: jax.Array,
    num_valid: jax.Array,
    D: jax.Array,
    scores: jax.Array,
    ancestors: jax.Array | None = None,
    dtype: jnp.dtype = jnp.float32,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`ssd_window_frames` with one layer's records where an engine keeps them, and the skip D x added.

    Args:
        arena, exists, starts, num_valid, ancestors: as there.
        frames: int32[B, F] frames of whole checkpoints, of which the layer's begin at `first_frame`.
        xB: [L, B', S, M P + G R] rings of all layers, B' >= B; floats, or their bits as unsigned integers.
        dt: float32[L, B', S, M] rings of the step sizes.
        A: float32[L, M] decay rates of all layers.
        C: [B, T, G R] of the new tokens.
        layer: which of the rings, and of the rates.
        records: how x and B lie in a record.
        D: float32[M] factor of a new token's own x in its output.
        scores: float32[B, T, G, S] C . B of every query and slot, as `causal_conv_window` leaves them; those of
            slots a query does not see do not matter.
        dtype: of the outputs.
        implementation: "reference", "pallas", or None to choose. A named one never falls back.

    Returns:
        y [B, T, M, P], zero where a token does not count.
    """
    where = "ssd_window_rings"
    own = (arena, frames, exists, starts, num_valid, ancestors)
    arrays = WindowRings(C, xB, dt, A, D, scores, *own)
    sizes = check(where, arrays, **records.dimensions)
    check_rings(where, xB, layer, sizes.B)
    check_tree(where, ancestors)
    check_frames(where, arena, "frames", frames, records, first=first_frame)
    reason = kernel.why_unsupported(records, sizes.S)
    static = {"layer": layer, "first_frame": first_frame, "records": records, "dtype": dtype}
    return run(where, implementation, RINGS, arrays, unsupported=reason, **static)


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
        x, dt, B: ring records, as in `ssd_window_frames`.
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
    arena: jax.Array,
    read: jax.Array,
    write: jax.Array,
    exists: jax.Array,
    lengths: jax.Array,
    xB: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    *,
    records: RecordSizes,
    per_layer: int,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`fold` of all layers of some rows, from frames to frames of one arena; returns the arena.

    Args:
        arena: uint32[U, W], as in `ssd_window_frames`.
        read, write: int32[B, F] frames of each row's old and new checkpoint, the same or others, layer
            by layer; what follows the last layer's is not looked at.
        exists: bool[B]; where false the old state is zero.
        lengths: int32[B] records to fold; a row of length -1 is left alone.
        xB, dt: rings, as in `ssd_window_rings`; row b's are at place b.
        A: float32[L, M] decay rates.
        records: how x and B lie in a record. per_layer: frames of one layer.
        implementation: "reference", "pallas", or None to choose.
    """
    where = "fold_frames"
    arrays = FoldFrames(lengths, xB, dt, A, arena, read, write, exists)
    sizes = check(where, arrays, **records.dimensions)
    needed = sizes.L * per_layer
    if sizes.B > sizes.rows:
        raise ValueError(f"{where}: {sizes.B} rows must lie within the rings {xB.shape[:2]}")
    if per_layer < 1:
        raise ValueError(f"{where}: per_layer must be at least 1, got {per_layer}")
    for name, frames in (("read", read), ("write", write)):
        check_frames(where, arena, name, frames, records, last=per_layer)
    if sizes.F < needed:
        raise ValueError(
            f"{where}: read and write must have {needed} frames a row for {sizes.L} layers, got {sizes.F}"
        )
    reason = kernel.why_unsupported(records, sizes.S)
    static = {"records": records, "per_layer": per_layer}
    return run(where, implementation, FRAME_FOLDS, arrays, unsupported=reason, **static)

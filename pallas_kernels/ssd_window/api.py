"""Public entries: window outputs and the fold."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, check_rank, check_shape, choose
from pallas_kernels.ssd_window.reference import (
    fold_reference,
    ssd_window_frames_reference,
    ssd_window_reference,
)
from pallas_kernels.ssd_window.xla import fold_xla, ssd_window_frames_xla, ssd_window_xla

WINDOWS = {"reference": ssd_window_reference, "xla": ssd_window_xla}
FRAMES = {"reference": ssd_window_frames_reference, "xla": ssd_window_frames_xla}
FOLDS = {"reference": fold_reference, "xla": fold_xla}


def ssd_window(
    state: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    *,
    starts: jax.Array,
    num_valid: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Outputs of T new tokens per row from a checkpoint and a ring; no state is written.

    Query t of row b stands at ring slot starts[b] + t, where its record already lies.

    Args:
        state: [B, M, P, R] float32 checkpoints.
        x: [B, S, M, P] ring records; slots past the last valid query are never read.
        dt: [B, S, M] float32 ring step sizes.
        A: [M] decay rates, negative.
        B: [B, S, G, R] ring records.
        C: [B, T, G, R] of the new tokens.
        starts: int32[B] slot of the first new token; starts + num_valid is at most S.
        num_valid: int32[B] new tokens that count, or None for T.
        implementation: "reference", "xla", or None to choose.

    Returns:
        y [B, T, M, P] float32, zero where a token does not count.

    Example:
        >>> import jax.numpy as jnp
        >>> x, dt, B = jnp.ones((1, 32, 2, 4)), jnp.ones((1, 32, 2)), jnp.ones((1, 32, 1, 16))
        >>> state, C = jnp.zeros((1, 2, 4, 16)), jnp.ones((1, 1, 1, 16))
        >>> ssd_window(state, x, dt, -jnp.ones(2), B, C, starts=jnp.array([3])).shape
        (1, 1, 2, 4)
    """
    where = "ssd_window"
    num_valid = _checked(where, x, dt, A, B, C, starts, num_valid)
    rows, _, heads, width = x.shape
    check_shape(where, "state", state, (rows, heads, width, C.shape[3]))
    return choose(implementation, WINDOWS, where)(state, x, dt, A, B, C, starts, num_valid)


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
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`ssd_window` with the checkpoints still in their frames, each of which is read once.

    Args:
        arena: uint32[U, W] frames; a frame holds W // (P R) whole heads of float32 bits, [h, P, R].
        frames: int32[B, n] frames of each row's state, in the order of its heads; the last one may be
            partly empty.
        exists: bool[B]; where false the state is zero, and what its frames hold does not matter.
        x, dt, A, B, C, starts, num_valid, implementation: as in `ssd_window`.

    Returns:
        y as in `ssd_window`; the arena, as it was.
    """
    where = "ssd_window_frames"
    num_valid = _checked(where, x, dt, A, B, C, starts, num_valid)
    rows, _, heads, width = x.shape
    check_rank(where, "frames", frames, 2)
    check_shape(where, "exists", exists, (rows,))
    held = arena.shape[1] // (width * C.shape[3]) * frames.shape[1]
    if held < heads or frames.shape[0] != rows:
        raise ValueError(
            f"{where}: frames must hold {heads} heads of each of {rows} rows, got {held} in {frames.shape}"
        )
    run = choose(implementation, FRAMES, where)
    return run(arena, frames, exists, x, dt, A, B, C, starts, num_valid)


def _checked(where: str, x, dt, A, B, C, starts, num_valid) -> jax.Array:
    """Checks what both windows take; returns num_valid, all queries for None."""
    check_rank(where, "x", x, 4)
    check_rank(where, "C", C, 4)
    rows, slots, heads, _ = x.shape
    check_shape(where, "dt", dt, (rows, slots, heads))
    check_shape(where, "A", A, (heads,))
    check_shape(where, "B", B, (rows, slots, *C.shape[2:]))
    check_shape(where, "starts", starts, (rows,))
    if num_valid is None:
        num_valid = jnp.full(rows, C.shape[1], jnp.int32)
    check_shape(where, "num_valid", num_valid, (rows,))
    return num_valid


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
        x, dt, B: ring records, as in `ssd_window`.
        A: [M] decay rates, negative.
        lengths: int32[B] records that count, or None for all.
        implementation: "reference", "xla", or None to choose.

    Returns:
        [B, M, P, R] float32, the state after the last record that counts.

    Example:
        >>> import jax.numpy as jnp
        >>> x, dt, B = jnp.ones((1, 32, 2, 4)), jnp.ones((1, 32, 2)), jnp.ones((1, 32, 1, 16))
        >>> fold(jnp.zeros((1, 2, 4, 16)), x, dt, -jnp.ones(2), B).shape
        (1, 2, 4, 16)
    """
    where = "fold"
    check_rank(where, "x", x, 4)
    rows, slots, heads, width = x.shape
    check_rank(where, "B", B, 4)
    check_shape(where, "state", state, (rows, heads, width, B.shape[-1]))
    check_shape(where, "dt", dt, (rows, slots, heads))
    check_shape(where, "A", A, (heads,))
    check_shape(where, "B", B, (rows, slots, *B.shape[2:]))
    if lengths is None:
        lengths = jnp.full(rows, slots, jnp.int32)
    check_shape(where, "lengths", lengths, (rows,))
    return choose(implementation, FOLDS, where)(state, x, dt, A, B, lengths)

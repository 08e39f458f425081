"""Public entries of the selective scan: of arrays, and of an engine's checkpoints and rings."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check, check_tree
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.records import check_rings
from pallas_kernels.selective_scan import kernel, reference, xla
from pallas_kernels.selective_scan.reference import (
    SelectiveChunk,
    SelectiveScan,
    SelectiveWindow,
)

IMPLEMENTATIONS = {
    "reference": reference.selective_scan_reference,
    "xla": xla.selective_scan_xla,
}
CHUNKS = {
    "reference": reference.selective_chunk_reference,
    "pallas": kernel.selective_chunk_pallas,
}
WINDOWS = {
    "reference": reference.selective_window_reference,
    "pallas": kernel.selective_window_pallas,
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


def selective_chunk(
    arrays: SelectiveChunk,
    *,
    layer: int,
    first_frame: int = 0,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`selective_scan` of a chunk, from states in frames to states in frames and in rings, with skip and gate.

    Args:
        layer: of the rings. first_frame: where the layer's begin among the frames of a row.
        implementation: "reference", "pallas", or None to choose. A named one never falls back.

    Returns:
        y [B, T, E], (y + D x) silu(z) in the dtype of x, zero on padding. The arena, with the states after
        `state_lengths` tokens; the rings, with those after `lengths`.
    """
    where = "selective_chunk"
    sizes = check(where, arrays)
    _check_sizes(where, sizes, arrays.read, first_frame)
    check_rings(where, arrays.state, layer, 1)
    reason = kernel.why_unsupported(sizes.R)
    static = {"layer": layer, "first_frame": first_frame, "unsupported": reason}
    return run(where, implementation, CHUNKS, arrays, **static)


def selective_window(
    arrays: SelectiveWindow,
    *,
    layer: int,
    first_frame: int = 0,
    keeps: bool = False,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`selective_scan` of a window of T tokens per row, whose states go to one layer's rings in place.

    A row without new tokens is left alone, and so are rows past B and other layers.

    Args:
        layer, first_frame: as in `selective_chunk`.
        keeps: a copy of the state is kept after each of the T tokens, in the copies after the first one, in a ring.
            Otherwise only that after the last new token, in copy (base + num_valid) % copies.
        implementation: as in `selective_chunk`.

    Returns:
        y [B, T, E], as of `selective_chunk`, zero for tokens that are not new; the rings.
    """
    where = "selective_window"
    sizes = check(where, arrays)
    _check_sizes(where, sizes, arrays.frames, first_frame)
    check_rings(where, arrays.state, layer, sizes.B)
    check_tree(where, arrays.ancestors)
    if keeps and sizes.K <= sizes.T:
        raise ValueError(
            f"{where}: a ring must have more than {sizes.T} copies to keep a state after each of so many tokens, "
            f"got {sizes.K}"
        )
    if arrays.ancestors is not None and not keeps:
        raise ValueError(f"{where}: a tree needs keeps=True, because any of its tokens may stay")
    reason = kernel.why_unsupported(sizes.R)
    static = {"layer": layer, "first_frame": first_frame, "keeps": keeps, "unsupported": reason}
    return run(where, implementation, WINDOWS, arrays, **static)


def _check_sizes(where: str, sizes, frames: jax.Array, first_frame: int) -> None:
    for name, found, wanted in (
        ("BC", sizes.two_R, 2 * sizes.R),
        ("projected", sizes.two_E, 2 * sizes.E),
        ("state", sizes.ER, sizes.E * sizes.R),
    ):
        if found != wanted:
            raise ValueError(f"{where}: {name} must have {wanted} columns, got {found}")
    held = sizes.words // sizes.R * max(frames.shape[1] - first_frame, 0)
    if first_frame < 0 or held < sizes.E:
        raise ValueError(
            f"{where}: frames must hold the states of {sizes.E} channels from frame {first_frame} on, got {held}"
        )

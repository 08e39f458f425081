"""Public entries of the short convolution, with gates or with SiLU."""

from __future__ import annotations

import jax

from pallas_kernels.arguments import check, check_dtype, check_tree
from pallas_kernels.checkpoint import layer_words
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.short_conv import kernel, reference
from pallas_kernels.short_conv.reference import ShortChunk, ShortTail, ShortWindow

CHUNKS = {
    "reference": reference.short_conv_reference,
    "pallas": kernel.short_conv_pallas,
}
WINDOWS = {
    "reference": reference.short_conv_window_reference,
    "pallas": kernel.short_conv_window_pallas,
}
TAILS = {
    "reference": reference.store_short_tail_reference,
    "pallas": kernel.store_short_tail_pallas,
}


def short_conv(
    projected: jax.Array,
    history: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    lengths: jax.Array,
    *,
    gated: bool = True,
    implementation: Implementation | None = None,
) -> jax.Array:
    """C * conv(B * x) over a chunk, a causal depthwise convolution without an activation; or silu(conv(x)).

    Args:
        projected: [B, T, 3 E] B | C | x of each token; without gates [B, T, 2 E] x | z, of which z is not read.
        history: [B, W - 1, E] products B x, or x, before the chunk, floats or their bits.
        weight: [W, E] taps. bias: [E] or None. lengths: int32[B] tokens that exist.
        gated: with gates, or with SiLU.
        implementation: "reference", "pallas", or None to choose. A named one never falls back.

    Returns:
        y [B, T, E] in the dtype of `projected`, zero on padding.

    Example:
        >>> import jax.numpy as jnp
        >>> projected, history, weight = jnp.ones((1, 5, 12)), jnp.zeros((1, 2, 4)), jnp.ones((3, 4))
        >>> y = short_conv(projected, history, weight, None, jnp.array([4]))
        >>> y[0, :, 0].tolist()
        [1.0, 2.0, 3.0, 3.0, 0.0]
    """
    where, arrays = "short_conv", ShortChunk(projected, history, weight, bias, lengths)
    sizes = check(where, arrays)
    _check_sizes(where, sizes.columns, sizes.E, sizes.before, sizes.W, gated)
    return run(where, implementation, CHUNKS, arrays, gated=gated)


def short_conv_window(
    arrays: ShortWindow,
    *,
    layer: int,
    moves: bool = True,
    gated: bool = True,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`short_conv` of a window of T tokens per row, whose inputs go to one layer's ring in place.

    Tokens first <= t < num_valid are new. Columns of earlier ones are taken from the ring, those of later ones count as
    zero. A row without new tokens is left alone, and so are rows past B and other layers.

    Args:
        layer: of the ring.
        moves: the next window begins after the last of T tokens, if all exist.
        gated, implementation: as in `short_conv`.

    Returns:
        conv, as `causal_conv_window` leaves it; y [B, T, E] in the dtype of `projected`, of `weight` for parts, zero
        for tokens that are not new.
    """
    where = "short_conv_window"
    sizes = check(where, arrays)
    _check_sizes(where, sizes.columns, sizes.E, sizes.W - 1, sizes.W, gated)
    if sizes.C < sizes.W - 1 + sizes.T:
        raise ValueError(
            f"{where}: conv must have room for {sizes.W - 1} + {sizes.T} columns, got {sizes.C}; "
            "make the ring for wider windows"
        )
    if not 0 <= layer < sizes.L or sizes.B > sizes.rows:
        raise ValueError(
            f"{where}: layer {layer} and {sizes.B} rows must lie within the rings {arrays.conv.shape[:2]}"
        )
    check_tree(where, arrays.ancestors)
    static = {"layer": layer, "moves": moves and arrays.ancestors is None, "gated": gated}
    reason = kernel.window_unsupported(sizes.T)
    return run(where, implementation, WINDOWS, arrays, unsupported=reason, **static)


def store_short_tail(
    arrays: ShortTail,
    *,
    layer: int,
    gated: bool = True,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes a layer's share of ring and checkpoint after chunks of B rows.

    The ring gets the inputs before the chunk's end; the checkpoint's frames those before token `state_lengths`.

    Args:
        layer: of the rings and of the frames.
        gated, implementation: as in `short_conv`.

    Returns:
        arena, conv.
    """
    where, conv = "store_short_tail", arrays.conv
    sizes = check(where, arrays)
    _check_sizes(where, sizes.columns, sizes.E, sizes.before, sizes.before + 1, gated)
    check_dtype(where, "history", arrays.history, (conv.dtype.name,))
    if not 0 <= layer < conv.shape[0]:
        raise ValueError(f"{where}: layer must lie in [0, {conv.shape[0]}), got {layer}")
    needed = (layer + 1) * layer_words(sizes.before, sizes.E, conv.dtype)
    if needed > sizes.n * sizes.words:
        raise ValueError(
            f"{where}: frames must hold {needed} words a row, got {sizes.n} of {sizes.words}; "
            "pass those of the whole checkpoint"
        )
    return run(where, implementation, TAILS, arrays, layer=layer, gated=gated)


def _check_sizes(
    where: str, columns: int, channels: int, before: int, width: int, gated: bool
) -> None:
    parts = 3 if gated else 2
    if columns != parts * channels:
        raise ValueError(
            f"{where}: projected must have {parts} x {channels} columns, got {columns}"
        )
    if before != width - 1:
        raise ValueError(
            f"{where}: history must have {width - 1} columns for {width} taps, got {before}"
        )

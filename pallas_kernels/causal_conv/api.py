"""Public entries: the convolution over prompts and over windows."""

from __future__ import annotations

import jax

from pallas_kernels.causal_conv import kernel, reference
from pallas_kernels.dispatch import (
    BITS,
    FLOAT32,
    FLOATS,
    INTS,
    Implementation,
    check_ancestors,
    check_dtypes,
    check_rank,
    check_shape,
    run,
)
from pallas_kernels.parts import check_parts
from pallas_kernels.records import ProjectionLayout

CHUNKS = {
    "reference": reference.causal_conv_reference,
    "pallas": kernel.causal_conv_pallas,
}
WINDOWS = {
    "reference": reference.causal_conv_window_reference,
    "pallas": kernel.causal_conv_window_pallas,
}


def causal_conv(
    projected: jax.Array,
    history: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    dt_bias: jax.Array,
    lengths: jax.Array,
    *,
    layout: ProjectionLayout,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolution inputs and step sizes of a prompt chunk, straight from what in_proj gave.

    Per channel, y_t = silu(bias + sum over w of weight_w raw_(t - W + 1 + w)); dt = softplus(dt + dt_bias).
    All in float32, and rounded once at the end.

    Args:
        projected: [B, T, z M P | x M P | B G R | C G R | dt M], whole, so that no part is copied.
        history: [B, W - 1, E] raw columns before the chunk; floats, or their bits as unsigned integers.
        weight: [W, E] taps, the token's own last. bias: [E] or None. dt_bias: [M].
        lengths: int32[B] tokens that exist; what lies past them is never read.
        layout: how a token's projection is laid out.
        implementation: "reference", "pallas", or None to choose. A named one never falls back.

    Returns:
        xBC [B, T, E] in the dtype of `projected`, and dt float32[B, T, M]; both zero past the lengths.

    Example:
        >>> import jax.numpy as jnp
        >>> layout = ProjectionLayout(num_heads=2, head_dim=4, num_groups=1, state_size=3)
        >>> projected, history = jnp.ones((1, 5, layout.projected_size)), jnp.zeros((1, 3, 14))
        >>> weight, lengths = jnp.ones((4, 14)), jnp.array([5])
        >>> xBC, dt = causal_conv(projected, history, weight, None, jnp.ones(2), lengths, layout=layout)
        >>> xBC.shape, dt.shape
        ((1, 5, 14), (1, 5, 2))
    """
    where = "causal_conv"
    check_rank(where, "projected", projected, 3)
    check_dtypes(where, FLOATS, projected=projected)
    rows, _ = _check_layer(where, projected.shape, weight, bias, dt_bias, layout)
    check_shape(where, "history", history, (rows, layout.history, layout.conv_size))
    check_shape(where, "lengths", lengths, (rows,))
    check_dtypes(where, FLOATS + BITS, history=history)
    check_dtypes(where, INTS, lengths=lengths)
    arrays = (projected, history, weight, bias, dt_bias, lengths)
    return run(where, implementation, CHUNKS, *arrays, layout=layout)


def causal_conv_window(
    projected: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    dt_bias: jax.Array,
    conv: jax.Array,
    xB: jax.Array,
    dt: jax.Array,
    *,
    layer: int,
    layout: ProjectionLayout,
    starts: jax.Array,
    first: jax.Array,
    num_valid: jax.Array,
    ancestors: jax.Array | None = None,
    moves: bool = True,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Convolution and step sizes of a window of T tokens per row, written into one layer's rings in place.

    Tokens first <= t < num_valid are new. Raw columns of earlier ones are taken from the ring, those of later
    ones count as zero. A row without new tokens is left alone, and so are rows past B and other layers.

    Args:
        projected: as in `causal_conv`, or parts float32[S, B, T, ...] of that product, whose sum counts in the
            dtype of `weight`.
        weight, bias, dt_bias, layout: as in `causal_conv`.
        conv: [L, B', W - 1 + T', E] raw columns, B' >= B and T' >= T: the W - 1 before the window, then those of
            its tokens; floats, or their bits as unsigned integers.
        xB: [L, B', S, M P + G R] records, as floats or bits. dt: float32[L, B', S, M] step sizes.
        layer: which of the rings.
        starts: int32[B] slot of each row's token 0; starts + num_valid is at most S.
        first: int32[B] leading tokens that the rings hold already.
        num_valid: int32[B] tokens that exist; at most T.
        ancestors: int32[B, T] of a tree of tokens, as in `ssd_window_frames`: bit j of ancestors[b, t] is set where
            token j is an ancestor of token t, or t itself, and ancestors come first. None for a chain.
        moves: the next window begins behind the last of T tokens, if all exist. Never true of a tree, nor where it is
            decided later how many of the tokens stay.
        implementation: as in `causal_conv`.

    Returns:
        conv: the columns of tokens from `first` on are written, zero where there is no token; where the row `moves`,
            the window's last W - 1 columns become the first ones.
        xB, dt: the new tokens' entries are written.
        C: [B, T, G R] in the dtype of `projected`, of `weight` for parts; zero for tokens that are not new.
        scores: float32[B, T, G, S] C . B of each new token with the records at slots <= starts + t; else zero.

    Example:
        >>> import jax.numpy as jnp
        >>> layout = ProjectionLayout(num_heads=2, head_dim=4, num_groups=1, state_size=3)
        >>> rings = jnp.zeros((1, 1, 4, 14)), jnp.zeros((1, 1, 32, 11)), jnp.zeros((1, 1, 32, 2))
        >>> here = {"starts": jnp.array([7]), "first": jnp.array([0]), "num_valid": jnp.array([1])}
        >>> projected, weight = jnp.ones((1, 1, layout.projected_size)), jnp.ones((4, 14))
        >>> conv, xB, dt, C, scores = causal_conv_window(
        ...     projected, weight, None, jnp.ones(2), *rings, layer=0, layout=layout, **here
        ... )
        >>> C.shape, scores.shape
        ((1, 1, 3), (1, 1, 1, 32))
    """
    where = "causal_conv_window"
    check_dtypes(where, FLOATS, projected=projected)
    shape = check_parts(where, "projected", projected, 3)
    rows, tokens = _check_layer(where, shape, weight, bias, dt_bias, layout)
    for name, ring in (("conv", conv), ("xB", xB), ("dt", dt)):
        check_rank(where, name, ring, 4)
    layers, ring_rows, slots, _ = xB.shape
    check_shape(where, "xB", xB, (layers, ring_rows, slots, layout.record_size))
    check_shape(where, "dt", dt, (layers, ring_rows, slots, layout.num_heads))
    check_shape(where, "conv", conv, (layers, ring_rows, conv.shape[2], layout.conv_size))
    if conv.shape[2] < layout.history + tokens:
        raise ValueError(
            f"{where}: conv must have room for {layout.history} + {tokens} columns, got {conv.shape[2]}; "
            "make the ring for wider windows"
        )
    if not 0 <= layer < layers or rows > ring_rows:
        raise ValueError(
            f"{where}: layer {layer} and {rows} rows must lie within the rings {xB.shape[:2]}"
        )
    for name, array in (("starts", starts), ("first", first), ("num_valid", num_valid)):
        check_shape(where, name, array, (rows,))
    check_dtypes(where, INTS, starts=starts, first=first, num_valid=num_valid)
    check_dtypes(where, FLOATS + BITS, conv=conv, xB=xB)
    check_dtypes(where, FLOAT32, dt=dt)
    check_ancestors(where, ancestors, rows, tokens)
    arrays = (projected, weight, bias, dt_bias, conv, xB, dt, starts, first, num_valid, ancestors)
    reason = kernel.why_unsupported(layout, tokens)
    static = {"layer": layer, "layout": layout, "moves": moves and ancestors is None}
    return run(where, implementation, WINDOWS, *arrays, unsupported=reason, **static)


def _check_layer(
    where: str,
    shape: tuple[int, ...],
    weight: jax.Array,
    bias: jax.Array | None,
    dt_bias: jax.Array,
    layout: ProjectionLayout,
) -> tuple[int, int]:
    """Checks the shape of what in_proj gave, and the layer's weights; returns the numbers of rows and tokens."""
    if shape[2] != layout.projected_size:
        raise ValueError(
            f"{where}: projected must have shape {(*shape[:2], layout.projected_size)}, got {shape}"
        )
    check_shape(where, "weight", weight, (layout.conv_width, layout.conv_size))
    if bias is not None:
        check_shape(where, "bias", bias, (layout.conv_size,))
    check_shape(where, "dt_bias", dt_bias, (layout.num_heads,))
    check_dtypes(where, FLOATS, weight=weight, bias=bias, dt_bias=dt_bias)
    return shape[:2]

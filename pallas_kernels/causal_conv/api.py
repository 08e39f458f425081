"""Public entries: the convolution over prompts and over windows."""

from __future__ import annotations

import jax

from pallas_kernels.arguments import check, check_tree
from pallas_kernels.causal_conv import kernel, reference
from pallas_kernels.causal_conv.reference import Chunk, ConvWindow
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.records import ProjectionLayout, check_rings

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
    where, arrays = "causal_conv", Chunk(projected, history, weight, bias, dt_bias, lengths)
    check(where, arrays, **layout.dimensions)
    return run(where, implementation, CHUNKS, arrays, layout=layout)


def causal_conv_window(
    arrays: ConvWindow,
    *,
    layer: int,
    layout: ProjectionLayout,
    moves: bool = True,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, ...]:
    """Convolution and step sizes of a window of T tokens per row, written into one layer's rings in place.

    Tokens first <= t < num_valid are new. Raw columns of earlier ones are taken from the ring, those of later
    ones count as zero. A row without new tokens is left alone, and so are rows past B and other layers.

    In a gated delta net (`layout.delta`), k and q of each group are scaled to length 1, and q also by R^-1/2, both in
    float32. What a token writes follows from its outputs, so v is left beside the ring, which gets k alone.

    Args:
        layer: which of the rings. layout: as in `causal_conv`.
        moves: the next window begins after the last of T tokens, if all exist. Never true of a tree, nor where it is
            decided later how many of the tokens stay.
        implementation: as in `causal_conv`.

    Returns:
        conv: the columns of tokens from `first` on are written, zero where there is no token; where the row `moves`,
            the window's last W - 1 columns become the first ones.
        xB, dt: the new tokens' entries are written.
        C: [B, T, G R] in the dtype of `projected`, of `weight` for parts; zero for tokens that are not new.
        scores: float32[B, T, G, S] C . B of each new token with the records at slots <= starts + t; else zero.

        Of a gated delta net: conv; xB, of which the new tokens' k are written; dt; q float32[B, T, G R]; scores
        float32[B, 2, T, G, S], k_t . k and then q_t . k; v [B, T, M P] in the dtype that C would have; and
        beta float32[B, T, M], the rates of writing. q, v and beta are zero for tokens that are not new.

    Example:
        >>> import jax.numpy as jnp
        >>> layout = ProjectionLayout(num_heads=2, head_dim=4, num_groups=1, state_size=3)
        >>> rings = jnp.zeros((1, 1, 32, 11)), jnp.zeros((1, 1, 32, 2)), jnp.zeros((1, 1, 4, 14))
        >>> row = {"starts": jnp.array([7]), "first": jnp.array([0]), "num_valid": jnp.array([1])}
        >>> projected, weight = jnp.ones((1, 1, layout.projected_size)), jnp.ones((4, 14))
        >>> arrays = ConvWindow(projected, weight, None, jnp.ones(2), *rings, **row)
        >>> conv, xB, dt, C, scores = causal_conv_window(arrays, layer=0, layout=layout)
        >>> C.shape, scores.shape
        ((1, 1, 3), (1, 1, 1, 32))
    """
    where = "causal_conv_window"
    sizes = check(where, arrays, **layout.dimensions)
    if sizes.C < layout.history + sizes.T:
        raise ValueError(
            f"{where}: conv must have room for {layout.history} + {sizes.T} columns, got {sizes.C}; "
            "make the ring for wider windows"
        )
    check_rings(where, arrays.xB, layer, sizes.B)
    check_tree(where, arrays.ancestors)
    reason = kernel.why_unsupported(layout, sizes.T)
    static = {"layer": layer, "layout": layout, "moves": moves and arrays.ancestors is None}
    return run(where, implementation, WINDOWS, arrays, unsupported=reason, **static)

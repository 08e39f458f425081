"""Public entry of paged attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check, check_group, check_result_dtype, check_tree, check_words
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.paged_attention.kernel import paged_attention_pallas, why_unsupported
from pallas_kernels.paged_attention.layout import PageLayout as PageLayout
from pallas_kernels.paged_attention.reference import Arrays, Options, paged_attention_reference
from pallas_kernels.paged_attention.xla import paged_attention_xla

IMPLEMENTATIONS = {
    "reference": paged_attention_reference,
    "xla": paged_attention_xla,
    "pallas": paged_attention_pallas,
}


def paged_attention(
    q: jax.Array,
    arena: jax.Array,
    table: jax.Array,
    *,
    base: jax.Array,
    end: jax.Array,
    layout: PageLayout,
    scale: float,
    group: int = 0,
    window: int | None = None,
    soft_cap: float | None = None,
    ancestors: jax.Array | None = None,
    dtype: jnp.dtype = jnp.float32,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal attention of T consecutive tokens per row over the pages of their sequence.

    The new tokens' own K and V are in the pages already.

    Args:
        q: [B, T, N, H]; query t of row b stands at position base[b] + t. "pallas" rounds it to bfloat16
            unless the pages are float32.
        arena: uint32[U, W]. table: int32[B, pages] or int32[B, groups, pages] frame of each page, trusted;
            unused entries are 0.
        base: int32[B]. end: int32[B] positions below it exist; 0 makes the row inert. What lies in
            frames at or past it is never read into a result, NaN included.
        layout: where the layer's keys and values lie.
        scale: factor on q . k. group: which of the table's lines. window: a query sees this many keys, itself included.
        soft_cap: scores become cap * tanh(scores / cap).
        ancestors: int32[B, T] of a tree of new tokens: bit j of ancestors[b, t] is set where token j is an
            ancestor of token t, or t itself. None for a chain. Token j's K and V lie at base[b] + j; for
            the window it stands at base[b] + the number of its proper ancestors.
        dtype: of the result.
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        [B, T, N, H]; zero where a query sees nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> layout = PageLayout(offset=0, page_tokens=16, num_kv_heads=1, head_dim=8, dtype="float32")
        >>> arena, table = jnp.zeros((3, layout.page_words), jnp.uint32), jnp.array([[2, 1]])
        >>> at = {"base": jnp.array([20]), "end": jnp.array([21])}
        >>> paged_attention(jnp.ones((1, 1, 4, 8)), arena, table, **at, layout=layout, scale=1.0).shape
        (1, 1, 4, 8)
    """
    where = "paged_attention"
    arrays = Arrays(q, arena, table, base, end, ancestors)
    sizes = check(where, arrays)
    if table.ndim == 2:
        arrays = arrays._replace(table=jnp.expand_dims(table, 1))
    check_group(where, arrays.table, group)
    check_result_dtype(where, dtype)
    if sizes.N % layout.num_kv_heads or sizes.H != layout.head_dim:
        raise ValueError(
            f"{where}: q heads {sizes.N} x {sizes.H} do not fit {layout.num_kv_heads} KV heads "
            f"x {layout.head_dim}"
        )
    check_words(where, arena, layout.offset, layout.page_words)
    if window is not None and window < 1:
        raise ValueError(f"{where}: window must be at least 1, or None for all keys, got {window}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{where}: soft_cap must be positive, or None for none, got {soft_cap}")
    check_tree(where, ancestors)
    options = Options(layout, scale, group, window, soft_cap, jnp.dtype(dtype))
    reason = why_unsupported(layout)
    return run(where, implementation, IMPLEMENTATIONS, arrays, unsupported=reason, options=options)

"""Public entry of paged attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check, check_result_dtype, check_table, check_tree, check_words
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.paged_attention.kernel import paged_attention_pallas
from pallas_kernels.paged_attention.plan import why_unsupported
from pallas_kernels.paged_attention.reference import (
    AttentionArrays,
    AttentionOptions,
    paged_attention_reference,
)
from pallas_kernels.paged_attention.xla import paged_attention_xla
from pallas_kernels.plan import H200, Chip

IMPLEMENTATIONS = {
    "reference": paged_attention_reference,
    "xla": paged_attention_xla,
    "pallas": paged_attention_pallas,
}


def paged_attention(
    arrays: AttentionArrays,
    *,
    options: AttentionOptions,
    chip: Chip = H200,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal attention of T consecutive tokens per row over the pages of their sequence.

    The new tokens' own K and V are in the pages already.

    Args:
        chip: the GPU, by which launches are cut up and tiles are chosen.
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        [B, T, N, H]; zero where a query sees nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.paged_attention import PageLayout
        >>> layout = PageLayout(offset=0, page_tokens=16, num_kv_heads=1, head_dim=8, dtype="float32")
        >>> arena, table = jnp.zeros((3, layout.page_words), jnp.uint32), jnp.array([[2, 1]])
        >>> q, base, end = jnp.ones((1, 1, 4, 8)), jnp.array([20]), jnp.array([21])
        >>> options = AttentionOptions(layout, scale=1.0)
        >>> paged_attention(AttentionArrays(q, arena, table, base, end), options=options).shape
        (1, 1, 4, 8)
    """
    where = "paged_attention"
    layout, _, page_frame, window, soft_cap, dtype = options
    sizes = check(where, arrays)
    if arrays.table.ndim == 2:
        arrays = arrays._replace(table=jnp.expand_dims(arrays.table, 1))
    check_table(where, arrays.table, page_frame)
    check_result_dtype(where, dtype)
    if sizes.N % layout.num_kv_heads or sizes.H != layout.head_dim:
        raise ValueError(
            f"{where}: q heads {sizes.N} x {sizes.H} do not fit {layout.num_kv_heads} KV heads "
            f"x {layout.head_dim}"
        )
    check_words(where, arrays.arena, layout.offset, layout.page_words)
    if window is not None and window < 1:
        raise ValueError(
            f"{where}: sliding_window must be at least 1, or None for all keys, got {window}"
        )
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{where}: soft_cap must be positive, or None for none, got {soft_cap}")
    check_tree(where, arrays.ancestors)
    reason = why_unsupported(layout.head_dim)
    return run(
        where,
        implementation,
        IMPLEMENTATIONS,
        arrays,
        unsupported=reason,
        launch={"chip": chip},
        options=options,
    )

"""Public entry of append_kv."""

from __future__ import annotations

import jax

from pallas_kernels.append_kv.heads import append_kv_xla
from pallas_kernels.append_kv.kernel import append_kv_pallas
from pallas_kernels.append_kv.reference import AppendArrays, AppendOptions, append_kv_reference
from pallas_kernels.arguments import check, check_result_dtype, check_table, check_words
from pallas_kernels.dispatch import Implementation, run

IMPLEMENTATIONS = {
    "reference": append_kv_reference,
    "xla": append_kv_xla,
    "pallas": append_kv_pallas,
}


def append_kv(
    arrays: AppendArrays, *, options: AppendOptions, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """Makes queries, keys and values of T consecutive new tokens per row out of one projection, and writes keys and
    values to the pages that hold their positions.

    Args:
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        q [B, T, N, H]; the arena.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.paged_attention import PageLayout
        >>> layout = PageLayout(offset=0, page_tokens=16, num_kv_heads=1, head_dim=8, dtype="float32")
        >>> arena, table = jnp.zeros((3, layout.page_words), jnp.uint32), jnp.array([[[2, 1]]])
        >>> qkv, (begin, end) = jnp.ones((1, 1, 6 * 8)), jnp.array([[20], [21]])
        >>> arrays = AppendArrays(qkv, arena, table, base=begin, begin=begin, end=end)
        >>> q, arena = append_kv(arrays, options=AppendOptions(layout))
        >>> q.shape, int((arena[1] > 0).sum())
        ((1, 1, 4, 8), 16)
    """
    where, layout = "append_kv", options.layout
    size = layout.head_dim
    columns = check(where, arrays, H=size).columns
    check_result_dtype(where, options.dtype)
    num_heads = options.query_heads(columns)
    least = 1 if options.num_heads is None else 0
    if columns % size or not least <= num_heads <= columns // size - 2 * layout.num_kv_heads:
        least = "with N > 0" if options.num_heads is None else f"or more, with N = {num_heads} >= 0"
        raise ValueError(
            f"{where}: qkv must have (N + 2 x {layout.num_kv_heads}) heads x {size} columns {least}, "
            f"got {columns}"
        )
    check_table(where, arrays.table, options.page_frame)
    cos = arrays.cos
    if (arrays.q_norm is None) != (arrays.k_norm is None) or (cos is None) != (arrays.sin is None):
        raise ValueError(
            f"{where}: q_norm and k_norm must be given together, or neither; cos and sin likewise"
        )
    if cos is not None and 2 * cos.shape[2] > size:
        raise ValueError(
            f"{where}: cos must have at most {size // 2} columns for heads of {size} channels, got {cos.shape[2]}"
        )
    check_words(where, arrays.arena, layout.offset, layout.page_words)
    return run(where, implementation, IMPLEMENTATIONS, arrays, options=options)

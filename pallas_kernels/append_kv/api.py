"""Public entry of append_kv."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.append_kv.heads import append_kv_xla
from pallas_kernels.append_kv.kernel import append_kv_pallas
from pallas_kernels.append_kv.reference import Arrays, Options, append_kv_reference
from pallas_kernels.arguments import check, check_group, check_result_dtype, check_words
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.paged_attention.layout import PageLayout

IMPLEMENTATIONS = {
    "reference": append_kv_reference,
    "xla": append_kv_xla,
    "pallas": append_kv_pallas,
}


def append_kv(
    qkv: jax.Array,
    arena: jax.Array,
    table: jax.Array,
    *,
    base: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    layout: PageLayout,
    group: int = 0,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
    dtype: jnp.dtype = jnp.float32,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Makes queries, keys and values of T consecutive new tokens per row out of one projection, and writes keys and
    values to the pages that hold their positions.

    Args:
        qkv: [B, T, (N + 2 K) H], heads of queries, keys, values; or parts float32[S, B, T, ...], whose sum is rounded
            to `dtype` (`operands.whole`).
        arena: uint32[U, W]. table: int32[B, groups, pages] frame of each page, trusted.
        base: int32[B]; token t of row b stands at position base[b] + t.
        begin, end: int32[B]; only positions in [begin, end) are written, all of them within [base, base + T) and
            within the table.
        layout: where the layer's keys and values lie. group: which of the table's lines.
        cos, sin: float32[B, T, F] of the angles by which channels j and j + F of queries and keys are rotated
            (arXiv 2104.09864; `heads.turns` makes them), both or none.
        q_norm, k_norm: [H] weights of a norm of each head before that, both or none. eps: of that norm.
        dtype: of the result, and of what is rounded on the way.
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        q [B, T, N, H]; the arena.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> layout = PageLayout(offset=0, page_tokens=16, num_kv_heads=1, head_dim=8, dtype="float32")
        >>> arena, table = jnp.zeros((3, layout.page_words), jnp.uint32), jnp.array([[[2, 1]]])
        >>> at = {"base": jnp.array([20]), "begin": jnp.array([20]), "end": jnp.array([21])}
        >>> q, arena = append_kv(jnp.ones((1, 1, 6 * 8)), arena, table, **at, layout=layout)
        >>> q.shape, int((arena[1] > 0).sum())
        ((1, 1, 4, 8), 16)
    """
    where = "append_kv"
    size = layout.head_dim
    arrays = Arrays(qkv, arena, table, base, begin, end, cos, sin, q_norm, k_norm)
    columns = check(where, arrays, H=size).columns
    check_result_dtype(where, dtype)
    num_heads = columns // size - 2 * layout.num_kv_heads
    if columns % size or num_heads < 1:
        raise ValueError(
            f"{where}: qkv must have (N + 2 x {layout.num_kv_heads}) heads x {size} columns with N > 0, "
            f"got {columns}"
        )
    check_group(where, table, group)
    if (q_norm is None) != (k_norm is None) or (cos is None) != (sin is None):
        raise ValueError(
            f"{where}: q_norm and k_norm must be given together, or neither; cos and sin likewise"
        )
    if cos is not None and 2 * cos.shape[2] > size:
        raise ValueError(
            f"{where}: cos must have at most {size // 2} columns for heads of {size} channels, got {cos.shape[2]}"
        )
    check_words(where, arena, layout.offset, layout.page_words)
    options = Options(layout, group, num_heads, eps, jnp.dtype(dtype))
    return run(where, implementation, IMPLEMENTATIONS, arrays, options=options)

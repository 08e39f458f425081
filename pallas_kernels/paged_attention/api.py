"""Public entry of paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels.dispatch import Implementation, check_rank, check_shape, run
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.xla import paged_attention_xla

IMPLEMENTATIONS = {"reference": paged_attention_reference, "xla": paged_attention_xla}


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Where one attention layer's K and V lie in a page's frame.

    Attributes:
        offset: word of the frame where the layer's part begins.
        page_tokens: tokens of a page; the layer's part is [page_tokens, 2 (K, V), K, words of a head].
        num_kv_heads: K. head_dim: H.
        dtype: "float32", or "bfloat16" packed two to a word (`frame_io.pack_records`).
    """

    offset: int
    page_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def head_words(self) -> int:
        return self.head_dim if self.dtype == "float32" else self.head_dim // 2

    @property
    def token_words(self) -> int:
        return 2 * self.num_kv_heads * self.head_words


def paged_attention(
    q: jax.Array,
    arena: jax.Array,
    table: jax.Array,
    *,
    base: jax.Array,
    end: jax.Array,
    layout: PageLayout,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal attention of T consecutive tokens per row over the pages of their sequence.

    The new tokens' own K and V are in the pages already.

    Args:
        q: [B, T, N, H]; query t of row b stands at position base[b] + t.
        arena: uint32[U, W]. table: int32[B, pages] frame of each page; unused entries are 0.
        base: int32[B]. end: int32[B] positions below it exist; 0 makes the row inert. What lies in
            frames at or past it is never read into a result, NaN included.
        layout: where the layer's keys and values lie.
        scale: factor on q . k. window: a query sees this many keys, itself included.
        soft_cap: scores become cap * tanh(scores / cap).
        implementation: "reference", "xla", or None to choose.

    Returns:
        float32[B, T, N, H]; zero where a query sees nothing.
    """
    where = "paged_attention"
    check_rank(where, "q", q, 4)
    check_rank(where, "table", table, 2)
    rows, _, heads, width = q.shape
    check_shape(where, "base", base, (rows,))
    check_shape(where, "end", end, (rows,))
    if heads % layout.num_kv_heads or width != layout.head_dim:
        raise ValueError(
            f"{where}: q heads {heads} x {width} do not fit {layout.num_kv_heads} KV heads "
            f"x {layout.head_dim}"
        )
    arrays = (q, arena, table, base, end)
    static = {"layout": layout, "scale": scale, "window": window, "soft_cap": soft_cap}
    return run(where, implementation, IMPLEMENTATIONS, *arrays, **static)

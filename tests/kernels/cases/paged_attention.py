"""Named shapes for the tests and the benchmark of paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.layout import FP8, PageLayout, pack


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """Consecutive new tokens of some rows, and the pages of their sequences.

    Attributes:
        name: says what the shape is for.
        tokens: T, new tokens per row.
        base: position of each row's first new token; its length is the number of rows.
        end: positions that exist; None for base + tokens.
        heads, kv_heads, head_dim: N, K, H.
        page_tokens: tokens of a page. pages: width of the page table.
        before, behind: words of a frame on either side of the layer's part.
    """

    name: str
    tokens: int
    base: tuple[int, ...]
    end: tuple[int, ...] | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    page_tokens: int = 16
    pages: int = 12
    before: int = 0
    behind: int = 0

    @property
    def rows(self) -> int:
        """B, rows of the batch."""
        return len(self.base)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions that exist, per row."""
        return self.end if self.end is not None else tuple(b + self.tokens for b in self.base)

    def layout(self, dtype: str) -> PageLayout:
        """Where the keys and values lie in pages of this dtype."""
        return PageLayout(
            offset=self.before,
            page_tokens=self.page_tokens,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )


@dataclass(frozen=True, kw_only=True)
class Case(NewTokens):
    """One call of `paged_attention`.

    Attributes:
        window: `AttentionOptions.sliding_window`. soft_cap: as there.
        tree: ancestor bits of each new token, the same in every row; None for a chain.
    """

    window: int | None = None
    soft_cap: float | None = None
    tree: tuple[int, ...] | None = None


# A root with two children, one of which has a child and a grandchild; the last token stands alone.
TREE = (0b000001, 0b000011, 0b000101, 0b001011, 0b011011, 0b100000)
CASES = (
    Case(name="decode", tokens=1, base=(0, 15, 16, 100, 191)),
    Case(name="decode_inert_rows", tokens=1, base=(0, 40, 7), end=(0, 41, 0)),
    Case(name="decode_all_inert", tokens=1, base=(0, 9), end=(0, 0)),
    Case(name="decode_groups_of_3", tokens=1, base=(5, 130), heads=6, kv_heads=2),
    Case(
        name="decode_groups_of_5_inside_a_frame",
        tokens=1,
        base=(127,),
        heads=5,
        kv_heads=1,
        before=40,
    ),
    Case(name="verify", tokens=5, base=(0, 13, 60, 187), heads=3, kv_heads=3, before=7, behind=9),
    Case(name="verify_odd_kv_heads", tokens=5, base=(30, 2), heads=12, kv_heads=3, head_dim=20),
    Case(name="chunk", tokens=32, base=(0, 32, 160)),
    Case(
        name="chunk_inside_a_page", tokens=32, base=(40, 8), end=(72, 39), page_tokens=64, pages=3
    ),
    Case(
        name="chunk_partly_there", tokens=32, base=(0, 32, 64), end=(1, 50, 0), heads=6, kv_heads=2
    ),
    Case(name="long_pages", tokens=5, base=(100, 250, 0), page_tokens=128, pages=3),
    Case(name="page_longer_than_a_tile", tokens=1, base=(200, 511, 0), page_tokens=256, pages=2),
    Case(name="window", tokens=5, base=(0, 40, 180), window=20),
    Case(name="window_of_one", tokens=5, base=(0, 131), window=1),
    Case(name="window_skips_tiles", tokens=1, base=(170, 190), window=9, heads=6, kv_heads=2),
    Case(name="window_longer_than_all", tokens=32, base=(3,), window=500),
    Case(name="window_past_the_end", tokens=5, base=(10, 130), end=(11, 132), window=2),
    Case(name="soft_cap", tokens=5, base=(0, 77), soft_cap=2.5),
    Case(name="window_and_soft_cap", tokens=32, base=(16, 130), window=33, soft_cap=5.0),
    Case(name="tree", tokens=6, base=(0, 13, 90), tree=TREE),
    Case(name="tree_partly_there", tokens=6, base=(30, 14, 0), end=(33, 20, 0), tree=TREE),
    Case(name="tree_and_window", tokens=6, base=(0, 14, 90), tree=TREE, window=3, heads=6),
    Case(name="tree_and_long_window", tokens=6, base=(3, 150), tree=TREE, window=40, soft_cap=3.0),
    Case(name="groups_of_7", tokens=16, base=(0, 30, 176), heads=14, head_dim=12),
    Case(name="groups_of_8", tokens=16, base=(1, 15, 95), heads=8, kv_heads=1, head_dim=80),
    Case(name="page_edges", tokens=1, base=(14, 15, 16, 31, 32, 63, 64)),
    Case(name="pages_of_24", tokens=5, base=(0, 19, 43, 91), page_tokens=24, pages=4),
)


def make_inputs(case: Case, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arguments of `paged_attention`, without the layout; every word that must not be read is NaN.

    That is: the sink, frames of no row, the rest of a frame beside the layer's part, and the tokens of a
    row's pages at or past its end, or behind the window of its first query. Pages wholly behind it are given back: they
    are the sink. Frames lie in shuffled order.
    """
    rng = np.random.default_rng(seed)
    layout, size = case.layout(dtype), case.page_tokens
    count = case.rows * case.pages
    ids = rng.permutation(np.arange(1, count + 4))[:count].reshape(case.rows, case.pages)
    beside = case.before + case.behind
    arena = np.full((count + 4, beside + layout.page_words), np.uint32(0xFFFFFFFF))
    for row, length in enumerate(case.lengths):
        begin = max(case.base[row] - case.window + 1, 0) if case.window else 0
        first = begin // size
        ids[row, -(-length // size) :] = ids[row, :first] = 0
        shape = (case.pages * size, 2, case.kv_heads, case.head_dim)
        kv = jnp.asarray(rng.standard_normal(shape, np.float32))
        for made, offset in zip(pack(kv, dtype), (layout.offset, layout.scale_offset), strict=True):
            if made is None:
                continue
            words = np.array(made).reshape(case.pages * size, -1)
            words[:begin] = words[length:] = 0xFFFFFFFF
            for page in range(first, -(-length // size)):
                part = words[page * size : (page + 1) * size].ravel()
                arena[ids[row, page], offset : offset + part.size] = part
    q = rng.standard_normal((case.rows, case.tokens, case.heads, case.head_dim), np.float32)
    inputs = {
        "q": jnp.asarray(q, "float32" if dtype == FP8 else dtype),
        "arena": jnp.asarray(arena),
        "table": jnp.asarray(ids, jnp.int32),
        "base": jnp.asarray(case.base, jnp.int32),
        "end": jnp.asarray(case.lengths, jnp.int32),
    }
    if case.tree is not None:
        tree = np.broadcast_to(np.asarray(case.tree, np.int32), (case.rows, case.tokens))
        inputs["ancestors"] = jnp.asarray(tree)
    return inputs

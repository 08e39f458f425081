"""One after another, as XLA fuses them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.append_kv.heads import split_heads
from pallas_kernels.frame_io.xla import repeat
from pallas_kernels.paged_attention.layout import pack_heads
from pallas_kernels.parts import whole


def append_kv_xla(
    arena,
    qkv,
    table,
    base,
    begin,
    end,
    cos,
    sin,
    q_norm,
    k_norm,
    *,
    group,
    layout,
    num_heads,
    eps,
    dtype,
):
    """See `api.append_kv`."""
    qkv = whole(qkv, 3, dtype)
    q, k, v = split_heads(
        *(qkv, cos, sin, q_norm, k_norm, eps),
        num_heads=num_heads,
        head_dim=layout.head_dim,
    )
    records = pack_heads(jnp.stack([k, v], axis=2).astype(layout.dtype))
    records = records.reshape(*qkv.shape[:2], layout.token_words)
    places = {"offset": layout.offset, "page_tokens": layout.page_tokens}
    return q.astype(dtype), _updated(arena, records, table[:, group], base, begin, end, **places)


def _updated(arena, values, table, base, begin, end, offset, page_tokens):
    """The arena with records uint32[B, T, w] at positions base + t, if in [begin, end), of pages table int32[B, pages].

    One token goes by its own slice, more by rewriting the pages they touch: dynamic slices, as in `frame_io.xla`.
    """
    rows, tokens, width = values.shape
    if tokens == 1:
        live = (base >= begin) & (base < end)

        def put(row, arena):
            page, slot = base[row] // page_tokens, base[row] % page_tokens
            frame = jnp.where(live[row], table[row, jnp.minimum(page, table.shape[1] - 1)], 0)
            if isinstance(row, int):  # "slice": no name of XLA's own is like it (docs/design.md)
                line = jax.lax.slice_in_dim(values, row, row + 1)
            else:
                line = jax.lax.dynamic_slice(values, (row, 0, 0), (1, 1, width))
            return jax.lax.dynamic_update_slice(arena, line[0], (frame, offset + slot * width))

        return repeat(rows, put, arena)

    segments = -(-tokens // page_tokens) + 1
    padded = jnp.pad(values, ((0, 0), (page_tokens, page_tokens), (0, 0)))

    def merge(i, arena):
        row, segment = i // segments, i % segments
        page = base[row] // page_tokens + segment
        position = page * page_tokens + jnp.arange(page_tokens)
        live = (position >= begin[row]) & (position < end[row])
        frame = jnp.where(live.any(), table[row, jnp.minimum(page, table.shape[1] - 1)], 0)
        shift = page * page_tokens - base[row] + page_tokens
        new = jax.lax.dynamic_slice(padded, (row, shift, 0), (1, page_tokens, width))[0]
        old = jax.lax.dynamic_slice(arena, (frame, offset), (1, page_tokens * width))
        merged = jnp.where(live[:, None], new, old.reshape(page_tokens, width))
        return jax.lax.dynamic_update_slice(arena, merged.reshape(1, -1), (frame, offset))

    return jax.lax.fori_loop(0, rows * segments, merge, arena)

"""Entries of new tokens to their pages, whatever an entry is, as XLA writes them in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.frame_io import repeat


def append_entries(
    arena: jax.Array,
    values: jax.Array,
    table: jax.Array,
    *,
    base: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    page_tokens: int,
    offset: int,
) -> jax.Array:
    """The arena uint32[U, W] with one entry of w words for each token in [begin, end).

    One token goes by its own slice, more by rewriting the pages they touch: dynamic slices, as in `frame_io`.

    Args:
        values: uint32[B, T, w]; token t of row b lies at base[b] + t. base, begin, end: int32[B].
        table: int32[B, pages] frames that hold the entries. offset: word of a frame where they begin.
    """
    rows, tokens, width = values.shape
    if tokens == 1:
        live = (base >= begin) & (base < end)

        def put(row: jax.Array, arena: jax.Array):
            page, place = base[row] // page_tokens, base[row] % page_tokens
            frame = jnp.where(live[row], table[row, jnp.minimum(page, table.shape[1] - 1)], 0)
            if isinstance(
                row, int
            ):  # "slice": no name of XLA's own is like it (docs/explain/design.md)
                line = jax.lax.slice_in_dim(values, row, row + 1)
            else:
                line = jax.lax.dynamic_slice(values, (row, 0, 0), (1, 1, width))
            return jax.lax.dynamic_update_slice(arena, line[0], (frame, offset + place * width))

        return repeat(rows, put, arena)

    segments = -(-tokens // page_tokens) + 1
    padded = jnp.pad(values, ((0, 0), (page_tokens, page_tokens), (0, 0)))

    def merge(i: jax.Array, arena: jax.Array):
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

"""Walks the context in tiles of whole pages with an online softmax; no contiguous copy of it is made."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.frame_io import read_frames
from pallas_kernels.paged_attention.layout import unpack
from pallas_kernels.paged_attention.reference import AttentionArrays, AttentionOptions, visible

TILE_TOKENS = 128
MASKED = -1e30


def paged_attention_xla(arrays: AttentionArrays, *, options: AttentionOptions):
    """See `api.paged_attention`.

    Tiles stand at absolute positions, and one whose keys are all masked leaves every accumulator as it was,
    bit for bit, so a row's result does not depend on how far the other rows make the loop run. With a window each row
    begins at its own first tile, so the loop is as long as the row that has most tiles, wherever the rows stand.
    """
    q, arena, table, base, end, ancestors = arrays
    layout, scale, page_frame, window, soft_cap, dtype = options
    rows, tokens, heads, width = q.shape
    table = table[:, page_frame]
    kv_heads, page_tokens = layout.num_kv_heads, layout.page_tokens
    pages_per_tile = max(1, TILE_TOKENS // page_tokens)
    tile = pages_per_tile * page_tokens
    # Two tiles at least: with one, the pages do not depend on the loop, and XLA would read them before it, and copy
    # the arena for that where steps write to it.
    missing = max(2 * pages_per_tile - table.shape[1], -table.shape[1] % pages_per_tile)
    table = jnp.pad(table, ((0, 0), (0, missing)))
    first: jax.Array | int = 0  # the tile where a row's walk begins
    if window is not None:
        first = jnp.maximum(base - window + 1, 0) // tile  # [B]
        # The row's columns of the table, from its first tile on: two tiles at least, and no more than its queries can
        # see. Keys behind the last query make the walk no longer.
        most = min(((window + tokens - 2) // tile + 2) * pages_per_tile, table.shape[1])
        own = first[:, None] * pages_per_tile + jnp.arange(most)
        table = jnp.take_along_axis(table, own, axis=1, mode="clip")
        end = jnp.minimum(end, base + tokens)
    per_kv = heads // kv_heads
    queries = q.astype(jnp.float32).reshape(rows, tokens, kv_heads, per_kv, width)
    queries = jnp.moveaxis(queries, 1, 3).reshape(rows, kv_heads, per_kv * tokens, width)

    def visit(index: jax.Array, carry: tuple):
        peak, total, mixed = carry  # [B, K, g T], [B, K, g T], [B, K, g T, H]
        ids = jax.lax.dynamic_slice(table, (0, index * pages_per_tile), (rows, pages_per_tile))
        part = {"offset": layout.offset, "words": layout.page_words}
        words = read_frames(arena, ids, **part, implementation="xla")
        words, scales = layout.split(words)
        kv = unpack(words.reshape(rows, tile, *words.shape[3:]), layout.dtype)
        key_position = (first + index)[..., None] * tile + jnp.arange(tile)  # [S] or [B, S]
        live = key_position < end[:, None]  # [B, S]
        # What lies before every window may hold anything, as what lies past a row.
        if window is not None:
            live &= key_position > base[:, None] - window
        seen = visible(base, tokens, key_position, end, window, ancestors)
        seen = jnp.broadcast_to(seen[:, None, None], (rows, 1, per_kv, tokens, tile))
        seen = seen.reshape(rows, 1, per_kv * tokens, tile)
        v = jnp.where(live[..., None, None], kv[:, :, 1], 0)
        scores = jnp.einsum("bkqh,bskh->bkqs", queries, kv[:, :, 0], precision=HIGHEST) * scale
        # Factors of a head's elements are factors of its scores and its weights.
        if scales is not None:
            scales = jnp.where(live[..., None, None], scales.reshape(rows, tile, 2, kv_heads), 0)
            of_k, of_v = (
                jnp.moveaxis(part, 1, 2)[:, :, None] for part in jnp.moveaxis(scales, 2, 0)
            )
            scores *= of_k
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        keep = jnp.exp(peak - new_peak)
        total = total * keep + weights.sum(-1)
        weights = weights if scales is None else weights * of_v
        added = jnp.einsum("bkqs,bskh->bkqh", weights, v, precision=HIGHEST)
        return new_peak, total, mixed * keep[..., None] + added

    shape = (rows, kv_heads, per_kv * tokens)
    start = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, width), jnp.float32),
    )
    count = -(-jnp.max(end - first * tile) // tile)
    _, total, mixed = jax.lax.fori_loop(0, count, visit, start)
    y = mixed / jnp.maximum(total, 1e-30)[..., None]
    y = jnp.moveaxis(y.reshape(rows, kv_heads, per_kv, tokens, width), 3, 1)
    return y.reshape(q.shape).astype(dtype)

"""Gathers every page, then plain softmax attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.frame_io import unpack_records


def paged_attention_reference(q, arena, table, base, end, layout, scale, window, soft_cap):
    rows, tokens, heads, width = q.shape
    page_words = layout.page_tokens * layout.token_words
    pages = arena[table, layout.offset : layout.offset + page_words]  # [B, pages, words]
    keys = table.shape[1] * layout.page_tokens
    kv = unpack_records(
        pages.reshape(rows, keys, 2, layout.num_kv_heads, layout.head_words), layout.dtype
    )
    key_position = jnp.arange(keys)
    position = base[:, None] + jnp.arange(tokens)
    lag = position[:, :, None] - key_position
    seen = (lag >= 0) & (key_position < end[:, None, None])
    if window is not None:
        seen &= lag < window
    k = kv[:, :, 0]
    v = jnp.where((key_position < end[:, None])[..., None, None], kv[:, :, 1], 0)
    grouped = q.reshape(rows, tokens, layout.num_kv_heads, -1, width).astype(jnp.float32)
    scores = jnp.einsum("btkgh,bskh->btkgs", grouped, k, precision=HIGHEST) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    weights = jnp.where(seen.any(-1)[:, :, None, None, None], jax.nn.softmax(scores, axis=-1), 0)
    weights = jnp.where(seen[:, :, None, None], weights, 0)
    y = jnp.einsum("btkgs,bskh->btkgh", weights, v, precision=HIGHEST)
    return y.reshape(q.shape)

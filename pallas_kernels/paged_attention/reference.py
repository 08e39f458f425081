"""Gathers every page, then plain softmax attention."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import FLOATS, INTS, WORDS
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.paged_attention.layout import PageLayout, unpack


class AttentionArrays(NamedTuple):
    """Arrays of `api.paged_attention`.

    Attributes:
        q: [B, T, N, H]; query t of row b stands at position base[b] + t. "pallas" rounds it to bfloat16 unless the
            pages are float32.
        arena: uint32[U, W]. table: int32[B, pages] or int32[B, frames_per_page, pages] frames of each page, trusted;
            unused entries are 0.
        base: int32[B]. end: int32[B] positions below it exist; 0 makes the row inert. What lies in frames at or past
            it is never read into a result, NaN included; nor is what lies before the window of query 0, so the entries
            of such pages may be 0 as well.
        ancestors: int32[B, T] of a tree of new tokens: bit j of ancestors[b, t] is set where token j is an ancestor of
            token t, or t itself. None for a chain. Token j's K and V lie at base[b] + j; for the sliding window it
            stands at base[b] + the number of its proper ancestors.
    """

    q: Annotated[jax.Array, FLOATS, "B T N H"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    table: Annotated[jax.Array, INTS, "B frames_per_page? pages"]
    base: Annotated[jax.Array, INTS, "B"]
    end: Annotated[jax.Array, INTS, "B"]
    ancestors: Annotated[jax.Array | None, INTS, "None B T"] = None


class AttentionOptions(NamedTuple):
    """What a program of `api.paged_attention` is made for, besides shapes.

    Attributes:
        layout: where the layer's keys and values lie.
        scale: factor on q . k. page_frame: which frame of each page has the layer's keys and values.
        sliding_window: a query sees this many keys, itself included.
        soft_cap: scores become cap * tanh(scores / cap).
        dtype: of the result.
    """

    layout: PageLayout
    scale: float
    page_frame: int = 0
    sliding_window: int | None = None
    soft_cap: float | None = None
    dtype: jnp.dtype = jnp.dtype("float32")


def paged_attention_reference(arrays: AttentionArrays, *, options: AttentionOptions):
    """See `api.paged_attention`."""
    q, arena, table, base, end, ancestors = arrays
    layout, scale, page_frame, window, soft_cap, dtype = options
    rows, tokens, heads, width = q.shape
    table = table[:, page_frame]
    pages = arena[table, layout.offset : layout.offset + layout.page_words]  # [B, pages, words]
    keys = table.shape[1] * layout.page_tokens
    words, scales = layout.split(pages)
    kv = unpack(words.reshape(rows, keys, *words.shape[3:]), layout.dtype)
    if scales is not None:
        kv *= scales.reshape(rows, keys, *scales.shape[3:])[..., None]
    key_position = jnp.arange(keys)
    seen = visible(base, tokens, key_position, end, window, ancestors)
    k = kv[:, :, 0]
    live = key_position < end[:, None]
    if window is not None:
        live &= key_position > base[:, None] - window
    v = jnp.where(live[..., None, None], kv[:, :, 1], 0)
    grouped = q.reshape(rows, tokens, layout.num_kv_heads, -1, width).astype(jnp.float32)
    scores = jnp.einsum("btkgh,bskh->btkgs", grouped, k, precision=HIGHEST) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    weights = jnp.where(seen.any(-1)[:, :, None, None, None], jax.nn.softmax(scores, axis=-1), 0)
    weights = jnp.where(seen[:, :, None, None], weights, 0)
    y = jnp.einsum("btkgs,bskh->btkgh", weights, v, precision=HIGHEST)
    return y.reshape(q.shape).astype(dtype)


def visible(
    base: jax.Array,
    tokens: int,
    key_position: jax.Array,
    end: jax.Array,
    window: int | None,
    ancestors: jax.Array | None,
) -> jax.Array:
    """bool[B, T, S]: whether a query sees the key in the place int32[S] of its sequence's pages, or int32[B, S]."""
    if ancestors is None:
        position = base[:, None] + jnp.arange(tokens)
        lag = position[:, :, None] - key_position[..., None, :]
        seen = (lag >= 0) & (key_position < end[:, None])[:, None]
        return seen if window is None else seen & (lag < window)
    # New token j lies at base + j, but stands at base + the number of its ancestors.
    new = key_position - base[:, None]  # [B, S] number of the new token at a place
    bits = ancestors[:, :, None] >> jnp.clip(new, 0, 31)[:, None]
    seen = (new < 0)[:, None] | ((bits & 1 > 0) & (new < tokens)[:, None])
    seen &= (key_position < end[:, None])[:, None]
    if window is not None:
        depth = depths(ancestors, jnp.arange(tokens))
        own = jnp.take_along_axis(depth, jnp.clip(new, 0, tokens - 1), axis=1)
        position = jnp.where(new < 0, new, own)  # from base on, as depths are
        seen &= depth[:, :, None] - position[:, None] < window
    return seen


def depths(ancestors: jax.Array, number: jax.Array) -> jax.Array:
    """How many proper ancestors a new token of this number has, from its bits."""
    return jax.lax.population_count(ancestors & ~(1 << number))

"""Queries, keys and values of new tokens on a GPU: one launch from the projection to the pages.

A program takes some heads of consecutive tokens, queries, keys and values alike. A word of a page holds two elements
of a head in bfloat16, H / 2 apart, and four in FP8, so a program makes these parts of its heads apart. Of a channel
that is rotated it loads the channel it is rotated with, which the cache has.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.append_kv.reference import AppendArrays, AppendOptions
from pallas_kernels.frame_io import Config
from pallas_kernels.operands import as_parts, load_sum, stored, widen
from pallas_kernels.paged_attention.e4m3 import LARGEST, to_codes
from pallas_kernels.paged_attention.layout import FP8, PageLayout, inverse_scale
from pallas_kernels.rmsnorm.reference import widest
from pallas_kernels.triton import NOWHERE, Ref, call, cdiv, iota, load, power_of_two, store

CONFIG = Config(words=1024, num_warps=4)  # words of a program's heads; 8 in each thread


def _kernel(
    qkv_ref: Ref,  # [S, B, T, >= (N + 2 K) H]
    table_ref: Ref,  # [B, frames per page x pages]
    base_ref: Ref,  # [B]
    begin_ref: Ref,  # [B]
    end_ref: Ref,  # [B]
    cos_ref: Ref,  # [B, T, F]
    sin_ref: Ref,  # [B, T, F]
    q_norm_ref: Ref,  # [H]
    k_norm_ref: Ref,  # [H]
    *out_refs: Ref,  # q [B, T, N, H], if there are queries; and the arena [U, W]
    options: AppendOptions,
    num_heads: int,
    pages: int,
    lines: int,
    rotated: int,
    normed: bool,
):
    layout, _, eps, dtype, _ = options
    first_page, arena_ref = options.page_frame * pages, out_refs[-1]
    tokens, size = qkv_ref.shape[2], layout.head_dim
    heads = num_heads + 2 * layout.num_kv_heads
    row = pl.program_id(0)
    # Heads of all tokens are one sequence, so a program is full for one token of many heads and for many tokens
    # alike. Which of q, k and v a head is, a mask says: no branch, and no thread waits.
    place = pl.program_id(1) * lines + iota(lines, 0, 2)  # [lines, 1], likewise below
    token, head = place // heads, place % heads
    exists = token < tokens
    is_q, is_v = head < num_heads, head >= num_heads + layout.num_kv_heads
    word = iota(layout.head_words, 1, 2)  # [1, words]
    real = word < layout.head_words
    inside = exists & real
    position = base_ref[row] + token

    def heads_of(channel: jax.Array, mask: jax.Array):
        """Rounded elements of the heads, as float32."""
        index = row, token, head * size + channel
        return widen(load_sum(qkv_ref, *index, mask=mask, dtype=dtype))

    # The parts of a head are made apart: packed into a word, no element changes its thread.
    parts = [word + part * layout.head_words for part in range(layout.per_word)]
    values = [heads_of(channel, inside) for channel in parts]
    if normed:
        # In float32, over all parts of a head: the norm of a head of bfloat16 would be off by more than rounding.
        square = sum(jnp.sum(x * x, axis=1) for x in values)[:, None] / size
        scale = jax.lax.rsqrt(square + eps)

        def norm(x: jax.Array, channel: jax.Array, mask: jax.Array):
            weights = (load(ref, channel, mask=mask) for ref in (q_norm_ref, k_norm_ref))
            of_q, of_k = map(widen, weights)
            wider = widest(dtype, q_norm_ref.dtype)
            weighted = widen((x * scale).astype(wider)) * jnp.where(is_q, of_q, of_k)
            return jnp.where(is_v, x, widen(weighted.astype(wider)))

    made = []
    for channel, value in zip(parts, values, strict=True):
        if normed:
            value = norm(value, channel, real)
        if rotated:
            # The partner of a channel is loaded again, from the cache: to get it from another thread would take
            # shared memory and a barrier.
            first, turns = channel < rotated, real & (channel < 2 * rotated)
            other_channel = jnp.where(first, channel + rotated, channel - rotated)
            other = heads_of(other_channel, exists & turns)
            if normed:
                other = norm(other, other_channel, turns)
            pair = jnp.where(first, channel, other_channel)
            cos, sin = (
                load(ref, row, token, pair, mask=exists & turns) for ref in (cos_ref, sin_ref)
            )
            turned = value * cos + jnp.where(first, -sin, sin) * other
            value = jnp.where(turns & ~is_v, turned, value)
        value = value.astype(dtype)
        # Queries stay in an array; keys and values wait for all parts, for a word holds one of each.
        if num_heads:
            store(out_refs[0], row, token, head, channel, value=value, mask=inside & is_q)
        made.append(value)

    # Only new positions are written: others hold what a shared page has for other rows, too.
    new = (position >= begin_ref[row]) & (position < end_ref[row]) & exists & ~is_q
    page = jnp.clip(position // layout.page_tokens, 0, pages - 1)
    frame = load(table_ref, row, first_page + page, mask=new)  # the sink where nothing is written
    target = position % layout.page_tokens * layout.token_words
    target += jnp.maximum(head - num_heads, 0) * layout.head_words + layout.offset + word
    if word.shape[1] > layout.head_words:  # words after the head are also the next one's
        target = jnp.where(real, target, NOWHERE)
    words, scales = _packed(made, layout)
    store(arena_ref, frame, target, value=words, mask=new & real)
    if scales is not None:
        target = layout.scale_offset + position % layout.page_tokens * layout.scale_words
        target += jnp.maximum(head - num_heads, 0)
        store(arena_ref, frame, target, value=scales, mask=new)


def _packed(parts: list[jax.Array], layout: PageLayout) -> tuple[jax.Array, jax.Array | None]:
    """`layout.pack` of the parts of heads, [lines, words] and [lines, 1]."""
    if layout.dtype == "float32":
        return stored(parts[0], jnp.uint32), None
    if layout.dtype == FP8:
        values = [widen(part) for part in parts]
        sizes = (jnp.max(jnp.abs(value), axis=1) for value in values)
        largest = functools.reduce(jnp.maximum, sizes)[:, None]
        inverse = inverse_scale(largest)
        bits = [to_codes(value * inverse) for value in values]
        scales = stored(largest * (1 / LARGEST), jnp.uint32)
    else:
        bits = [stored(part, jnp.uint16).astype(jnp.uint32) for part in parts]
        scales = None
    width = 32 // layout.per_word
    return functools.reduce(jnp.bitwise_or, (x << (width * i) for i, x in enumerate(bits))), scales


def append_kv_pallas(arrays: AppendArrays, *, options: AppendOptions, config: Config = CONFIG):
    """See `api.append_kv`."""
    qkv, arena, table, base, begin, end, cos, sin, q_norm, k_norm = arrays
    layout, parts = options.layout, as_parts(qkv, 3)
    rows, tokens, columns = parts.shape[1:]
    pages = table.shape[2]
    num_heads = options.query_heads(columns)
    heads = num_heads + 2 * layout.num_kv_heads
    lines = max(config.words // power_of_two(layout.head_words), 1)
    lines = min(lines, power_of_two(tokens * heads))
    unused = base  # in place of an array that the kernel does not read
    queries = jax.ShapeDtypeStruct((rows, tokens, num_heads, layout.head_dim), options.dtype)
    *q, arena = call(
        _kernel,
        *(arena, parts, table.reshape(rows, -1), base, begin, end),
        *(unused if x is None else x for x in (cos, sin, q_norm, k_norm)),
        grid=(rows, cdiv(tokens * heads, lines)),
        outputs=[*[queries] * (num_heads > 0), 0],
        name="append_kv",
        num_warps=config.num_warps,
        options=options,
        num_heads=num_heads,
        pages=pages,
        lines=lines,
        rotated=0 if cos is None else cos.shape[-1],
        normed=q_norm is not None,
    )
    return q[0] if q else jnp.zeros(queries.shape, queries.dtype), arena

"""Paged attention on a GPU: one kernel for decode and prefill, and one that joins what it split.

A program takes one row, one KV head and a block of queries: the T new tokens times the g = N / K query heads that
share the KV head, token by token. It walks over the keys in tiles with an online softmax in base 2. One page is read
once per block, for all of these heads. Where the blocks alone would leave the chip idle (decode), the context is
split as well; the second kernel then joins the splits.

A word of a page holds elements j and j + H / 2 (bfloat16), or four (FP8), so a tile of words is taken apart into parts
of the head, never shuffled: q . k is a sum of one product per part, and p . v one product each. Scales of FP8 go into
the scores and the weights.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.layout import FP8
from pallas_kernels.paged_attention.plan import SMALLEST, Config, Plan, choose_config, make_plan
from pallas_kernels.paged_attention.reference import AttentionArrays, AttentionOptions, depths
from pallas_kernels.plan import H200, Chip
from pallas_kernels.triton import Ref, call, cdiv, dot, iota, load, power_of_two, store

JOINED = 16  # splits that the second kernel holds at once
LOG2_E = math.log2(math.e)
MASKED = -1e30  # finite: the difference of two must be 0


def elements(words: jax.Array, dtype: str) -> tuple[jax.Array, ...]:
    """The parts of a head that a tile of words holds, as float32 or bfloat16: see `layout.pack`."""
    if dtype == "float32":
        return (jax.lax.bitcast_convert_type(words, jnp.float32),)
    if dtype == FP8:
        codes = ((words >> shift).astype(jnp.uint8) for shift in (0, 8, 16, 24))
        parts = (jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn) for x in codes)
        return tuple(part.astype(jnp.bfloat16) for part in parts)
    bits = ((words >> shift).astype(jnp.uint16) for shift in (0, 16))
    return tuple(jax.lax.bitcast_convert_type(x, jnp.bfloat16) for x in bits)


def _attention_kernel(
    q_ref: Ref,  # [B, T, N, H]
    arena_ref: Ref,  # [U, W] uint32
    table_ref: Ref,  # [B, frames per page x pages]
    base_ref: Ref,  # [B]
    end_ref: Ref,  # [B]
    ancestors_ref: Ref,  # [B, T]
    *out_refs: Ref,  # y [B, T, N, H]; or parts [splits, B, T, N, H], peaks and totals [splits, B, T, N]
    plan: Plan,
    options: AttentionOptions,
    pages: int,
    tree: bool,
):
    layout, scale, _, window, soft_cap, _ = options
    first_page = options.page_frame * pages
    _, tokens, heads, _ = q_ref.shape
    per_kv = heads // layout.num_kv_heads
    keys = pages * layout.page_tokens
    compute = jnp.float32 if layout.dtype == "float32" else jnp.bfloat16
    row, kv_head = pl.program_id(1), pl.program_id(2)
    split = pl.program_id(0) % plan.splits
    block = plan.blocks - 1 - pl.program_id(0) // plan.splits  # the longest context first

    # Queries of all heads that share the KV head stand side by side: a page is read once for all of them, and a
    # product on tensor cores has rows enough.
    query = block * plan.block_q + iota(plan.block_q)  # [block_q], likewise below
    real = query < tokens * per_kv
    t, head = query // per_kv, kv_head * per_kv + query % per_kv
    first_t = block * plan.block_q // per_kv
    last_t = jnp.minimum((block * plan.block_q + plan.block_q - 1) // per_kv, tokens - 1)
    base = base_ref[row]

    # Keys [lower, upper) are seen by some query of the block, those below `plain` by all but for the window.
    lower = jnp.int32(0)
    if window is not None:
        lower = jnp.maximum(base + (0 if tree else first_t) - window + 1, 0)
    upper = jnp.minimum(jnp.minimum(end_ref[row], keys), base + (tokens if tree else last_t + 1))
    plain = jnp.minimum(upper, base if tree else base + first_t + 1)
    # Splits and tiles stand at absolute positions. So a row adds up the same keys in the same order whatever the
    # rest of the batch is, and gets the same bits.
    begin = (lower // plan.split_tokens + split) * plan.split_tokens
    first = jnp.maximum(begin, lower) // plan.block_k
    last = cdiv(jnp.minimum(begin + plan.split_tokens, upper), plan.block_k)
    # Tiles up to here need no mask of who sees what: most of a long context is worked on without.
    middle = jnp.clip(plain // plan.block_k, first, jnp.maximum(first, last))

    words = max(SMALLEST, power_of_two(layout.head_words))
    lane = iota(words)
    whole = words == layout.head_words
    inside = lane < layout.head_words
    column = lane[None, :]
    out_mask = real[:, None] & inside[None, :]
    # An empty split loads nothing. Products are in the dtype of the pages, since tensor cores take bfloat16.
    q = []
    for part in range(layout.per_word):
        index = (row, t[:, None], head[:, None], column + part * layout.head_words)
        q.append(load(q_ref, *index, mask=out_mask & (first < last)).astype(compute))

    # In a tree a token stands as deep as it has ancestors, wherever it lies.
    own = base + t  # position of each query
    if tree:
        bits = load(ancestors_ref, row, t, mask=real)
        own = base + depths(bits, t)

    def visible(place: jax.Array, live: jax.Array):
        """Which queries see the keys at these places, [block_q, block_k]."""
        if not tree:
            seen = place[None, :] <= own[:, None]
            position = place
        else:
            new = place - base
            bit = bits[:, None] >> jnp.clip(new, 0, 31)[None, :]
            seen = (new < 0)[None, :] | (bit & 1 > 0)
            position = place
            if window is not None:
                key_bits = load(ancestors_ref, row, new, mask=live & (new >= 0))
                position = jnp.where(new < 0, place, base + depths(key_bits, jnp.maximum(new, 0)))
        seen &= live[None, :]
        return seen & in_window(position) if window is not None else seen

    def in_window(position: jax.Array):
        return position[None, :] > own[:, None] - window

    def visit(tile: jax.Array, carry: tuple, *, edge: bool):
        """One tile; only one at the edge has keys that some query must not see, but for the window."""
        peak, total, mixed = carry
        place = tile * plan.block_k + iota(plan.block_k)
        page = jax.lax.div(place, layout.page_tokens)
        in_page = jax.lax.rem(place, layout.page_tokens)
        # No mask where every key of the tile exists: it would cost instructions at every load.
        live = None
        if window is not None:
            live = place >= lower
        if edge:
            live = (place < upper) if live is None else live & (place < upper)
        mask = None if live is None else live[:, None]
        if not whole:
            mask = inside[None, :] if mask is None else mask & inside[None, :]
        # A page may be smaller or larger than a tile, so each key looks up its own frame. Neighbours hit the cache.
        frame = load(table_ref, row, first_page + page, mask=live)
        word = layout.offset + in_page * layout.token_words + kv_head * layout.head_words
        word = word[:, None] + lane[None, :]
        k = load(arena_ref, frame[:, None], word, mask=mask)
        v_word = word + layout.num_kv_heads * layout.head_words
        v = load(arena_ref, frame[:, None], v_word, mask=mask)
        k, v = elements(k, layout.dtype), elements(v, layout.dtype)

        # One product a part of the head, since a word's elements are half a head apart.
        scores = sum(dot(a, b.T) for a, b in zip(q, k, strict=True))
        if layout.scale_words:
            word = layout.scale_offset + in_page * layout.scale_words + kv_head
            of_k = load(arena_ref, frame, word, mask=live)
            of_v = load(arena_ref, frame, word + layout.num_kv_heads, mask=live)
            of_k, of_v = (jax.lax.bitcast_convert_type(x, jnp.float32) for x in (of_k, of_v))
            scores *= of_k[None, :]
        if soft_cap is None:
            # Powers of 2 in place of e: that is what the hardware has, and the factor goes into the scale.
            scores = scores * (scale * LOG2_E)
        else:
            scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E)
        # -inf and not a large number, so that what is masked has weight 0 exactly.
        if edge:
            scores = jnp.where(visible(place, live), scores, -jnp.inf)
        elif window is not None:
            scores = jnp.where(in_window(place) & live[None, :], scores, -jnp.inf)

        # Online softmax: sums so far are scaled to the new peak. The peak starts finite, so that a query that has
        # seen nothing yet subtracts no infinities.
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        keep = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores - new_peak[:, None])
        total = total * keep + jnp.sum(weights, axis=1)
        if layout.scale_words:
            weights *= of_v[None, :]
        weights = weights.astype(compute)
        mixed = tuple(
            old * keep[:, None] + dot(weights, part) for old, part in zip(mixed, v, strict=True)
        )
        return new_peak, total, mixed

    zeros = jnp.zeros((plan.block_q, words), jnp.float32)
    carry = (
        jnp.full((plan.block_q,), MASKED, jnp.float32),
        jnp.zeros((plan.block_q,), jnp.float32),
        (zeros,) * layout.per_word,
    )
    # Two loops over the same code, so that the masks of the edge cost nothing in the first.
    carry = jax.lax.fori_loop(first, middle, functools.partial(visit, edge=False), carry)
    carry = jax.lax.fori_loop(middle, last, functools.partial(visit, edge=True), carry)
    peak, total, mixed = carry

    # A query that sees nothing has a total of 0 and gets zeros, not NaN.
    if plan.splits == 1:
        mixed = tuple(part / jnp.where(total > 0, total, 1.0)[:, None] for part in mixed)
        lead = ()
    else:
        lead = (split,)
        store(out_refs[1], split, row, t, head, value=peak, mask=real)
        store(out_refs[2], split, row, t, head, value=total, mask=real)
        out_mask &= first < last  # the rest of an empty split is never read
    for number, part in enumerate(mixed):
        index = (*lead, row, t[:, None], head[:, None], column + number * layout.head_words)
        store(out_refs[0], *index, value=part, mask=out_mask)


def _join_kernel(
    parts_ref: Ref,  # [splits, B, T, N, H]
    peaks_ref: Ref,  # [splits, B, T, N]
    totals_ref: Ref,  # [splits, B, T, N]
    y_ref: Ref,  # [B, T, N, H]
):
    # One query of one head: few bytes, so a single warp, and no barrier.
    head, t, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    splits, *_, width = parts_ref.shape
    lane = iota(width)
    every = iota(splits)
    # The peak over all splits first: then every part is scaled once, and none can overflow.
    peak = jnp.max(load(peaks_ref, every, row, t, head, mask=every < splits, other=MASKED))

    def add(step: jax.Array, carry: tuple):
        total, mixed = carry
        split = step * JOINED + iota(JOINED)
        exists = split < splits
        totals = load(totals_ref, split, row, t, head, mask=exists)
        peaks = load(peaks_ref, split, row, t, head, mask=exists, other=MASKED)
        share = jnp.exp2(peaks - peak)
        # What an empty split would have written was never stored: it must not be read.
        mask = (totals > 0)[:, None] & (lane < width)[None, :]
        part = load(parts_ref, split[:, None], row, t, head, lane[None, :], mask=mask)
        return total + jnp.sum(totals * share), mixed + jnp.sum(part * share[:, None], axis=0)

    start = (jnp.float32(0), jnp.zeros(lane.shape, jnp.float32))
    total, mixed = jax.lax.fori_loop(0, cdiv(splits, JOINED), add, start)
    y = mixed / jnp.where(total > 0, total, 1.0)
    store(y_ref, row, t, head, lane, value=y, mask=lane < width)


def paged_attention_pallas(
    arrays: AttentionArrays,
    *,
    options: AttentionOptions,
    chip: Chip = H200,
    config: Config | None = None,
):
    """See `api.paged_attention`. The grid walks over splits of blocks of queries, rows and KV heads: programs
    that read the same keys run at the same time."""
    q, arena, table, base, end, ancestors = arrays
    rows, tokens, heads, _ = q.shape
    layout, pages = options.layout, table.shape[-1]
    if config is None:
        queries = tokens * heads // layout.num_kv_heads
        config = choose_config(layout.dtype, layout.head_dim, queries, chip)
    keys = pages * layout.page_tokens
    plan = make_plan(
        config,
        q.shape,
        layout.num_kv_heads,
        keys,
        window=options.sliding_window,
        num_sms=chip.num_sms,
    )
    out = jax.ShapeDtypeStruct(q.shape, options.dtype)
    of_queries = jax.ShapeDtypeStruct((plan.splits, *q.shape[:3]), jnp.float32)
    parts = (jax.ShapeDtypeStruct((plan.splits, *q.shape), jnp.float32), of_queries, of_queries)
    found = call(
        _attention_kernel,
        *(q, arena, table.reshape(rows, -1), base, end),
        base if ancestors is None else ancestors,  # not read where there is no tree
        grid=(plan.blocks * plan.splits, rows, layout.num_kv_heads),
        outputs=[out] if plan.splits == 1 else parts,
        name="paged_attention",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        plan=plan,
        options=options,
        pages=pages,
        tree=ancestors is not None,
    )
    if plan.splits > 1:
        found = call(
            _join_kernel,
            *found,
            grid=(heads, tokens, rows),
            outputs=[out],
            name="paged_attention_join",
            num_warps=1,
        )
    return found[0]

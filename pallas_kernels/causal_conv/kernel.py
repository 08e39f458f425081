"""The convolution on a GPU, bound by memory: what in_proj gave is read in place, and no part of it is cut out.

Over a chunk each column is loaded once and stays in registers for its W outputs. In a window each tap is one load
of a tile of tokens and channels, shifted, or gathered along the paths of a tree: all but the first hit the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.causal_conv.reference import Chunk, ConvWindow, of_length_one
from pallas_kernels.operands import as_parts, load_sum, stored, widen
from pallas_kernels.plan import over_limit
from pallas_kernels.records import ProjectionLayout
from pallas_kernels.triton import Ref, call, cdiv, iota, load, power_of_two, store

MAX_STATE_SIZE = 256  # a group's B or C of 16 tokens: 16 registers in each of 256 threads
MAX_HEADS = 1024
MAX_TOKENS = 32
BLOCK_HEADS = 128


@dataclass(frozen=True)
class Config:
    """Launch parameters: blocks of tokens, of channels (16 bytes a thread) and of a ring's slots."""

    block_tokens: int
    block_channels: int
    num_warps: int
    block_slots: int = 16

    @classmethod
    def of_chunk(cls, tokens: int, dtype: jnp.dtype) -> Config:
        """One warp per block, whose columns stay in registers: 19 x 4 of each thread."""
        return cls(min(16, power_of_two(tokens)), 512 // jnp.dtype(dtype).itemsize, 1)

    @classmethod
    def of_window(cls, tokens: int, parts: int = 1, delta: bool = False) -> Config:
        """All tokens of a window at once. What spills no register at states of 64 to 128 columns, or of 128 of a gated
        delta net, by compiling: it is not monotonous in anything."""
        tokens = power_of_two(tokens)
        known = {
            1: cls(1, 512, 2),
            2: cls(2, 256, 2) if parts == 1 else cls(2, 512, 4, block_slots=8),
            4: cls(4, 512, 2, block_slots=8),
            8: cls(8, 512 if delta else 128, 8),
        }
        return known.get(tokens) or cls(tokens, 256, tokens // 2)


def why_unsupported(layout: ProjectionLayout, tokens: int) -> str | None:
    """Why the kernel of windows cannot take these shapes, or None."""
    return over_limit(
        ("a state must have at most {} columns", MAX_STATE_SIZE, layout.state_size),
        ("a layer must have at most {} heads", MAX_HEADS, layout.num_heads),
        ("a window must have at most {} tokens", MAX_TOKENS, tokens),
    )


def _activated(
    taps: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    bias: jax.Array | None,
    dtype: jnp.dtype,
) -> jax.Array:
    """Convolution and SiLU of raw columns, W values that broadcast with the float32 weights of their taps."""
    y = sum(widen(tap) * weight for tap, weight in zip(taps, weights, strict=True))
    if bias is not None:
        y = y + bias
    return jax.nn.silu(y).astype(dtype)


def _step_sizes(
    read: Callable,
    dt_bias_ref: Ref,
    token: jax.Array,
    head: jax.Array,
    exists: jax.Array,
    layout: ProjectionLayout,
) -> jax.Array:
    """Step sizes [t, m] of tokens int32[t, 1] and heads int32[1, m], zero where not `exists`; `read` loads what
    in_proj gave at tokens and columns."""
    inside = head < layout.num_heads
    raw = read(token, layout.conv_start + layout.conv_size + head, mask=exists & inside)
    dt = jax.nn.softplus(widen(raw) + widen(load(dt_bias_ref, head, mask=inside)))
    return jnp.where(exists, jnp.clip(dt, *layout.dt_limits), 0.0)


def _chunk_kernel(
    projected_ref: Ref,  # [B, T, z | x | B | C | dt]
    history_ref: Ref,  # [B, W - 1, E]
    weight_ref: Ref,  # [W, E]
    bias_ref: Ref,  # [E]
    dt_bias_ref: Ref,  # [M]
    lengths_ref: Ref,  # [B]
    xBC_ref: Ref,  # [B, T, E]
    dt_ref: Ref,  # [B, T, M]
    *,
    layout: ProjectionLayout,
    biased: bool,
    config: Config,
):
    row, part = pl.program_id(0), pl.program_id(2)
    begin, length = pl.program_id(1) * config.block_tokens, lengths_ref[row]
    tokens, dtype = xBC_ref.shape[1], xBC_ref.dtype
    # Programs after the last block of channels make the step sizes: one launch for both, and both read the
    # projection in place.
    blocks = cdiv(layout.conv_size, config.block_channels)

    @pl.when(part < blocks)
    def _():
        channel = part * config.block_channels + iota(config.block_channels)
        inside = channel < layout.conv_size

        # Padding counts as zero and is never read: a chunk's end may hold anything, NaN too.
        def column(token: jax.Array):
            own = inside & (token >= 0) & (token < length)
            return load(projected_ref, row, token, layout.conv_start + channel, mask=own)

        def early(token: jax.Array):
            before = inside & (token < 0)
            old = load(history_ref, row, token + layout.history, channel, mask=before)
            return jnp.where(before, widen(old).astype(dtype), column(token))

        # All loads come before the first store: none is moved across it, since the two might overlap.
        columns = [early(begin - layout.history + w) for w in range(layout.history)]
        columns += [column(begin + t) for t in range(config.block_tokens)]
        weights = [
            widen(load(weight_ref, w, channel, mask=inside)) for w in range(layout.conv_width)
        ]
        bias = widen(load(bias_ref, channel, mask=inside)) if biased else None
        # A column is in registers for all of its W outputs, in place of W loads.
        for t in range(config.block_tokens):
            y = _activated(columns[t : t + layout.conv_width], weights, bias, dtype)
            y = jnp.where(begin + t < length, y, 0)
            store(xBC_ref, row, begin + t, channel, value=y, mask=inside & (begin + t < tokens))

    @pl.when(part >= blocks)
    def _():
        token = begin + iota(config.block_tokens, 0, 2)
        head = (part - blocks) * BLOCK_HEADS + iota(min(BLOCK_HEADS, layout.num_heads), 1, 2)
        exists, inside = token < length, head < layout.num_heads
        read = functools.partial(load, projected_ref, row)
        dt = _step_sizes(read, dt_bias_ref, token, head, exists, layout)
        store(dt_ref, row, token, head, value=dt, mask=(token < tokens) & inside)


def causal_conv_pallas(arrays: Chunk, *, layout: ProjectionLayout, config: Config | None = None):
    """See `api.causal_conv`. The grid walks over rows, blocks of tokens, and blocks of channels, after which come
    those of heads for the step sizes. A thread has the same channels of all tokens: no value changes hands."""
    projected, history, weight, bias, dt_bias, lengths = arrays
    rows, tokens, _ = projected.shape
    config = config or Config.of_chunk(tokens, projected.dtype)
    parts = cdiv(layout.conv_size, config.block_channels) + cdiv(layout.num_heads, BLOCK_HEADS)
    return call(
        _chunk_kernel,
        *(projected, history, weight, dt_bias if bias is None else bias, dt_bias, lengths),
        grid=(rows, cdiv(tokens, config.block_tokens), parts),
        outputs=[
            jax.ShapeDtypeStruct((rows, tokens, layout.conv_size), projected.dtype),
            jax.ShapeDtypeStruct((rows, tokens, layout.num_heads), jnp.float32),
        ],
        name="causal_conv",
        num_warps=config.num_warps,
        layout=layout,
        biased=bias is not None,
        config=config,
    )


def places_of_taps(ancestors: jax.Array | None, tokens: int, conv_width: int) -> list[jax.Array]:
    """int32[t, 1] column of each tap of each token; `ancestors` int32[t, 1], or None for a chain."""
    token, history = iota(tokens, 0, 2), conv_width - 1
    if ancestors is None:
        return [token + w for w in range(conv_width)]
    other = iota(tokens, 1, 2)
    above = ((ancestors >> other) & 1 > 0) & (other < token)  # [t, t]
    depth = jnp.sum(above.astype(jnp.int32), axis=1)[:, None]
    nearest, places = token, [token + history]
    for back in range(1, conv_width):
        earlier = jnp.where(above & (other < nearest), other, -1)
        nearest = jnp.max(earlier, axis=1)[:, None]
        before = depth - back  # of the columns before the window when negative
        places.append(history + jnp.where(before < 0, before, nearest))
    return places[::-1]


def _window_kernel(
    projected_ref: Ref,  # [S', B, T, z | x | B | C | dt]
    weight_ref: Ref,  # [W, E]
    bias_ref: Ref,  # [E]
    dt_bias_ref: Ref,  # [M]
    starts_ref: Ref,  # [B]
    first_ref: Ref,  # [B]
    valid_ref: Ref,  # [B]
    ancestors_ref: Ref,  # [B, T]
    conv_ref: Ref,  # [L, B', W - 1 + T', E]
    xB_ref: Ref,  # [L, B', S, M P + G R]
    dt_ref: Ref,  # [L, B', S, M]
    C_ref: Ref,  # [B, T, G R]
    scores_ref: Ref,  # [B, T, G, S], or [B, 2, T, G, S] of k and of q
    x_ref: Ref | None = None,  # [B, T, M P] of v
    beta_ref: Ref | None = None,  # [B, T, M]
    *,
    layer: int,
    layout: ProjectionLayout,
    biased: bool,
    tree: bool,
    moves: bool,
    config: Config,
    barrier: Callable,
):
    row, part = pl.program_id(0), pl.program_id(1)
    tokens, slots, delta = projected_ref.shape[2], xB_ref.shape[2], layout.delta
    dtype = x_ref.dtype if delta else C_ref.dtype
    # The projection may come in parts, which are summed where they are read.
    read = functools.partial(load_sum, projected_ref, row, dtype=dtype)
    start, first = starts_ref[row], jnp.maximum(first_ref[row], 0)
    count = jnp.minimum(valid_ref[row], tokens)
    live = first < count
    token = iota(tokens, 0, 2)
    fits = token < tokens
    new = (token >= first) & (token < count)  # [t, 1]
    blocks = cdiv(layout.inner_size, config.block_channels)
    ancestors = None
    if tree:
        ancestors = load(ancestors_ref, row, token, mask=fits)
    places = places_of_taps(ancestors, tokens, layout.conv_width)

    def columns(place: jax.Array, channel: jax.Array, inside: jax.Array):
        """Raw inputs [n, c] at columns int32[n, 1] of the window, the history first."""
        own = place - layout.history
        kept = inside & live & (own < first)
        fresh = inside & (own >= first) & (own < count)
        raw = read(own, layout.conv_start + channel, mask=fresh)
        old = load(conv_ref, layer, row, place, channel, mask=kept)
        return jnp.where(kept, widen(old).astype(dtype), raw)

    # Where all tokens exist, the window's last columns become the history of the next one. They are computed before
    # anything is stored, since they may be the ring's own.
    before = iota(layout.history, 0, 2)
    moved_on = live & (count == tokens) & (before < layout.history)

    def compute(channel: jax.Array, inside: jax.Array):
        """Outputs [t, c] of some channels, and their columns in the ring from now on."""
        taps = [columns(place, channel, inside) for place in places]
        weights = [
            widen(load(weight_ref, w, channel, mask=inside)) for w in range(layout.conv_width)
        ]
        bias = widen(load(bias_ref, channel, mask=inside)) if biased else None
        moved = columns(tokens + before, channel, inside & moved_on) if moves else None
        return _activated(taps, weights, bias, dtype), (taps[-1], moved)

    def keep(kept: tuple, channel: jax.Array, inside: jax.Array):
        """Writes the columns, after a barrier: other threads than those that write may read the history."""
        own, moved = kept
        value, mask = stored(own, conv_ref.dtype), live & fits & (token >= first) & inside
        store(conv_ref, layer, row, layout.history + token, channel, value=value, mask=mask)
        if moves:
            value = stored(moved, conv_ref.dtype)
            store(conv_ref, layer, row, before, channel, value=value, mask=moved_on & inside)

    # Channels of x: nothing but the record leaves the program. What is left in place of v's is zero where no token is
    # new, so those programs run for every row.
    @pl.when((part < blocks) if delta else live & (part < blocks))
    def _():
        channel = part * config.block_channels + iota(config.block_channels, 1, 2)
        inside = channel < layout.inner_size
        x, kept = compute(channel, inside)
        x = jnp.where(new, x, 0) if delta else stored(x, xB_ref.dtype)
        barrier()
        keep(kept, channel, inside)
        if delta:
            store(x_ref, row, token, channel, value=x, mask=fits & inside)
        else:
            store(xB_ref, layer, row, start + token, channel, value=x, mask=new & inside)

    # A group's B and C, and the scores C . B that every head of the group needs: made once here, not once a head.
    @pl.when((part >= blocks) & (part < blocks + layout.num_groups))
    def _():
        group, r = part - blocks, iota(layout.state_size, 1, 2)
        inside, own = r < layout.state_size, group * layout.state_size + r
        column, block_slots = layout.inner_size + own, min(config.block_slots, power_of_two(slots))
        begin, end = start + first, start + count

        def records(at: int, low: jax.Array, high: jax.Array):
            """Bits of B at some slots from `at` on, of which those in low .. high - 1 are read."""
            slot = at + iota(block_slots, 0, 2)
            read = (slot >= low) & (slot < high)
            return load(xB_ref, layer, row, slot, column, mask=live & read & inside), read

        old, _ = records(0, 0, begin)  # now, so that it does not wait for the barrier
        B, B_kept = compute(column, inside)
        C, C_kept = compute(layout.record_size + own, inside)
        if delta:
            B = of_length_one(B).astype(dtype)
            C = of_length_one(C) * layout.state_size**-0.5
        B, C = stored(B, xB_ref.dtype), jnp.where(new, C, 0)
        barrier()
        keep(B_kept, column, inside)
        keep(C_kept, layout.record_size + own, inside)
        store(xB_ref, layer, row, start + token, column, value=B, mask=new & inside)
        store(C_ref, row, token, own, value=C, mask=fits & inside)
        barrier()  # what follows reads back one token's C, and B at the slots it went to
        # Slots in blocks, and tokens in a loop: B of all slots would not fit in registers.
        for at in range(0, slots, block_slots):
            if at > 0:
                old, _ = records(at, 0, begin)
            B, behind = records(at, begin, end)
            B = widen(jnp.where(behind, B, old))

            def query(t: jax.Array, _: None, at: int = at, B: jax.Array = B):
                C = widen(load(C_ref, row, t, own, mask=inside))
                slot = at + iota(block_slots)
                is_new = (t >= first) & (t < count)
                asks = is_new & (slot <= start + t)

                def keep_scores(vector: jax.Array, *place: jax.Array | int):
                    scores = jnp.where(asks, jnp.sum(vector * B, axis=1), 0.0)
                    store(scores_ref, *place, t, group, slot, value=scores, mask=slot < slots)

                if delta:
                    k = load(xB_ref, layer, row, start + t, column, mask=is_new & inside)
                    keep_scores(widen(k), row, 0)
                    keep_scores(C, row, 1)
                else:
                    keep_scores(C, row)

            jax.lax.fori_loop(0, tokens, query, None)

    # The step sizes, and the rates of writing: few numbers, one program.
    last = part == blocks + layout.num_groups

    @pl.when(last if delta else live & last)
    def _():
        head = iota(layout.num_heads, 1, 2)
        dt = _step_sizes(read, dt_bias_ref, token, head, new, layout)
        mask = new & (head < layout.num_heads)
        store(dt_ref, layer, row, start + token, head, value=dt, mask=mask)
        if delta:
            behind = layout.conv_start + layout.conv_size + layout.num_heads
            raw = widen(read(token, behind + head, mask=mask))
            beta = jnp.where(new, jax.nn.sigmoid(raw), 0.0)
            store(beta_ref, row, token, head, value=beta, mask=fits & (head < layout.num_heads))


def causal_conv_window_pallas(
    arrays: ConvWindow,
    *,
    layer: int,
    layout: ProjectionLayout,
    moves: bool = True,
    config: Config | None = None,
):
    """See `api.causal_conv_window`. The grid walks over rows and parts: tiles of x's channels, then groups, then
    one for the step sizes. A program owns its channels of all columns of its row, so none waits for another."""
    projected, weight, bias, dt_bias, xB, dt, conv, starts, first, num_valid, ancestors = arrays
    dtype = weight.dtype if projected.ndim > 3 else projected.dtype
    projected = as_parts(projected, 3)
    parts, rows, tokens, _ = projected.shape
    config = config or Config.of_window(tokens, parts, layout.delta)
    scores = (rows, tokens, layout.num_groups, xB.shape[2])
    outputs = [((rows, tokens, layout.shared_size), dtype), (scores, jnp.float32)]
    if layout.delta:
        outputs = [
            ((rows, tokens, layout.shared_size), jnp.float32),
            ((rows, 2, *scores[1:]), jnp.float32),
            ((rows, tokens, layout.inner_size), dtype),
            ((rows, tokens, layout.num_heads), jnp.float32),
        ]
    return call(
        _window_kernel,
        *(projected, weight, dt_bias if bias is None else bias, dt_bias, starts, first, num_valid),
        *(starts if ancestors is None else ancestors, conv, xB, dt),
        grid=(rows, cdiv(layout.inner_size, config.block_channels) + layout.num_groups + 1),
        outputs=[8, 9, 10, *(jax.ShapeDtypeStruct(*output) for output in outputs)],  # rings first
        name="causal_conv_window",
        num_warps=config.num_warps,
        synchronizes=True,
        layer=layer,
        layout=layout,
        biased=bias is not None,
        tree=ancestors is not None,
        moves=moves,
        config=config,
    )

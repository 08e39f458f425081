"""The short convolution on a GPU, with gates or SiLU, bound by memory: its inputs and gates are read in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.causal_conv.kernel import MAX_TOKENS, places_of_taps
from pallas_kernels.checkpoint import layer_words, word_of
from pallas_kernels.operands import as_parts, load_sum, stored, widen
from pallas_kernels.plan import over_limit
from pallas_kernels.short_conv.reference import ShortChunk, ShortTail, ShortWindow
from pallas_kernels.triton import Ref, call, cdiv, iota, load, power_of_two, store

BLOCK_WORDS = 256  # words of a checkpoint that a program makes


@dataclass(frozen=True)
class Config:
    """Launch parameters: blocks of tokens and channels (16 bytes a thread)."""

    block_tokens: int
    block_channels: int
    num_warps: int

    @classmethod
    def of_chunk(cls, tokens: int, dtype: jnp.dtype) -> Config:
        """One warp per block, whose columns stay in registers."""
        return cls(min(16, power_of_two(tokens)), 512 // jnp.dtype(dtype).itemsize, 1)

    @classmethod
    def of_window(cls, tokens: int, parts: int = 1) -> Config:
        """All tokens of a window at once; of a projection in parts fewer channels, or registers spill."""
        tokens = power_of_two(tokens)
        channels = max(128, 512 // tokens)
        return cls(tokens, channels if parts == 1 else 128, min(8, max(2, tokens // 2)))


def window_unsupported(tokens: int) -> str | None:
    """Why the kernel of windows cannot take so many tokens, or None."""
    return over_limit(("a window must have at most {} tokens", MAX_TOKENS, tokens))


def _chunk_kernel(
    projected_ref: Ref,  # [B, T, B | C | x]
    history_ref: Ref,  # [B, W - 1, E]
    weight_ref: Ref,  # [W, E]
    bias_ref: Ref,  # [E]
    lengths_ref: Ref,  # [B]
    y_ref: Ref,  # [B, T, E]
    *,
    gated: bool,
    biased: bool,
    config: Config,
):
    row, begin = pl.program_id(0), pl.program_id(1) * config.block_tokens
    tokens, channels = y_ref.shape[1:]
    (width, _), dtype, length = weight_ref.shape, y_ref.dtype, lengths_ref[row]
    channel = pl.program_id(2) * config.block_channels + iota(config.block_channels)
    inside = channel < channels

    # Padding counts as zero and is never read: a chunk's end may hold anything, NaN too.
    def read(token: jax.Array, part: int):
        own = inside & (token >= 0) & (token < length)
        return load(projected_ref, row, token, part * channels + channel, mask=own)

    def column(token: jax.Array):
        if not gated:
            return read(token, 0)
        return (widen(read(token, 0)) * widen(read(token, 2))).astype(dtype)

    def early(token: jax.Array):
        before = inside & (token < 0)
        old = load(history_ref, row, token + width - 1, channel, mask=before)
        return jnp.where(before, widen(old).astype(dtype), column(token))

    # All loads come before the first store: none is moved across it, since the two might overlap.
    columns = [early(begin - width + 1 + w) for w in range(width - 1)]
    columns += [column(begin + t) for t in range(config.block_tokens)]
    gates = [read(begin + t, 1) for t in range(config.block_tokens) if gated]
    weights = [widen(load(weight_ref, w, channel, mask=inside)) for w in range(width)]
    bias = widen(load(bias_ref, channel, mask=inside)) if biased else 0.0
    for t in range(config.block_tokens):
        y = sum(widen(columns[t + w]) * weights[w] for w in range(width)) + bias
        y = widen(gates[t]) * widen(y.astype(dtype)) if gated else jax.nn.silu(y)
        y = jnp.where(begin + t < length, y, 0)
        store(y_ref, row, begin + t, channel, value=y, mask=inside & (begin + t < tokens))


def short_conv_pallas(arrays: ShortChunk, *, gated: bool = True, config: Config | None = None):
    """See `api.short_conv`. The grid walks over rows, blocks of tokens and blocks of channels."""
    projected, history, weight, bias, lengths = arrays
    (rows, tokens, _), channels = projected.shape, weight.shape[1]
    config = config or Config.of_chunk(tokens, projected.dtype)
    (y,) = call(
        _chunk_kernel,
        *(projected, history, weight, weight if bias is None else bias, lengths),
        grid=(rows, cdiv(tokens, config.block_tokens), cdiv(channels, config.block_channels)),
        outputs=[jax.ShapeDtypeStruct((rows, tokens, channels), projected.dtype)],
        name="short_conv",
        num_warps=config.num_warps,
        gated=gated,
        biased=bias is not None,
        config=config,
    )
    return y


def _window_kernel(
    projected_ref: Ref,  # [S', B, T, B | C | x]
    weight_ref: Ref,  # [W, E]
    bias_ref: Ref,  # [E]
    first_ref: Ref,  # [B]
    valid_ref: Ref,  # [B]
    ancestors_ref: Ref,  # [B, T]
    conv_ref: Ref,  # [L, B', W - 1 + T', E]
    y_ref: Ref,  # [B, T, E]
    *,
    layer: int,
    gated: bool,
    biased: bool,
    tree: bool,
    moves: bool,
    config: Config,
    barrier: Callable,
):
    row = pl.program_id(0)
    (_, tokens, channels), dtype, width = y_ref.shape, y_ref.dtype, weight_ref.shape[0]
    history = width - 1
    read = functools.partial(load_sum, projected_ref, row, dtype=dtype)
    first, count = jnp.maximum(first_ref[row], 0), jnp.minimum(valid_ref[row], tokens)
    live, token = first < count, iota(tokens, 0, 2)
    fits, new = token < tokens, (token >= first) & (token < count)  # [t, 1]
    channel = pl.program_id(1) * config.block_channels + iota(config.block_channels, 1, 2)
    inside = channel < channels
    ancestors = load(ancestors_ref, row, token, mask=fits) if tree else None

    def columns(place: jax.Array, wanted: jax.Array):
        """Inputs [n, c] at columns int32[n, 1] of the window, the history first."""
        own = place - history
        kept = wanted & live & (own < first)
        fresh = wanted & (own >= first) & (own < count)
        made = read(own, channel, mask=fresh)
        if gated:
            x = read(own, 2 * channels + channel, mask=fresh)
            made = (widen(made) * widen(x)).astype(dtype)
        old = load(conv_ref, layer, row, place, channel, mask=kept)
        return jnp.where(kept, widen(old).astype(dtype), made)

    read_columns = [columns(place, inside) for place in places_of_taps(ancestors, tokens, width)]
    before = iota(history, 0, 2)
    moved_on = live & (count == tokens) & (before < history)
    moved = columns(tokens + before, inside & moved_on) if moves else None
    y = sum(
        widen(column) * widen(load(weight_ref, w, channel, mask=inside))
        for w, column in enumerate(read_columns)
    )
    if biased:
        y = y + widen(load(bias_ref, channel, mask=inside))
    if gated:
        gate = read(token, channels + channel, mask=new & inside)
        y = widen(gate) * widen(y.astype(dtype))
    else:
        y = jax.nn.silu(y)
    y = jnp.where(new, y, 0.0)
    # Other threads than those that write may read the history.
    barrier()
    own, mask = stored(read_columns[-1], conv_ref.dtype), live & fits & (token >= first) & inside
    store(conv_ref, layer, row, history + token, channel, value=own, mask=mask)
    if moves:
        value = stored(moved, conv_ref.dtype)
        store(conv_ref, layer, row, before, channel, value=value, mask=moved_on & inside)
    store(y_ref, row, token, channel, value=y, mask=fits & inside)


def short_conv_window_pallas(
    arrays: ShortWindow,
    *,
    layer: int,
    moves: bool = True,
    gated: bool = True,
    config: Config | None = None,
):
    """See `api.short_conv_window`. The grid walks over rows and blocks of channels; a program owns its channels of all
    columns of its row, so none waits for another."""
    projected, weight, bias, conv, first, num_valid, ancestors = arrays
    dtype = weight.dtype if projected.ndim > 3 else projected.dtype
    projected = as_parts(projected, 3)
    (parts, rows, tokens, _), channels = projected.shape, weight.shape[1]
    config = config or Config.of_window(tokens, parts)
    return call(
        _window_kernel,
        *(projected, weight, weight if bias is None else bias, first, num_valid),
        *(first if ancestors is None else ancestors, conv),
        grid=(rows, cdiv(channels, config.block_channels)),
        outputs=[6, jax.ShapeDtypeStruct((rows, tokens, channels), dtype)],
        name="short_conv_window",
        num_warps=config.num_warps,
        synchronizes=True,
        layer=layer,
        gated=gated,
        biased=bias is not None,
        tree=ancestors is not None,
        moves=moves,
        config=config,
    )


def _tail_kernel(
    projected_ref: Ref,  # [B, T, B | C | x]
    history_ref: Ref,  # [B, W - 1, E]
    frames_ref: Ref,  # [B, n]
    rows_ref: Ref,  # [B]
    lengths_ref: Ref,  # [B]
    state_lengths_ref: Ref,  # [B]
    arena_ref: Ref,  # [U, W]
    conv_ref: Ref,  # [L, B', C, E]
    *,
    layer: int,
    gated: bool,
):
    b, part = pl.program_id(0), pl.program_id(1)
    (_, history, channels), tokens = history_ref.shape, projected_ref.shape[1]
    dtype, elements = projected_ref.dtype, history * channels
    words = layer_words(history, channels, conv_ref.dtype)

    def column(place: jax.Array, channel: jax.Array, mask: jax.Array):
        """Bits of inputs, the history first."""
        early, own = place < history, place - history
        old = load(history_ref, b, place, channel, mask=mask & early)
        fresh = mask & ~early & (own < tokens)
        made = load(projected_ref, b, own, channel, mask=fresh)
        if gated:
            x = load(projected_ref, b, own, 2 * channels + channel, mask=fresh)
            made = (widen(made) * widen(x)).astype(dtype)
        return jnp.where(early, old, stored(made, conv_ref.dtype))

    # Those before the end of the chunk go to the ring, those before the checkpoint's token to its frames.
    index = part * 2 * BLOCK_WORDS + iota(2 * BLOCK_WORDS)
    there = index < elements
    place, channel = index // channels, index % channels
    value = column(lengths_ref[b] + place, channel, there)
    store(conv_ref, layer, rows_ref[b], place, channel, value=value, mask=there)

    word = part * BLOCK_WORDS + iota(BLOCK_WORDS)
    inside = word < words

    def element(index: jax.Array):
        mask = inside & (index < elements)
        place = state_lengths_ref[b] + index // channels
        return column(place, index % channels, mask).astype(jnp.uint32)

    packed = word_of(element, word, conv_ref.dtype)
    at, frame_words = layer * words + word, arena_ref.shape[1]
    frame = load(frames_ref, b, at // frame_words, mask=inside)
    store(arena_ref, frame, at % frame_words, value=packed, mask=inside)


def store_short_tail_pallas(arrays: ShortTail, *, layer: int, gated: bool = True):
    """See `api.store_short_tail`. The grid walks over rows and blocks of words."""
    history, channels = arrays.history.shape[1:]
    words = layer_words(history, channels, arrays.conv.dtype)
    blocks = max(cdiv(words, BLOCK_WORDS), cdiv(history * channels, 2 * BLOCK_WORDS))
    arena, conv, *others = arrays
    return call(
        _tail_kernel,
        *(arena, conv, *others),
        grid=(len(arrays.rows), blocks),
        outputs=[0, 1],
        name="store_short_tail",
        num_warps=4,
        layer=layer,
        gated=gated,
    )

"""The end of a prompt chunk: what its row's ring and the checkpoint after it keep of one layer."""

from __future__ import annotations

import itertools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import BITS, FLOAT32, FLOATS, INTS, WORDS, check, check_dtype
from pallas_kernels.checkpoint import layer_words, pack_columns, word_of
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.operands import stored
from pallas_kernels.records import ProjectionLayout
from pallas_kernels.triton import Ref, call, cdiv, iota, load, store

BLOCK = 1024  # elements that a program copies
BLOCK_WORDS = 256  # words of a checkpoint, each put together from two elements of one of two arrays


class ScanTail(NamedTuple):
    """Arrays of `store_tail`.

    Attributes:
        arena: uint32[U, W].
        conv: uint16 or uint32[L, B', C, E]; xB: the same[L, B', S, M P + G R]; dt: float32[L, B', S, M]: rings of all
            layers, bits of bfloat16 or float32.
        projected: [B, T, proj] what in_proj gave. history: bits[B, W - 1, E] columns before the chunk.
        xBC: [B, T, E] after the convolution. steps: float32[B, T, M].
        frames: int32[B, n] frames of the columns of each row's next checkpoint.
        rows: int32[B] ring rows. lengths, state_lengths: int32[B] tokens of the chunk, and before the checkpoint.
    """

    arena: Annotated[jax.Array, WORDS, "frames words"]
    conv: Annotated[jax.Array, BITS, "L rows C E"]
    xB: Annotated[jax.Array, BITS, "L rows S record"]
    dt: Annotated[jax.Array, FLOAT32, "L rows S M"]
    projected: Annotated[jax.Array, FLOATS, "B T columns"]
    history: Annotated[jax.Array, BITS, "B before E"]
    xBC: Annotated[jax.Array, FLOATS, "B T E"]
    steps: Annotated[jax.Array, FLOAT32, "B T M"]
    frames: Annotated[jax.Array, INTS, "B n"]
    rows: Annotated[jax.Array, INTS, "B"]
    lengths: Annotated[jax.Array, INTS, "B"]
    state_lengths: Annotated[jax.Array, INTS, "B"]


def store_tail(
    arrays: ScanTail,
    *,
    layer: int,
    layout: ProjectionLayout,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Writes a layer's share of rings and checkpoints after chunks of B rows.

    The ring of a row gets the raw columns before the chunk's end and, from slot 0 on, the records and step sizes of
    the tokens from `state_lengths` on; the checkpoint's frames get the raw columns before that token.

    Args:
        layer: of the rings and of the frames. layout: how a token's projection is laid out.
        implementation: "reference", "pallas", or None to choose. A named one never falls back.

    Returns:
        arena, conv, xB, dt. Slots after the chunk's last token hold nothing that means anything.
    """
    where, conv = "store_tail", arrays.conv
    sizes = check(where, arrays, **layout.dimensions)
    for name in ("xB", "history"):
        check_dtype(where, name, getattr(arrays, name), (conv.dtype.name,))
    if not 0 <= layer < conv.shape[0]:
        raise ValueError(f"{where}: layer must lie in [0, {conv.shape[0]}), got {layer}")
    needed = (layer + 1) * layer_words(layout.history, layout.conv_size, conv.dtype)
    if needed > sizes.n * sizes.words:
        raise ValueError(
            f"{where}: frames must hold {needed} words a row, got {sizes.n} of "
            f"{sizes.words}; pass those of the whole checkpoint"
        )
    return run(where, implementation, TAILS, arrays, layer=layer, layout=layout)


def store_tail_reference(arrays: ScanTail, *, layer: int, layout: ProjectionLayout):
    """One row after another."""
    arena, conv, xB, dt, projected, history, xBC, steps, frames, rows, lengths, ends = arrays
    words = layer_words(layout.history, layout.conv_size, conv.dtype)
    place = layer * words + jnp.arange(words)
    frame_words = arena.shape[1]
    for b in range(rows.shape[0]):
        raw = stored(layout.split(projected[b])[0], conv.dtype)
        columns = jnp.concatenate([history[b], raw])
        ring_columns = _cut(columns, lengths[b], layout.history)
        conv = conv.at[layer, rows[b], : layout.history].set(ring_columns)
        records = stored(xBC[b, :, : layout.record_size], xB.dtype)
        xB = xB.at[layer, rows[b]].set(_cut(records, ends[b], xB.shape[2]))
        dt = dt.at[layer, rows[b]].set(_cut(steps[b], ends[b], dt.shape[2]))
        packed = pack_columns(_cut(columns, ends[b], layout.history)[None])[0]
        arena = arena.at[frames[b, place // frame_words], place % frame_words].set(packed)
    return arena, conv, xB, dt


def _cut(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Lines start .. start + count - 1 of x, zeros after its end."""
    x = jnp.pad(x, ((0, count), *((0, 0) for _ in x.shape[1:])))
    return jax.lax.dynamic_slice_in_dim(x, start, count)


def _tail_kernel(
    projected_ref: Ref,  # [B, T, z | x | B | C | dt]
    history_ref: Ref,  # [B, W - 1, E]
    xBC_ref: Ref,  # [B, T, E]
    steps_ref: Ref,  # [B, T, M]
    frames_ref: Ref,  # [B, n]
    rows_ref: Ref,  # [B]
    lengths_ref: Ref,  # [B]
    state_lengths_ref: Ref,  # [B]
    arena_ref: Ref,  # [U, W]
    conv_ref: Ref,  # [L, B', C, E]
    xB_ref: Ref,  # [L, B', S, M P + G R]
    dt_ref: Ref,  # [L, B', S, M]
    *,
    layer: int,
    layout: ProjectionLayout,
):
    b, part, tokens = pl.program_id(0), pl.program_id(1), xBC_ref.shape[1]
    ring_row, kept = rows_ref[b], state_lengths_ref[b]
    counts = _programs(layout, xB_ref.shape[2], conv_ref.dtype)
    slots_end, columns_end, words_end = itertools.accumulate(counts)

    # Columns of the history and of the chunk are one sequence here, so the three stages below need not tell them
    # apart.
    def column(place: jax.Array, channel: jax.Array, mask: jax.Array):
        """Bits of raw columns, the history first."""
        early = place < layout.history
        old = load(history_ref, b, place, channel, mask=mask & early)
        own = place - layout.history
        mask = mask & ~early & (own < tokens)
        raw = load(projected_ref, b, own, layout.conv_start + channel, mask=mask)
        return jnp.where(early, old, stored(raw, conv_ref.dtype))

    # First the ring's slots: records and step sizes of the tokens after the checkpoint. Slots without a token are
    # written too, with zeros: they need no branch.
    @pl.when(part < slots_end)
    def _():
        parts = cdiv(layout.record_size, BLOCK) + 1  # of a slot: its record, then its step sizes
        slot, part_of_slot = part // parts, part % parts
        exists = kept + slot < tokens

        @pl.when(part_of_slot < parts - 1)
        def _():
            channel = part_of_slot * BLOCK + iota(BLOCK)
            inside = channel < layout.record_size
            x = load(xBC_ref, b, kept + slot, channel, mask=inside & exists)
            value = stored(x, xB_ref.dtype)
            store(xB_ref, layer, ring_row, slot, channel, value=value, mask=inside)

        @pl.when(part_of_slot == parts - 1)
        def _():
            head = iota(layout.num_heads)
            inside = head < layout.num_heads
            value = load(steps_ref, b, kept + slot, head, mask=inside & exists)
            store(dt_ref, layer, ring_row, slot, head, value=value, mask=inside)

    # Then the ring's raw columns: those before the end of the chunk, where the next window goes on.
    @pl.when((part >= slots_end) & (part < columns_end))
    def _():
        parts = cdiv(layout.conv_size, BLOCK)
        w, part_of_column = (part - slots_end) // parts, (part - slots_end) % parts
        channel = part_of_column * BLOCK + iota(BLOCK)
        inside = channel < layout.conv_size
        value = column(lengths_ref[b] + w, channel, inside)
        store(conv_ref, layer, ring_row, w, channel, value=value, mask=inside)

    # Last the checkpoint's columns: those before the token where its state stands. A word needs two elements, from
    # one of two arrays each; hence the smaller blocks.
    @pl.when((part >= columns_end) & (part < words_end))
    def _():
        words = layer_words(layout.history, layout.conv_size, conv_ref.dtype)
        word = (part - columns_end) * BLOCK_WORDS + iota(BLOCK_WORDS)
        inside = word < words

        def element(index: jax.Array):
            mask = inside & (index < layout.history * layout.conv_size)
            place = kept + index // layout.conv_size
            return column(place, index % layout.conv_size, mask).astype(jnp.uint32)

        value = word_of(element, word, conv_ref.dtype)
        place, frame_words = layer * words + word, arena_ref.shape[1]
        frame = load(frames_ref, b, place // frame_words, mask=inside)
        store(arena_ref, frame, place % frame_words, value=value, mask=inside)


def _programs(layout: ProjectionLayout, slots: int, dtype: jnp.dtype) -> tuple[int, int, int]:
    """Programs of a row: for the ring's slots, for its columns, and for the checkpoint's words."""
    return (
        slots * (cdiv(layout.record_size, BLOCK) + 1),
        layout.history * cdiv(layout.conv_size, BLOCK),
        cdiv(layer_words(layout.history, layout.conv_size, dtype), BLOCK_WORDS),
    )


def store_tail_pallas(
    arrays: ScanTail, *, layer: int, layout: ProjectionLayout
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `store_tail`, whose arrays the kernel takes as they are.

    The grid walks over rows and parts: blocks of each slot's record and step sizes, of each of the ring's columns, and
    of the checkpoint's words. No program waits for what another loads.
    """
    slots, dtype = arrays.xB.shape[2], arrays.conv.dtype
    return call(
        _tail_kernel,
        *arrays,
        grid=(len(arrays.rows), sum(_programs(layout, slots, dtype))),
        outputs=[0, 1, 2, 3],
        name="store_tail",
        num_warps=4,
        layer=layer,
        layout=layout,
    )


TAILS = {
    "reference": store_tail_reference,
    "pallas": store_tail_pallas,
}

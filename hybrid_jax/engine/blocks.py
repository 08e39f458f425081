"""Pieces the steps share: reading and writing checkpoints, KV and rings of a `State`."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from hybrid_jax.config import Attention, Mamba2, ModelConfig
from hybrid_jax.geometry import Geometry, head_words
from hybrid_jax.layers import attention, mamba2
from hybrid_jax.layers.linear import LINEARS_IN_PARTS
from hybrid_jax.state import State, from_bits, to_bits
from pallas_kernels.append_kv import append_kv
from pallas_kernels.frame_io import (
    copy_frames,
    read_frames,
    write_frames,
)
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.api import PageLayout
from pallas_kernels.ring_io.columns import pack_columns


@dataclass(frozen=True)
class Model:
    """What a step is specialised on: hashable, static under jit.

    Attributes:
        kernels: "xla" or "pallas", which of `pallas_kernels`' implementations the step is made of.
        scan, sampling: of steps made of kernels, which of them scan prompts and draw tokens: "pallas" or "triton".
    """

    config: ModelConfig
    geometry: Geometry
    kernels: str = "xla"
    scan: str = "pallas"
    sampling: str = "pallas"

    @property
    def sampler(self) -> str:
        """What draws tokens: "xla", "pallas" or "triton"."""
        return self.sampling if self.kernels == "pallas" else "xla"

    @property
    def activation_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.geometry.dtype)


# --- checkpoints ----------------------------------------------------------------------------------


def slot_frames(state: State, slots: jax.Array) -> jax.Array:
    """Frames int32[B, F] of the checkpoints in slots int32[B].

    A lone line is sliced, not gathered: XLA would make that a slice with a name of its own, and on a CPU takes two
    slices of a fusion for one if only - and _ tell their names apart (docs/design.md).
    """
    if slots.shape[0] > 1:
        return state.slots[slots]
    return jax.lax.dynamic_slice_in_dim(state.slots, slots[0], 1)


def layer_frames(frames: jax.Array, index, model: Model) -> jax.Array:
    """Frames int32[B, frames_per_layer] of one recurrent layer out of whole checkpoints' int32[B, F]."""
    per_layer = model.geometry.frames_per_layer
    return jax.lax.dynamic_slice_in_dim(frames, index * per_layer, per_layer, axis=1)


def read_layer_state(
    arena: jax.Array, frames: jax.Array, exists: jax.Array, model: Model
) -> jax.Array:
    """One layer's float32[B, M, P, R] from its frames; zeros where `exists` bool[B] is false."""
    spec, geometry = model.config.mamba2, model.geometry
    words = _read(arena, frames, exists, geometry.heads_per_frame * head_words(spec), model)
    state = jax.lax.bitcast_convert_type(words, jnp.float32)
    state = state.reshape(frames.shape[0], -1, spec.head_dim, spec.state_size)
    return jnp.where(exists[:, None, None, None], state[:, : spec.num_heads], 0.0)


def _read(
    arena: jax.Array,
    frames: jax.Array,
    exists: jax.Array,
    num_words: int,
    model: Model,
    *,
    offset: int = 0,
) -> jax.Array:
    """Words of frames int32[B, n]; of a lone frame only where `exists`.

    What a branch returns is an array of its own. A lone slice would be fused into the write that follows from
    it, and XLA would copy the arena to read the old one while it writes the new.
    """

    def read():
        return read_frames(
            arena, frames, offset=offset, words=num_words, implementation=model.kernels
        )

    if frames.size > 1 or model.kernels == "pallas":
        return read()
    return jax.lax.cond(exists[0], read, lambda: jnp.zeros((*frames.shape, num_words), arena.dtype))


def write_layer_state(
    arena: jax.Array, frames: jax.Array, state: jax.Array, model: Model
) -> jax.Array:
    """Writes float32[B, M, P, R] to its frames; returns the arena."""
    spec, geometry = model.config.mamba2, model.geometry
    heads = geometry.frames_per_layer * geometry.heads_per_frame
    state = jnp.pad(state, ((0, 0), (0, heads - spec.num_heads), (0, 0), (0, 0)))
    words = jax.lax.bitcast_convert_type(state, jnp.uint32)
    words = words.reshape(*frames.shape, geometry.heads_per_frame * head_words(spec))
    return write_frames(arena, frames, words, implementation="xla")


def read_layer_conv(
    arena: jax.Array, frames: jax.Array, exists: jax.Array, layer: int, model: Model
) -> jax.Array:
    """One layer's convolution columns, bits[B, W - 1, E], from whole checkpoints' frames int32[B, F]."""
    spec, geometry = model.config.mamba2, model.geometry
    start, size = layer * geometry.conv_words, geometry.conv_words
    first, last = start // geometry.frame_words, (start + size - 1) // geometry.frame_words
    own = frames[:, -geometry.conv_frames :][:, first : last + 1]
    start -= first * geometry.frame_words
    if first == last:
        words = _read(arena, own, exists, size, model, offset=start)
    else:
        words = _read(arena, own, exists, geometry.frame_words, model)
        words = words.reshape(frames.shape[0], -1)[:, start : start + size]
    bits = words.reshape(frames.shape[0], size)
    if geometry.dtype != "float32":
        bits = jax.lax.bitcast_convert_type(bits, jnp.uint16).reshape(frames.shape[0], -1)
    columns = spec.conv_width - 1
    bits = bits[:, : columns * spec.conv_size].reshape(-1, columns, spec.conv_size)
    return jnp.where(exists[:, None, None], bits, 0)


def write_conv(arena: jax.Array, frames: jax.Array, bits: jax.Array, model: Model) -> jax.Array:
    """Writes bits[L, B, W - 1, E] to the convolution frames of checkpoints; returns the arena."""
    geometry = model.geometry
    rows = bits.shape[1]
    flat = pack_columns(jnp.moveaxis(bits, 0, 1)).reshape(rows, -1)
    total = geometry.conv_frames * geometry.frame_words
    flat = jnp.pad(flat, ((0, 0), (0, total - flat.shape[1])))
    words = flat.reshape(rows, geometry.conv_frames, geometry.frame_words)
    own = frames[:, -geometry.conv_frames :]
    return write_frames(arena, own, words, implementation="xla")


def fold_rows(
    state: State,
    needed: jax.Array,
    checkpoint: jax.Array,
    read_slot: jax.Array,
    write_slot: jax.Array,
    rates: jax.Array,
    model: Model,
) -> State:
    """Folds the full rings of some rows into checkpoints, one (row, layer) at a time.

    Args:
        needed: bool[B] rows whose ring holds exactly grain records.
        checkpoint: int32[B] position of the checkpoint read; 0 is the zero state.
        read_slot, write_slot: int32[B]; they may be equal.
        rates: float32[L, M] decay rates of all layers.
    """
    layers = model.geometry.num_mamba2
    order = jnp.argsort(~needed, stable=True)
    count = needed.sum()
    grain, columns = model.geometry.grain, model.config.mamba2.conv_width - 1

    # The rings travel through the loops although these only read them: as loop invariants they would be
    # alive beside the loop's own copy when the window writes them later, and XLA would copy them.
    def fold_layer(i, carry):
        arena, xB, dt = carry
        row, layer = order[i // layers], i % layers

        def ring(array):
            part = jax.lax.dynamic_slice(array, (layer, row, 0, 0), (1, 1, *array.shape[2:]))
            return part[0]

        def frames(slot):
            return layer_frames(jax.lax.dynamic_slice_in_dim(state.slots, slot, 1), layer, model)

        exists = (checkpoint[row] > 0)[None]
        old = read_layer_state(arena, frames(read_slot[row]), exists, model)
        records = mamba2.Records(from_bits(ring(xB)), ring(dt))
        own = (rates[layer], old, records, jnp.full(1, grain, jnp.int32))
        new = mamba2.fold(*own, model.config.mamba2, "xla")
        return write_layer_state(arena, frames(write_slot[row]), new, model), xB, dt

    def fold_conv(i, carry):
        arena, conv = carry
        row = order[i]
        bits = jax.lax.dynamic_slice(conv, (0, row, 0, 0), (layers, 1, columns, conv.shape[3]))
        frames = jax.lax.dynamic_slice_in_dim(state.slots, write_slot[row], 1)
        return write_conv(arena, frames, bits, model), conv

    carry = (state.arena, state.xB, state.dt)
    arena, xB, dt = jax.lax.fori_loop(0, count * layers, fold_layer, carry)
    arena, conv = jax.lax.fori_loop(0, count, fold_conv, (arena, state.conv))
    return state.replace(arena=arena, conv=conv, xB=xB, dt=dt)


def all_rates(params: dict, model: Model) -> jax.Array:
    """float32[L, M] decay rates of the Mamba-2 mixers, in layer order."""
    rates = []
    for index, spec in enumerate(model.config.layers):
        source = index if spec.weights_of is None else spec.weights_of
        for position, mixer in enumerate(spec.mixers):
            if isinstance(mixer, Mamba2):
                weights = params["layers"][source]["mixers"][position]
                rates.append(mamba2.decay_rates(weights))
    return jnp.stack(rates)


# --- attention ------------------------------------------------------------------------------------


def page_layout(spec: Attention, geometry: Geometry, place: int = 0) -> PageLayout:
    """Where the layer at a place of a page has its keys and values."""
    return PageLayout(
        offset=place * geometry.page_tokens * geometry.token_words,
        page_tokens=geometry.page_tokens,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=geometry.dtype,
    )


def attend_pages(
    params: dict,
    h: jax.Array,
    arena: jax.Array,
    table: jax.Array,
    base: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    index: int,
    spec: Attention,
    model: Model,
) -> tuple[jax.Array, jax.Array]:
    """One attention layer: writes the new tokens' K and V to their pages, then reads everything from pages.

    Args:
        h: [B, T, D] normed inputs; token t of row b stands at base[b] + t.
        table: int32[B, groups, pages]. begin, end: int32[B] positions that are new and real.
        index: which attention layer, in cache order.

    Returns:
        out [B, T, D], or parts of it for a kernel to sum, and the arena.
    """
    geometry = model.geometry
    group, place = divmod(index, geometry.layers_per_page)
    layout = page_layout(spec, geometry, place)
    positions = base[:, None] + jnp.arange(h.shape[1])
    linear = LINEARS_IN_PARTS[model.kernels]
    qkv = linear(h, params["qkv"], params.get("qkv_bias"))
    q, arena = append_kv(
        qkv,
        arena,
        table,
        base=base,
        begin=begin,
        end=end,
        layout=layout,
        group=group,
        **attention.norms_and_rotation(params, positions, spec),
        dtype=h.dtype,
        implementation=model.kernels,
    )
    y = paged_attention(
        q,
        arena,
        table,
        base=base,
        end=end,
        layout=layout,
        group=group,
        scale=spec.softmax_scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        dtype=h.dtype,
        implementation=model.kernels,
    )
    return attention.output(params, y, linear), arena


def copy_pages(arena: jax.Array, sources: jax.Array, targets: jax.Array, model: Model) -> jax.Array:
    """Copies frames int32[...] to frames int32[...], for rows that go on inside a shared page."""
    flat = sources.reshape(-1), targets.reshape(-1)
    return copy_frames(arena, *flat, implementation=model.kernels)


def zero_after(state: State, *values: jax.Array) -> jax.Array:
    """int32[] 0 that only exists once all `values` do: added to an index, it orders a write after the reads
    that led to them, without which XLA would keep a copy of what is written.

    Line 0 of the slot table is the sink's and always 0, which the compiler does not know.
    """
    zero = state.slots[0, 0]
    for value in values:
        first = value.reshape(-1)[0].astype(jnp.float32)
        zero &= jax.lax.bitcast_convert_type(first, jnp.int32)
    return zero


# --- rings ----------------------------------------------------------------------------------------


def put_row(
    array: jax.Array, value: jax.Array, row: jax.Array, slot: jax.Array | int = 0
) -> jax.Array:
    """Writes value [L, 1, s, c] into array [L, B, S, C] at one row, from `slot` on, all layers at once."""
    return jax.lax.dynamic_update_slice(array, value, (0, row, slot, 0))


def copy_row(ring: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """A ring [L, B, S, C] whose row `target` is a copy of `source`."""
    part = jax.lax.dynamic_slice(ring, (0, source, 0, 0), (ring.shape[0], 1, *ring.shape[2:]))
    return put_row(ring, part, target)


def slice_tokens(x: jax.Array, starts: jax.Array, count: int) -> jax.Array:
    """x [B, S, C], rows' own `count` consecutive entries from starts int32[B]: [B, count, C]."""
    x = jnp.pad(x, ((0, 0), (0, count), (0, 0)))
    parts = [
        jax.lax.dynamic_slice(x, (b, starts[b], 0), (1, count, x.shape[2]))
        for b in range(x.shape[0])
    ]
    return jnp.concatenate(parts)


def ring_bits(x: jax.Array, model: Model) -> jax.Array:
    """Activations as the ring stores them."""
    return to_bits(x.astype(model.activation_dtype))

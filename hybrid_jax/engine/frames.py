"""Checkpoints in frames of the arena, and the ties that make XLA write in place instead of copying."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.geometry import StateGroup
from hybrid_jax.state import Model, State, to_bits
from pallas_kernels.checkpoint import pack_columns, pack_states, unpack_columns, unpack_states
from pallas_kernels.frame_io import copy_frames, read_frames, write_frames


def in_device_memory(x: jax.Array) -> jax.Array:
    """An argument that may be in the host's memory, where kernels should read it."""
    host = jax.typeof(x).memory_space == jax.memory.Space.Host
    return jax.device_put(x, jax.memory.Space.Device) if host else x


def slot_frames(state: State, slots: jax.Array) -> jax.Array:
    """Frames int32[B, F] of the checkpoints in slots int32[B].

    A single slot is sliced, not gathered. XLA would turn such a gather into a slice with a name of its own. On a CPU it
    confuses two slices of a fusion whose names differ only in - and _ (docs/explain/design.md).
    """
    if slots.shape[0] > 1:
        return state.slots[slots]
    return jax.lax.dynamic_slice_in_dim(state.slots, slots[0], 1)


def layer_frames(frames: jax.Array, layer: jax.Array | int, group: StateGroup) -> jax.Array:
    """Frames int32[B, frames_per_layer] of one layer's state out of whole checkpoints' int32[B, F]."""
    count = group.frames_per_layer
    return jax.lax.dynamic_slice_in_dim(frames, group.state_frame(layer), count, axis=1)


def read_state(
    arena: jax.Array, frames: jax.Array, exists: jax.Array, group: StateGroup, model: Model
) -> jax.Array:
    """One layer's float32[B, units, unit_words] from its frames; zeros where `exists` bool[B] is false."""
    layout = group.layout
    words = _read(arena, frames, exists, group.units_per_frame * layout.unit_words, model)
    state = unpack_states(words, layout.units, layout.unit_words)
    return jnp.where(exists[:, None, None], state, 0.0)


def write_state(
    arena: jax.Array, frames: jax.Array, state: jax.Array, group: StateGroup
) -> jax.Array:
    """Writes float32[B, units, unit_words] to its frames; returns the arena."""
    words = pack_states(state, group.frames_per_layer, group.units_per_frame)
    return write_frames(arena, frames, words, implementation="xla")


def read_columns(
    arena: jax.Array,
    frames: jax.Array,
    exists: jax.Array,
    layer: int,
    group: StateGroup,
    model: Model,
) -> jax.Array:
    """One layer's convolution columns, bits[B, W - 1, E], from whole checkpoints' frames int32[B, F]."""
    layout, frame_words = group.layout, model.geometry.frame_words
    if layout.columns == 0:
        bits = to_bits(jnp.zeros((), model.activation_dtype)).dtype
        return jnp.zeros((frames.shape[0], 0, layout.channels), bits)
    start, size = layer * group.column_words, group.column_words
    first, last = start // frame_words, (start + size - 1) // frame_words
    own = frames[:, group.columns][:, first : last + 1]
    start -= first * frame_words
    if first == last:
        words = _read(arena, own, exists, size, model, offset=start)
    else:
        words = _read(arena, own, exists, frame_words, model)
        words = words.reshape(frames.shape[0], -1)[:, start : start + size]
    words = words.reshape(frames.shape[0], size)
    bits = unpack_columns(words, layout.columns, layout.channels, model.geometry.dtype)
    return jnp.where(exists[:, None, None], bits, 0)


def write_columns(
    arena: jax.Array, frames: jax.Array, bits: jax.Array, group: StateGroup
) -> jax.Array:
    """Writes the columns bits[L, B, W - 1, E] of all layers of a group into checkpoints; returns the arena."""
    rows, own = bits.shape[1], frames[:, group.columns]
    flat = pack_columns(jnp.moveaxis(bits, 0, 1)).reshape(rows, -1)
    flat = jnp.pad(flat, ((0, 0), (0, group.column_frames * arena.shape[1] - flat.shape[1])))
    words = flat.reshape(rows, group.column_frames, arena.shape[1])
    return write_frames(arena, own, words, implementation="xla")


def read_whole(state: State, frames: jax.Array, model: Model) -> jax.Array:
    """Words uint32[n, W] of whole frames int32[n]."""
    return read_frames(state.arena, frames, implementation=model.backend.kernels)


def write_whole(state: State, frames: jax.Array, words: jax.Array) -> State:
    """Writes words uint32[n, W] to whole frames int32[n]."""
    return state.replace(arena=write_frames(state.arena, frames, words, implementation="xla"))


def copy_pages(state: State, sources: jax.Array, targets: jax.Array, model: Model) -> State:
    """Copies frames int32[...] to frames int32[...], for rows that continue inside a shared page."""
    if not model.geometry.has_pages:
        return state
    flat = sources.reshape(-1), targets.reshape(-1)
    return state.replace(
        arena=copy_frames(state.arena, *flat, implementation=model.backend.kernels)
    )


def _read(
    arena: jax.Array,
    frames: jax.Array,
    exists: jax.Array,
    num_words: int,
    model: Model,
    *,
    offset: int = 0,
) -> jax.Array:
    """Words of frames int32[B, n]; a single frame is read only if `exists`.

    A branch returns an array of its own. Without the branch, a single slice would be fused into the write that follows
    from it, and XLA would copy the arena to read the old one while it writes the new one.
    """

    def read() -> jax.Array:
        return read_frames(
            arena, frames, offset=offset, words=num_words, implementation=model.backend.kernels
        )

    if frames.size > 1 or model.backend.launches:
        return read()
    return jax.lax.cond(exists[0], read, lambda: jnp.zeros((*frames.shape, num_words), arena.dtype))


# --- ties -----------------------------------------------------------------------------------------


def zero_after(state: State, *values: jax.Array) -> jax.Array:
    """An int32[] 0 that only exists once all `values` do.

    Added to an index, it orders a write after the reads that led to `values`. Without it, XLA would keep a copy of what
    is written. Slot 0 of the table belongs to the sink and is always 0, but the compiler does not know that.
    """
    zero = state.slots[0, 0]
    for value in values:
        first = value.reshape(-1)[0].astype(jnp.float32)
        zero &= jax.lax.bitcast_convert_type(first, jnp.int32)
    return zero


class Beside:
    """The last mixers' input and their outputs, to recognize mixers side by side.

    None of them depends on another, so XLA would keep a copy of what one still has to read while another writes.
    """

    def __init__(self) -> None:
        self._given: jax.Array | None = None
        self._made: tuple[jax.Array, ...] = ()

    def note(self, normed: jax.Array, *made: jax.Array) -> None:
        """Remembers that a mixer had the input `normed`; writes of later ones wait for what it `made`."""
        self._given, self._made = normed, (*self.of(normed), *made)

    def of(self, normed: jax.Array) -> tuple[jax.Array, ...]:
        """The outputs of the noted mixers if their input was `normed` too; else nothing."""
        return self._made if self._given is normed else ()

    def apart(self, normed: jax.Array) -> jax.Array:
        """A mixer's input, of which XLA does not see that the noted mixers have it too.

        It would join their products: put the weights side by side in every step, and take the outputs apart again.
        """
        return jax.lax.optimization_barrier(normed) if self._given is normed else normed

    def tie(
        self, indices: jax.Array, normed: jax.Array, state: State, *more: jax.Array
    ) -> jax.Array:
        """The indices of a write, which then comes after what the noted mixers have read, and after `more`."""
        after = (*more, *self.of(normed))
        return indices + zero_after(state, *after) if after else indices

"""What every step of an engine takes beside weights and rows: static data, and device memory as one pytree.

The memory is the arena, the rings, and three small arrays.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax.struct import PyTreeNode

from hybrid_jax.config import XLA, Backend, ModelConfig, SpeculationConfig, keeps_pages, source_of
from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.geometry import (
    Geometry,
    KVPlace,
    StatePlace,
    ring_specs,
    table_specs,
)


@dataclass(frozen=True)
class Model:
    """What a step is specialised on; hashable, and static under jit.

    Attributes:
        backend: what the step is made of.
        speculation: how drafts of the next tokens are made and judged; None for plain decoding.
    """

    config: ModelConfig
    geometry: Geometry
    backend: Backend = XLA
    speculation: SpeculationConfig | None = None

    @functools.cached_property
    def places(self) -> dict[tuple[int, int], KVPlace | StatePlace]:
        """Where each mixer has what it reads, by its layer in `all_layers` and its number among the layer's mixers.

        It has cached that itself, or the first mixer of its group has.
        """
        kv, states = iter(self.geometry.kv), iter(self.geometry.states)
        found: dict[tuple[int, int], KVPlace | StatePlace] = {
            (index, number): next(kv) if keeps_pages(mixer) else next(states)
            for index, layer in enumerate(self.config.all_layers)
            for number, mixer in enumerate(layer.mixers)
            if source_of(mixer) != "group"
        }
        for first, *others in self.config.groups_after_cut:
            found |= dict.fromkeys(others, found[first])
        return found

    @property
    def activation_dtype(self) -> jnp.dtype:
        """The dtype of activations and records."""
        return jnp.dtype(self.geometry.dtype)


class State(PyTreeNode, kw_only=True, repr=False):
    """Everything that a step reads and writes; donated to each step and returned by it.

    The sizes are U frames of W words, L layers of a group (`StateGroup`), B rows of which the last one is a sink for
    padding, T tokens that a window may append, S = grain + T - 1 records in a ring, and F frames of a checkpoint.

    Attributes:
        arena: uint32[U, W]; frame 0 is the sink.
        rings: for each group, arrays by name. "conv" is bits[L, B, W - 1 + T, E], the raw convolution inputs, beginning
            with the W - 1 before the window's base. The others are the fields of the records since each row's
            checkpoint, [L, B, S, ...], or "state", the copies of a carried state.
        slots: int32[max_slots, F] frames of each checkpoint slot; slot 0 is the sink's.
        tokens: int32[B] the token that each row feeds next; -1 once it has stopped.
        lengths: int32[B] how many tokens of each row are committed, which is the position of the token it feeds next.
        drafting: what drafters keep of each row, by name (`engine/kept.py`). "history" is int32[B, H], its
            tokens by position. "hidden" is [B, D], the hidden state of its last committed token, after the last norm.
    """

    arena: jax.Array
    rings: tuple[dict[str, jax.Array], ...]
    slots: jax.Array
    tokens: jax.Array
    lengths: jax.Array
    drafting: dict[str, jax.Array]

    def __repr__(self) -> str:
        """Dtypes and shapes; printing a state never copies it to the host."""
        shown = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", vars(self))
        fields = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{type(self).__name__}({fields})".replace("'", "")

    def with_ring(self, group: int, **arrays: jax.Array) -> State:
        """A state with other arrays in one group's ring."""
        rings = list(self.rings)
        rings[group] = rings[group] | arrays
        return self.replace(rings=tuple(rings))


def state_specs(
    geometry: Geometry,
    *,
    num_frames: int,
    max_slots: int,
    max_rows: int,
    window: int = 1,
    aligned: bool = False,
    drafting: dict[str, ArraySpec] | None = None,
) -> State:
    """The state's tree with `ArraySpec` leaves. It has one row more than `max_rows`, which is the sink."""
    return State(
        arena=ArraySpec((num_frames, geometry.frame_words), "uint32"),
        rings=ring_specs(geometry, num_rows=max_rows + 1, window=window, aligned=aligned),
        **table_specs(geometry, max_slots=max_slots, max_rows=max_rows),
        drafting=drafting or {},
    )


def make_state(specs: State) -> State:
    """Zeros of the given specs, with every row marked as stopped."""
    state = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)
    return state.replace(tokens=jnp.full_like(state.tokens, -1))


def to_bits(x: jax.Array) -> jax.Array:
    """Activations as unsigned bits of the same width, because XLA would widen a bfloat16 buffer on every update."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16)


def from_bits(bits: jax.Array) -> jax.Array:
    """The inverse of `to_bits`: uint32 is float32, uint16 is bfloat16."""
    return jax.lax.bitcast_convert_type(
        bits, jnp.float32 if bits.dtype == jnp.uint32 else jnp.bfloat16
    )

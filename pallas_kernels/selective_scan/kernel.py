"""The selective scan on a GPU: a program keeps some channels' states in registers and walks over the tokens.

A state of Mamba has few elements for each channel, and no product would suit tensor cores. So nothing is gained from
tiles: a token costs an exponential and two products for each element, whatever the form. What XLA would write to memory
for each token, decays and states, stays in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.operands import as_parts, load_sum, widen
from pallas_kernels.plan import over_limit
from pallas_kernels.selective_scan.reference import SelectiveChunk, SelectiveWindow
from pallas_kernels.triton import NOWHERE, Ref, call, cdiv, iota, load, power_of_two, store

LOG2_E = 1 / math.log(2)
ELEMENTS = 256  # of states in a program: 8 in each thread of a warp
MAX_SIZE = 256  # elements of a channel's state


@dataclass(frozen=True)
class Config:
    """Launch parameters: channels of a program, tokens that are loaded at once, warps."""

    channels: int
    tokens: int
    num_warps: int = 1

    @classmethod
    def of(cls, size: int, dtype: jnp.dtype) -> Config:
        """One warp, with the states of some channels; of float32 fewer tokens, or registers spill."""
        tokens = 16 // jnp.dtype(dtype).itemsize
        return cls(max(1, ELEMENTS // power_of_two(size)), tokens)


def why_unsupported(size: int) -> str | None:
    """Why the kernels cannot take states with so many elements for each channel, or None."""
    return over_limit(("a channel's state must have at most {} elements", MAX_SIZE, size))


class _Channels:
    """Some channels of a layer: where their states lie, and the weights of their recurrence."""

    def __init__(self, A_log_ref: Ref, D_ref: Ref, bias_ref: Ref, count: int) -> None:
        self.number, self.size = A_log_ref.shape
        self.channel = pl.program_id(1) * count + iota(count, 0, 2)  # [c, 1]
        self.element = iota(self.size, 1, 2)  # [1, r]
        self.exists = self.channel < self.number
        self.inside = self.exists & (self.element < self.size)
        A_log = load(A_log_ref, self.channel, self.element, mask=self.inside)
        # In powers of two, which a GPU has an instruction for.
        self.A = -LOG2_E * jnp.exp(widen(A_log))
        self.D = widen(load(D_ref, self.channel, mask=self.exists))
        self.bias = widen(load(bias_ref, self.channel, mask=self.exists))

    def places(self, frames_ref: Ref, row: jax.Array, first_frame: int, per_frame: int):
        """Frames [c, 1] and words [c, r] of the states in a checkpoint."""
        at = first_frame + self.channel // per_frame
        frame = load(frames_ref, row, at, mask=self.exists)
        words = self.channel % per_frame * self.size + self.element
        # A word of padding is also one of the next channel's.
        return frame, jnp.where(self.inside, words, NOWHERE)

    def words(self) -> jax.Array:
        """Places [c, r] of the states in a row's copy in the ring."""
        return jnp.where(self.inside, self.channel * self.size + self.element, NOWHERE)

    def step(self, state: jax.Array, x, dt, B, C, z, real: jax.Array):
        """The state [c, r] after a token, and its gated output [c, 1]; a token that is not real changes nothing.

        Args:
            x, dt, z: [c, 1] of the token. B, C: [1, r].
        """
        dt = jnp.where(real, jax.nn.softplus(widen(dt) + self.bias), 0.0)
        x = widen(x)
        state = jnp.exp2(dt * self.A) * state + (dt * x) * widen(B)
        y = jnp.sum(state * widen(C), axis=1)[:, None] + self.D * x
        return state, y * jax.nn.silu(widen(z))


def _chunk_kernel(
    x_ref: Ref,  # [B, T, E]
    dt_ref: Ref,  # [B, T, E]
    BC_ref: Ref,  # [B, T, B | C]
    projected_ref: Ref,  # [B, T, x | z]
    A_log_ref: Ref,  # [E, R]
    D_ref: Ref,  # [E]
    bias_ref: Ref,  # [E]
    read_ref: Ref,  # [B, F]
    write_ref: Ref,  # [B, F]
    exists_ref: Ref,  # [B]
    rows_ref: Ref,  # [B]
    copies_ref: Ref,  # [B]
    lengths_ref: Ref,  # [B]
    ends_ref: Ref,  # [B]
    arena_ref: Ref,  # [U, W]
    ring_ref: Ref,  # [L, B', copies, E R]
    y_ref: Ref,  # [B, T, E]
    *,
    layer: int,
    first_frame: int,
    per_frame: int,
    config: Config,
):
    row, tokens = pl.program_id(0), y_ref.shape[1]
    own = _Channels(A_log_ref, D_ref, bias_ref, config.channels)
    channel, element, exists = own.channel, own.element, own.exists
    length, end = lengths_ref[row], ends_ref[row]
    frame, words = own.places(read_ref, row, first_frame, per_frame)
    there = own.inside & (exists_ref[row] > 0)
    bits = load(arena_ref, frame, words, mask=there)
    state = jnp.where(there, jax.lax.bitcast_convert_type(bits, jnp.float32), 0.0)

    def run(state: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
        """Walks over tokens [begin, end), and writes what they read."""

        def block(i: jax.Array, state: jax.Array) -> jax.Array:
            at = [begin + i * config.tokens + t for t in range(config.tokens)]
            # All loads come before the first store: none is moved across it, since the two might overlap.
            given = []
            for t in at:
                real, some = exists & (t < end), (element < own.size) & (t < end)
                x, dt = (load(ref, row, t, channel, mask=real) for ref in (x_ref, dt_ref))
                z = load(projected_ref, row, t, own.number + channel, mask=real)
                B, C = (load(BC_ref, row, t, k * own.size + element, mask=some) for k in (0, 1))
                given.append((x, dt, B, C, z, real))
            outputs = []
            for parts in given:
                state, y = own.step(state, *parts)
                outputs.append(y)
            for t, y in zip(at, outputs, strict=True):
                store(y_ref, row, t, channel, value=y, mask=exists & (t < end))
            return state

        return jax.lax.fori_loop(0, cdiv(jnp.maximum(end - begin, 0), config.tokens), block, state)

    def blank(t: jax.Array, _: None):
        store(y_ref, row, t, channel, value=jnp.zeros(channel.shape, jnp.float32), mask=exists)

    state = run(state, 0, end)
    frame, words = own.places(write_ref, row, first_frame, per_frame)
    bits = jax.lax.bitcast_convert_type(state, jnp.uint32)
    store(arena_ref, frame, words, value=bits, mask=own.inside)
    state = run(state, end, length)
    line = layer, rows_ref[row], copies_ref[row]
    store(ring_ref, *line, own.words(), value=state, mask=own.inside)
    # Padding becomes zero, so that it reaches no later layer as NaN.
    jax.lax.fori_loop(length, tokens, blank, None)


def selective_chunk_pallas(
    arrays: SelectiveChunk, *, layer: int, first_frame: int, config: Config | None = None
):
    """See `api.selective_chunk`. The grid walks over rows and blocks of channels."""
    (x, dt, BC, projected, A_log, D, bias, arena, read, write, exists, ring, rows, copies) = arrays[
        :14
    ]
    number, size = A_log.shape
    config = config or Config.of(size, x.dtype)
    arena, ring, y = call(
        _chunk_kernel,
        *(x, dt, BC, projected, A_log, D, bias, read, write, exists.astype(jnp.int32)),
        *(rows, copies, arrays.lengths, arrays.state_lengths, arena, ring),
        grid=(x.shape[0], cdiv(number, config.channels)),
        outputs=[14, 15, jax.ShapeDtypeStruct(x.shape, x.dtype)],
        name="selective_scan",
        num_warps=config.num_warps,
        layer=layer,
        first_frame=first_frame,
        per_frame=min(arena.shape[1] // size, number),
        config=config,
    )
    return y, arena, ring


def _window_kernel(
    x_ref: Ref,  # [B, T, E]
    dt_ref: Ref,  # [S', B, T, E]
    BC_ref: Ref,  # [B, T, B | C]
    projected_ref: Ref,  # [S', B, T, x | z]
    A_log_ref: Ref,  # [E, R]
    D_ref: Ref,  # [E]
    bias_ref: Ref,  # [E]
    arena_ref: Ref,  # [U, W]
    frames_ref: Ref,  # [B, F]
    exists_ref: Ref,  # [B]
    loads_ref: Ref,  # [B]
    base_ref: Ref,  # [B]
    first_ref: Ref,  # [B]
    valid_ref: Ref,  # [B]
    ancestors_ref: Ref,  # [B, T]
    ring_ref: Ref,  # [L, B', copies, E R]
    y_ref: Ref,  # [B, T, E]
    *,
    layer: int,
    first_frame: int,
    per_frame: int,
    channels: int,
    dtype: jnp.dtype,
    loads: bool,
    keeps: bool,
    tree: bool,
    barrier: Callable,
):
    row, tokens, count = pl.program_id(0), y_ref.shape[1], ring_ref.shape[2]
    own = _Channels(A_log_ref, D_ref, bias_ref, channels)
    channel, element, exists = own.channel, own.element, own.exists
    first, valid = jnp.maximum(first_ref[row], 0), jnp.minimum(valid_ref[row], tokens)
    live, base, words = first < valid, base_ref[row], own.words()

    def copy(after: jax.Array | int) -> jax.Array:
        """The state in the ring after so many tokens of the window."""
        place = (base + after) % count
        return load(ring_ref, layer, row, place, words, mask=own.inside & live)

    def keep(state: jax.Array, after: jax.Array) -> None:
        place = (base + after) % count
        store(ring_ref, layer, row, place, words, value=state, mask=own.inside & live)

    state = copy(0)
    if loads:
        frame, there = own.places(frames_ref, row, first_frame, per_frame)
        loaded = loads_ref[row] > 0
        bits = load(
            arena_ref, frame, there, mask=own.inside & live & loaded & (exists_ref[row] > 0)
        )
        saved = jax.lax.bitcast_convert_type(bits, jnp.float32)
        state = jnp.where(loaded, saved, state)

    def token(t: jax.Array, state: jax.Array) -> jax.Array:
        real = (t >= first) & (t < valid)
        if tree:
            # The parent's number, plus 1; 0 stands for the state before the tree.
            bit = iota(32)
            path = (ancestors_ref[row, t] >> bit) & 1
            parent = jnp.max(jnp.where((path > 0) & (bit < t), bit + 1, 0))
            state = copy(parent)
        mask = exists & real
        x = load(x_ref, row, t, channel, mask=mask)
        dt = load_sum(dt_ref, row, t, channel, mask=mask, dtype=dtype)
        z = load_sum(projected_ref, row, t, own.number + channel, mask=mask, dtype=dtype)
        some = (element < own.size) & real
        B, C = (load(BC_ref, row, t, k * own.size + element, mask=some) for k in (0, 1))
        state, y = own.step(state, x, dt, B, C, z, mask)
        store(y_ref, row, t, channel, value=jnp.where(real, y, 0.0), mask=exists)
        if keeps:
            keep(state, t + 1)
        if tree:
            barrier()
        return state

    state = jax.lax.fori_loop(0, tokens, token, state)
    if not keeps:
        keep(state, valid)


def selective_window_pallas(
    arrays: SelectiveWindow,
    *,
    layer: int,
    first_frame: int,
    keeps: bool,
    config: Config | None = None,
):
    """See `api.selective_window`."""
    x, dt, BC, projected, A_log, D, bias, ring, arena, frames, exists = arrays[:11]
    base, first, valid, loads, ancestors = arrays[11:]
    rows, (number, size) = x.shape[0], A_log.shape
    config = config or Config.of(size, x.dtype)
    ring, y = call(
        _window_kernel,
        *(x, as_parts(dt, 3), BC, as_parts(projected, 3), A_log, D, bias, arena, frames),
        *(exists.astype(jnp.int32), base if loads is None else loads.astype(jnp.int32)),
        *(base, first, valid, jnp.zeros((1, 1), jnp.int32) if ancestors is None else ancestors),
        ring,
        grid=(rows, cdiv(number, config.channels)),
        outputs=[15, jax.ShapeDtypeStruct(x.shape, x.dtype)],
        name="selective_window",
        num_warps=config.num_warps,
        synchronizes=True,
        layer=layer,
        first_frame=first_frame,
        per_frame=min(arena.shape[1] // size, number),
        channels=config.channels,
        dtype=x.dtype,
        loads=loads is not None,
        keeps=keeps,
        tree=ancestors is not None,
    )
    return y, ring

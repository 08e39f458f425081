"""The definition, token by token."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import FLAGS, FLOAT32, FLOATS, INTS, WORDS
from pallas_kernels.checkpoint import pack_states, unpack_states
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.operands import summed


class SelectiveScan(NamedTuple):
    """Arrays of `api.selective_scan`."""

    x: Annotated[jax.Array, FLOATS, "B T E"]
    dt: Annotated[jax.Array, FLOAT32, "B T E"]
    A: Annotated[jax.Array, FLOATS, "E R"]
    B: Annotated[jax.Array, FLOATS, "B T R"]
    C: Annotated[jax.Array, FLOATS, "B T R"]
    state: Annotated[jax.Array, FLOAT32, "B E R"]
    valid: Annotated[jax.Array, FLAGS, "B T"]
    kept: Annotated[jax.Array, INTS, "B K"]


class SelectiveChunk(NamedTuple):
    """Arrays of `api.selective_chunk`.

    Attributes:
        x: [B, T, E] what the convolution gave. dt: [B, T, E] step sizes before bias and softplus.
        BC: [B, T, 2 R] B | C. projected: [B, T, 2 E] x | z, of which z is read.
        A_log: float32[E, R] logarithms of the decay rates. D, dt_bias: float32[E].
        arena: uint32[U, W]; a frame holds the states of W // R whole channels, float32 bits.
        read, write: int32[B, F] frames of each row's first and last checkpoint, the same or others.
        exists: bool[B]; where false the first state is zero, whatever its frames hold.
        state: float32[L, B', copies, E R] rings. rows, copies: int32[B] where in them a row's last state goes.
        lengths, state_lengths: int32[B] tokens of each row, and those after which the last checkpoint stands.
    """

    x: Annotated[jax.Array, FLOATS, "B T E"]
    dt: Annotated[jax.Array, FLOATS, "B T E"]
    BC: Annotated[jax.Array, FLOATS, "B T two_R"]
    projected: Annotated[jax.Array, FLOATS, "B T two_E"]
    A_log: Annotated[jax.Array, FLOAT32, "E R"]
    D: Annotated[jax.Array, FLOAT32, "E"]
    dt_bias: Annotated[jax.Array, FLOAT32, "E"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    read: Annotated[jax.Array, INTS, "B F"]
    write: Annotated[jax.Array, INTS, "B F"]
    exists: Annotated[jax.Array, FLAGS, "B"]
    state: Annotated[jax.Array, FLOAT32, "L ring_rows K ER"]
    rows: Annotated[jax.Array, INTS, "B"]
    copies: Annotated[jax.Array, INTS, "B"]
    lengths: Annotated[jax.Array, INTS, "B"]
    state_lengths: Annotated[jax.Array, INTS, "B"]


class SelectiveWindow(NamedTuple):
    """Arrays of `api.selective_window`.

    Attributes:
        x, BC, A_log, D, dt_bias: as in `SelectiveChunk`, of the window's tokens.
        dt: [B, T, E], projected: [B, T, 2 E] x | z; or parts float32[S, B, T, ...] of these products.
        state: float32[L, B', copies, E R] rings, B' >= B.
        arena, frames, exists: the rows' checkpoints, as `arena`, `read` and `exists` in `SelectiveChunk`.
        base: int32[B] position of the window's first token; base % copies is the copy that holds the state before it.
        first, num_valid: int32[B]. The tokens first <= t < num_valid are new.
        loads: bool[B] rows whose first state is that of the checkpoint; None for no row.
        ancestors: int32[B, T] of a tree of tokens, as in `ssd_window.WindowFrames`; None for a chain.
    """

    x: Annotated[jax.Array, FLOATS, "B T E"]
    dt: Annotated[jax.Array, FLOATS, "dt_parts? B T E"]
    BC: Annotated[jax.Array, FLOATS, "B T two_R"]
    projected: Annotated[jax.Array, FLOATS, "parts? B T two_E"]
    A_log: Annotated[jax.Array, FLOAT32, "E R"]
    D: Annotated[jax.Array, FLOAT32, "E"]
    dt_bias: Annotated[jax.Array, FLOAT32, "E"]
    state: Annotated[jax.Array, FLOAT32, "L rows K ER"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    frames: Annotated[jax.Array, INTS, "B F"]
    exists: Annotated[jax.Array, FLAGS, "B"]
    base: Annotated[jax.Array, INTS, "B"]
    first: Annotated[jax.Array, INTS, "B"]
    num_valid: Annotated[jax.Array, INTS, "B"]
    loads: Annotated[jax.Array | None, FLAGS, "None B"] = None
    ancestors: Annotated[jax.Array | None, INTS, "None B T"] = None


def selective_scan_reference(arrays: SelectiveScan):
    """See `api.selective_scan`."""
    x, dt, A, B, C, state, valid, kept = arrays

    def step(carry: tuple, token: tuple):
        state, states = carry
        t, x, dt, B, C, valid = token
        decayed = jnp.exp(dt[..., None] * A) * state
        new = decayed + (dt * x.astype(jnp.float32))[..., None] * B.astype(jnp.float32)[:, None]
        state = jnp.where(valid[:, None, None], new, state)
        states = jnp.where((kept == t + 1)[..., None, None], state[:, None], states)
        y = jnp.einsum("ber,br->be", state, C.astype(jnp.float32), precision=HIGHEST)
        return (state, states), jnp.where(valid[:, None], y, 0)

    states = jnp.repeat(state[:, None], kept.shape[1], axis=1)
    tokens = [jnp.moveaxis(a, 1, 0) for a in (x, dt, B, C, valid.astype(bool))]
    (_, states), y = jax.lax.scan(step, (state, states), (jnp.arange(x.shape[1]), *tokens))
    return jnp.moveaxis(y, 0, 1), states


def read_states(
    arena: jax.Array, frames: jax.Array, exists: jax.Array, channels: int, size: int
) -> jax.Array:
    """float32[B, E, R] from the frames int32[B, n] of a layer; zeros where `exists` bool[B] is false."""
    per_frame = min(arena.shape[1] // size, channels)
    state = unpack_states(arena[frames, : per_frame * size], channels, size)
    return jnp.where(exists.astype(bool)[:, None, None], state, 0.0)


def layer_frames(frames: jax.Array, first: int, channels: int, size: int, words: int) -> jax.Array:
    """Those of the frames int32[B, F] that hold a layer's states."""
    return frames[:, first : first - (-channels // min(words // size, channels))]


def step_sizes(dt: jax.Array, bias: jax.Array) -> jax.Array:
    """softplus(dt + bias), float32."""
    return jax.nn.softplus(dt.astype(jnp.float32) + bias)


def gated_output(y: jax.Array, x: jax.Array, D: jax.Array, z: jax.Array) -> jax.Array:
    """(y + D x) silu(z), rounded once to the dtype of x."""
    y = y + D * x.astype(jnp.float32)
    return (y * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)


def selective_chunk_reference(arrays: SelectiveChunk, *, layer: int, first_frame: int):
    """See `api.selective_chunk`."""
    x, BC, arena, ring = arrays.x, arrays.BC, arrays.arena, arrays.state
    (channels, size), words = arrays.A_log.shape, arena.shape[1]
    read, write = (
        layer_frames(frames, first_frame, channels, size, words)
        for frames in (arrays.read, arrays.write)
    )
    valid = jnp.arange(x.shape[1]) < arrays.lengths[:, None]
    scan = SelectiveScan(
        x=x,
        dt=step_sizes(arrays.dt, arrays.dt_bias),
        A=-jnp.exp(arrays.A_log),
        B=BC[..., :size],
        C=BC[..., size:],
        state=read_states(arena, read, arrays.exists, channels, size),
        valid=valid,
        kept=jnp.stack([arrays.state_lengths, arrays.lengths], axis=1),
    )
    y, states = selective_scan_reference(scan)
    y = jnp.where(
        valid[..., None], gated_output(y, x, arrays.D, arrays.projected[..., channels:]), 0
    )
    per_frame = min(words // size, channels)
    packed = pack_states(states[:, 0], write.shape[1], per_frame)
    arena, unit = arena, jnp.arange(write.shape[1] * per_frame * size)
    frame, place = write[:, unit // (per_frame * size)], unit % (per_frame * size)
    exists = unit < channels * size
    flat = packed.reshape(packed.shape[0], -1)
    for b in range(x.shape[0]):
        kept = arena[frame[b], place]
        arena = arena.at[frame[b], place].set(jnp.where(exists, flat[b], kept))
        last = states[b, 1].reshape(-1)
        ring = ring.at[layer, arrays.rows[b], arrays.copies[b]].set(last)
    return y, arena, ring


def selective_window_reference(
    arrays: SelectiveWindow, *, layer: int, first_frame: int, keeps: bool
):
    """See `api.selective_window`: token after token, each from its parent's state."""
    x, ring, ancestors = arrays.x, arrays.state, arrays.ancestors
    (rows, tokens, channels), size = x.shape, arrays.A_log.shape[1]
    row, count = jnp.arange(rows), ring.shape[2]
    old = ring[layer, row, arrays.base % count].reshape(rows, channels, size)
    if arrays.loads is not None:
        own = layer_frames(arrays.frames, first_frame, channels, size, arrays.arena.shape[1])
        saved = read_states(arrays.arena, own, arrays.exists, channels, size)
        old = jnp.where(arrays.loads.astype(bool)[:, None, None], saved, old)
    token = jnp.arange(tokens)
    valid = (token >= arrays.first[:, None]) & (token < arrays.num_valid[:, None])
    dt = summed(arrays.dt, 3, x.dtype)
    dt = jnp.where(valid[..., None], step_sizes(dt, arrays.dt_bias), 0)
    states, read = [old], []
    for t in range(tokens):
        parent = states[-1]
        if ancestors is not None:
            bits = jnp.where((ancestors[:, t, None] >> token) & 1 > 0, token + 1, 0)
            number = jnp.where(token < t, bits, 0).max(1)
            parent = jnp.stack(states, axis=1)[row, number]
        scan = SelectiveScan(
            x=x[:, t : t + 1],
            dt=dt[:, t : t + 1],
            A=-jnp.exp(arrays.A_log),
            B=arrays.BC[:, t : t + 1, :size],
            C=arrays.BC[:, t : t + 1, size:],
            state=parent,
            valid=valid[:, t : t + 1],
            kept=jnp.ones((rows, 1), jnp.int32),
        )
        y, after = selective_scan_reference(scan)
        read.append(y)
        states.append(after[:, 0])
    z = summed(arrays.projected, 3, x.dtype)[..., channels:]
    y = gated_output(jnp.concatenate(read, axis=1), x, arrays.D, z)
    y = jnp.where(valid[..., None], y, 0)
    new = ring
    afters = range(1, tokens + 1) if keeps else [tokens]
    for after in afters:
        place = (arrays.base + (after if keeps else arrays.num_valid)) % count
        new = new.at[layer, row, place].set(states[after].reshape(rows, -1))
    live = valid.any(1)
    kept = jnp.where(live[:, None, None], new[layer, :rows], ring[layer, :rows])
    return y, ring.at[layer, :rows].set(kept)

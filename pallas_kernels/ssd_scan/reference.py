"""The recurrence as it is written, one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import FLAGS, FLOATS, INTS, WORDS
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.records import RecordSizes, read_states, write_states


class Scan(NamedTuple):
    """Arrays of `api.ssd_scan`, which fills in those that are left out."""

    x: Annotated[jax.Array, FLOATS, "B T M P"]
    dt: Annotated[jax.Array, FLOATS, "B T M"]
    A: Annotated[jax.Array, FLOATS, "M"]
    B: Annotated[jax.Array, FLOATS, "B T G R"]
    C: Annotated[jax.Array, FLOATS, "B T G R"]
    initial_state: Annotated[jax.Array, FLOATS, "None B M P R"]
    lengths: Annotated[jax.Array, INTS, "None B"]
    state_lengths: Annotated[jax.Array, INTS, "None B"]


class ScanFrames(NamedTuple):
    """Arrays of `api.ssd_scan_frames`.

    Attributes:
        xBC: [B, T, M P + 2 G R] outputs of the convolution, x | B | C.
        dt, A: as in `api.ssd_scan`. D: float32[M] factor of x in the outputs, or None.
        arena: uint32[U, W]; a frame holds W // (P R) whole heads of float32 bits, [h, P, R].
        read, write: int32[B, F] frames of each row's first and last checkpoint, the same or others.
        exists: bool[B]; where false the first state is zero, whatever its frames hold.
        lengths, state_lengths: int32[B], as in `api.ssd_scan`.
    """

    xBC: Annotated[jax.Array, FLOATS, "B T E"]
    dt: Annotated[jax.Array, FLOATS, "B T M"]
    A: Annotated[jax.Array, FLOATS, "M"]
    D: Annotated[jax.Array | None, FLOATS, "None M"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    read: Annotated[jax.Array, INTS, "B F"]
    write: Annotated[jax.Array, INTS, "B F"]
    exists: Annotated[jax.Array, FLAGS, "B"]
    lengths: Annotated[jax.Array, INTS, "B"]
    state_lengths: Annotated[jax.Array, INTS, "B"]


def ssd_scan_reference(arrays: Scan):
    """See `api.ssd_scan`."""
    x, dt, A, B, C, initial_state, lengths, state_lengths = arrays
    heads_per_group = x.shape[2] // B.shape[2]
    positions = jnp.arange(x.shape[1])

    def step(carry: tuple, token: tuple):
        state, kept = carry  # [B, M, P, R] after all tokens, and after those of state_lengths
        position, x_t, dt_t, B_t, C_t = token
        valid = (position < lengths)[:, None]
        x_t = jnp.where(valid[:, :, None], x_t, 0).astype(jnp.float32)
        dt_t = jnp.where(valid, dt_t, 0.0)
        B_t = jnp.repeat(B_t.astype(jnp.float32), heads_per_group, axis=1)  # [B, M, R]
        C_t = jnp.repeat(C_t.astype(jnp.float32), heads_per_group, axis=1)
        B_t = jnp.where(valid[:, :, None], B_t, 0.0)
        C_t = jnp.where(valid[:, :, None], C_t, 0.0)
        decay = jnp.exp(dt_t * A)[:, :, None, None]
        state = decay * state + (dt_t[:, :, None] * x_t)[..., None] * B_t[:, :, None, :]
        kept = jnp.where((position < state_lengths)[:, None, None, None], state, kept)
        y = jnp.einsum("bmpr,bmr->bmp", state, C_t, precision=HIGHEST)
        return (state, kept), jnp.where(valid[:, :, None], y, 0)

    tokens = (positions, *(jnp.moveaxis(a, 1, 0) for a in (x, dt, B, C)))
    (_, state), y = jax.lax.scan(step, (initial_state, initial_state), tokens)
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), state


def ssd_scan_frames_reference(
    arrays: ScanFrames,
    *,
    records: RecordSizes,
    first_frame: int,
    scan: Callable = ssd_scan_reference,
):
    """Reads all states, scans, and writes all states."""
    xBC, dt, A, D, arena, read, write, exists, lengths, state_lengths = arrays
    inner, size = records.inner_size, records.shared_size
    x, B, C = jnp.split(xBC, [inner, inner + size], axis=-1)
    lead = xBC.shape[:2]
    x = x.reshape(*lead, records.num_heads, records.head_dim)
    B, C = (a.reshape(*lead, records.num_groups, records.state_size) for a in (B, C))
    per_layer = -(-records.num_heads // records.per_frame(arena))
    read, write = (a[:, first_frame : first_frame + per_layer] for a in (read, write))
    state = read_states(arena, read, exists, records)
    y, state = scan(Scan(x.astype(jnp.float32), dt, A, B, C, state, lengths, state_lengths))
    if D is not None:
        valid = (jnp.arange(lead[1]) < lengths[:, None])[..., None, None]
        y = y + jnp.where(valid, D[:, None] * x.astype(jnp.float32), 0)
    y = y.reshape(*lead, inner).astype(xBC.dtype)
    return y, write_states(arena, write, state, records)

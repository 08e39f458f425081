"""The closed form over checkpoint and ring: two matrix products, no state written."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.checkpoint import unpack_states
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.mamba2 import RecordSizes, lag, running_decay
from pallas_kernels.ssd_window.reference import Fold, WindowFrames, visible


def ssd_window_frames_xla(arrays: WindowFrames):
    """See `api.ssd_window_frames`. A loop over frames: what a step reads of the arena stays in the cache.

    With c the running sum of dt A over the ring: for the query at slot i,
    y_i = exp(c_i) S C_i + sum over slots j <= i of exp(c_i - c_j) dt_j (C_i . B_j) x_j.
    """
    x, dt, A, B, C, arena, frames, exists, starts, num_valid, ancestors = arrays
    rows, tokens, groups, size = C.shape
    heads, width = x.shape[2:]
    per_frame = RecordSizes.of(x, B).per_frame(arena)  # whole heads, then padding
    per_row = frames.shape[1]
    counts = jnp.arange(tokens)[None] < num_valid[:, None]
    C = jnp.where(counts[:, :, None, None], C, 0).astype(jnp.float32)
    by_head = jnp.repeat(C, heads // groups, axis=2)  # [B, T, M, R]
    by_head = jnp.pad(by_head, ((0, 0), (0, 0), (0, per_row * per_frame - heads), (0, 0)))
    by_frame = by_head.reshape(rows, tokens, per_row, per_frame, size).swapaxes(1, 2)
    by_frame = by_frame.reshape(rows * per_row, tokens, per_frame, size)
    ids = frames.reshape(-1)

    def read(i: jax.Array, carry: tuple):
        arena, out = carry
        line = jax.lax.dynamic_slice(arena, (ids[i], 0), (1, per_frame * width * size))
        state = unpack_states(line, per_frame, width * size).reshape(per_frame, width, size)
        C_i = jax.lax.dynamic_index_in_dim(by_frame, i, keepdims=False)  # [T, h, R]
        y = jnp.einsum("thr,hpr->thp", C_i, state, precision=HIGHEST)
        return arena, jax.lax.dynamic_update_index_in_dim(out, y, i, 0)

    # The arena travels through the loop: it is written later, and an invariant would be copied for that.
    out = jnp.zeros((rows * per_row, tokens, per_frame, width), jnp.float32)
    arena, out = jax.lax.fori_loop(0, rows * per_row, read, (arena, out))
    carried = out.reshape(rows, per_row, tokens, per_frame, width).swapaxes(1, 2)
    carried = carried.reshape(rows, tokens, per_row * per_frame, width)[:, :, :heads]
    carried = jnp.where(exists[:, None, None, None], carried, 0.0)
    carried = carried.reshape(rows, tokens, groups, heads // groups, width)
    return outputs(carried, arrays._replace(C=C)), arena


def outputs(carried: jax.Array, arrays: WindowFrames):
    """The window's outputs from what the checkpoint carries, S C of [B, T, G, h, P], and the ring.

    Records past the live slots are zeroed, not only masked, so garbage there (NaN too) is inert.
    """
    x, dt, A, B, C, *_, starts, num_valid, ancestors = arrays
    rows, tokens, groups, size = C.shape
    slots, heads, width = x.shape[1:]
    per_group = heads // groups
    f32 = jnp.float32
    slot = jnp.arange(slots)
    query = starts[:, None] + jnp.arange(tokens)  # [B, T] slot of each query
    live = slot[None] < (starts + num_valid)[:, None]  # [B, S]
    counts = jnp.arange(tokens)[None] < num_valid[:, None]  # [B, T]
    x = jnp.where(live[:, :, None, None], x, 0).astype(f32)
    B = jnp.where(live[:, :, None, None], B, 0).astype(f32)
    dt = jnp.where(live[:, :, None], dt, 0.0)
    x = x.reshape(rows, slots, groups, per_group, width)
    dt = dt.reshape(rows, slots, groups, per_group)
    steps = dt * A.reshape(groups, per_group)
    seen = visible(starts, tokens, slots, ancestors)[..., None, None]  # [B, T, S, 1, 1]
    if ancestors is None:
        decay = running_decay(steps, axis=1)  # [B, S, G, h] twice
        place = jnp.minimum(query, slots - 1)[:, :, None, None]
        at_query = [jnp.take_along_axis(part, place, axis=1) for part in decay]
        decay = [part[:, None] for part in decay]
    else:
        decay = running_decay(jnp.where(seen, steps[:, None], 0.0), axis=2)  # [B, T, S, G, h] twice
        at_query = [part[:, :, -1] for part in decay]
    between = lag([part[:, :, None] for part in at_query], decay)
    between = jnp.where(seen, between, -jnp.inf)
    scores = jnp.einsum("btgr,bsgr->btsg", C, B, precision=HIGHEST)
    weights = scores[..., None] * jnp.exp(between) * dt[:, None]  # [B, T, S, G, h]
    if tokens == 1:  # a product would have x transposed first
        y = (weights[:, 0, ..., None] * x).sum(1)[:, None]
    else:
        y = jnp.einsum("btsgh,bsghp->btghp", weights, x, precision=HIGHEST)
    y = y + carried * jnp.exp(sum(at_query))[..., None]
    y = y.reshape(rows, tokens, heads, width)
    return jnp.where(counts[:, :, None, None], y, 0)  # even where the state is not finite


def fold_xla(arrays: Fold):
    """See `api.fold`: S' = exp(c_last) S + sum over j of exp(c_last - c_j) dt_j x_j B_j^T."""
    x, dt, A, B, state, lengths = arrays
    rows, slots, heads, width = x.shape
    groups, size = B.shape[2:]
    per_group = heads // groups
    f32 = jnp.float32
    live = jnp.arange(slots)[None] < lengths[:, None]
    x = jnp.where(live[:, :, None, None], x, 0).astype(f32)
    B = jnp.where(live[:, :, None, None], B, 0).astype(f32)
    dt = jnp.where(live[:, :, None], dt, 0.0)
    decay = running_decay(dt * A, axis=1)  # [B, S, M] twice
    last = [part[:, -1:] for part in decay]
    left = x * (dt * jnp.exp(lag(last, decay)))[..., None]
    left = left.reshape(rows, slots, groups, per_group, width)
    added = jnp.einsum("bsghp,bsgr->bghpr", left, B, precision=HIGHEST)
    return state * jnp.exp(sum(last))[:, 0, :, None, None] + added.reshape(rows, heads, width, size)

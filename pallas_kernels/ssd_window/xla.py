"""The closed form over checkpoint and ring: two matrix products, no state written."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.checkpoint import unpack_states
from pallas_kernels.decay import lag, running_decay
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.ssd_window.reference import Fold, WindowFrames, visible


def ssd_window_frames_xla(arrays: WindowFrames):
    """See `api.ssd_window_frames`.

    With c the running sum of dt A over the ring: for the query at slot i,
    y_i = exp(c_i) S C_i + sum over slots j <= i of exp(c_i - c_j) dt_j (C_i . B_j) x_j.
    """
    x, _, _, _, C, arena, frames, exists, _, num_valid, _ = arrays
    counts = jnp.arange(C.shape[1])[None] < num_valid[:, None]
    C = jnp.where(counts[:, :, None, None], C, 0).astype(jnp.float32)
    carried, arena = read_states_by(C, arena, frames, exists, *x.shape[2:])
    return outputs(carried, arrays._replace(C=C)), arena


def outputs(carried: jax.Array, arrays: WindowFrames):
    """The window's outputs from what the checkpoint carries, S C of [B, T, G, h, P], and the ring.

    Records past the live slots are zeroed, not only masked, so garbage there (NaN too) is inert.
    """
    x, dt, A, B, C, *_, starts, num_valid, ancestors = arrays
    rows, tokens, groups, _ = C.shape
    slots, heads, width = x.shape[1:]
    live = jnp.arange(slots) < (starts + num_valid)[:, None]
    counts = jnp.arange(tokens)[None] < num_valid[:, None]
    x = jnp.where(live[:, :, None, None], x, 0).astype(jnp.float32)
    B = jnp.where(live[:, :, None, None], B, 0).astype(jnp.float32)
    dt = jnp.where(live[:, :, None], dt, 0.0)
    x = x.reshape(rows, slots, groups, -1, width)
    dt = dt.reshape(rows, slots, groups, -1)
    kept, between = window_decays(dt * A.reshape(groups, -1), starts, tokens, ancestors)
    scores = jnp.einsum("btgr,bsgr->btsg", C, B, precision=HIGHEST)
    weights = scores[..., None] * between * dt[:, None]  # [B, T, S, G, h]
    y = weigh(weights, x) + carried * kept[..., None]
    y = y.reshape(rows, tokens, heads, width)
    return jnp.where(counts[:, :, None, None], y, 0)  # even where the state is not finite


def read_states_by(
    C: jax.Array,
    arena: jax.Array,
    frames: jax.Array,
    exists: jax.Array,
    heads: int,
    width: int,
) -> tuple[jax.Array, jax.Array]:
    """What vectors read in the states of checkpoints: S C, float32[B, T, G, h, P], and the arena as it was.

    A loop over frames: what a step reads of the arena stays in the cache.

    Args:
        C: float32[B, T, G, R] of each group of heads. heads, width: M and P.
        arena, frames, exists: as in `WindowFrames`.
    """
    rows, tokens, groups, size = C.shape
    per_frame = min(arena.shape[1] // (width * size), heads)  # whole heads, then padding
    per_row = frames.shape[1]
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
    return carried.reshape(rows, tokens, groups, heads // groups, width), arena


def window_decays(
    exponents: jax.Array, starts: jax.Array, tokens: int, ancestors: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """What is left for T queries of the state [B, T, G, h], and of each record [B, T, S, G, h]; 0 of unseen ones.

    Args:
        exponents: float32[B, S, G, h] logarithms of the decays. starts, ancestors: as in `WindowFrames`.
    """
    slots = exponents.shape[1]
    seen = visible(starts, tokens, slots, ancestors)[..., None, None]  # [B, T, S, 1, 1]
    if ancestors is None:
        decay = running_decay(exponents, axis=1)  # [B, S, G, h] twice
        place = starts[:, None] + jnp.arange(tokens)  # of each query
        place = jnp.minimum(place, slots - 1)[:, :, None, None]
        at_query = [jnp.take_along_axis(part, place, axis=1) for part in decay]
        decay = [part[:, None] for part in decay]
    else:
        decay = running_decay(jnp.where(seen, exponents[:, None], 0.0), axis=2)  # [B, T, S, G, h]
        at_query = [part[:, :, -1] for part in decay]
    between = lag([part[:, :, None] for part in at_query], decay)
    return jnp.exp(sum(at_query)), jnp.exp(jnp.where(seen, between, -jnp.inf))


def weigh(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Sums of x [B, S, G, h, P] with weights [B, T, S, G, h]: [B, T, G, h, P]."""
    if weights.shape[1] == 1:  # a product would have x transposed first
        return (weights[:, 0, ..., None] * x).sum(1)[:, None]
    return jnp.einsum("btsgh,bsghp->btghp", weights, x, precision=HIGHEST)


def fold_xla(arrays: Fold):
    """See `api.fold`."""
    x, dt, A, B, state, lengths = arrays
    live = jnp.arange(x.shape[1])[None] < lengths[:, None]
    x = jnp.where(live[:, :, None, None], x, 0).astype(jnp.float32)
    B = jnp.where(live[:, :, None, None], B, 0).astype(jnp.float32)
    dt = jnp.where(live[:, :, None], dt, 0.0)
    return add_records(state, x, dt * A, B, dt)


def add_records(
    state: jax.Array, x: jax.Array, exponents: jax.Array, B: jax.Array, scale: jax.Array
) -> jax.Array:
    """The state after records: S' = exp(c_last) S + sum over j of exp(c_last - c_j) scale_j x_j B_j^T.

    Args:
        state: float32[B, M, P, R]. x: float32[B, S, M, P]. B: float32[B, S, G, R].
        exponents: float32[B, S, M] logarithms of the decays, of which c is the running sum.
        scale: float32[B, S, M], or any shape that goes with it.
    """
    rows, slots, heads, width = x.shape
    groups, size = B.shape[2:]
    decay = running_decay(exponents, axis=1)  # [B, S, M] twice
    last = [part[:, -1:] for part in decay]
    left = x * (scale * jnp.exp(lag(last, decay)))[..., None]
    left = left.reshape(rows, slots, groups, heads // groups, width)
    added = jnp.einsum("bsghp,bsgr->bghpr", left, B, precision=HIGHEST)
    return state * jnp.exp(sum(last))[:, 0, :, None, None] + added.reshape(rows, heads, width, size)

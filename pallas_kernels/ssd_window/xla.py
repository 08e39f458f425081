"""The closed form over checkpoint and ring: two matrix products, no state written."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.decay import lag, running_decay
from pallas_kernels.dispatch import HIGHEST


def ssd_window_xla(state, x, dt, A, B, C, starts, num_valid):
    """See `api.ssd_window`.

    With c the running sum of dt A over the ring: for the query at slot i,
    y_i = exp(c_i) S C_i + sum over slots j <= i of exp(c_i - c_j) dt_j (C_i . B_j) x_j.
    Records past the live slots are zeroed, not only masked, so garbage there (NaN too) is inert.
    """
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
    C = jnp.where(counts[:, :, None, None], C, 0).astype(f32)
    x = x.reshape(rows, slots, groups, per_group, width)
    dt = dt.reshape(rows, slots, groups, per_group)
    decay = running_decay(dt * A.reshape(groups, per_group), axis=1)  # [B, S, G, h] twice
    place = jnp.minimum(query, slots - 1)[:, :, None, None]
    at_query = [jnp.take_along_axis(part, place, axis=1) for part in decay]
    seen = slot[None, None] <= query[:, :, None]  # [B, T, S]
    between = lag([part[:, :, None] for part in at_query], [part[:, None] for part in decay])
    between = jnp.where(seen[..., None, None], between, -jnp.inf)
    scores = jnp.einsum("btgr,bsgr->btsg", C, B, precision=HIGHEST)
    weights = scores[..., None] * jnp.exp(between) * dt[:, None]  # [B, T, S, G, h]
    y = jnp.einsum("btsgh,bsghp->btghp", weights, x, precision=HIGHEST)
    grouped = state.reshape(rows, groups, per_group, width, size)
    carried = jnp.einsum("btgr,bghpr->btghp", C, grouped, precision=HIGHEST)
    y = y + carried * jnp.exp(sum(at_query))[..., None]
    y = y.reshape(rows, tokens, heads, width)
    return jnp.where(counts[:, :, None, None], y, 0)  # even where the state is not finite


def fold_xla(state, x, dt, A, B, lengths):
    """See `api.fold`: S' = exp(c_last) S + sum over j of exp(c_last - c_j) dt_j x_j B_j^T."""
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

"""Shifted sums over whole batches; the rings are written where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.bits import floats, stored
from pallas_kernels.causal_conv.sizes import Sizes
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.parts import whole


def activated(taps, weight, bias) -> jax.Array:
    """Convolution and SiLU of W raw columns, each of [..., E], the token's own last."""
    wide = weight.astype(jnp.float32)
    y = sum(tap.astype(jnp.float32) * wide[w] for w, tap in enumerate(taps))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return jax.nn.silu(y).astype(taps[0].dtype)


def steps(dt, dt_bias, sizes: Sizes) -> jax.Array:
    """What in_proj gave [..., M] to step sizes float32[..., M]."""
    dt = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    return jnp.clip(dt, *sizes.dt_limits)


def causal_conv_xla(projected, history, weight, bias, dt_bias, lengths, *, sizes: Sizes):
    """See `api.causal_conv`."""
    tokens = projected.shape[1]
    valid = (jnp.arange(tokens) < lengths[:, None])[..., None]
    raw, dt = sizes.split(projected)
    raw = jnp.where(valid, raw, 0)
    columns = jnp.concatenate([floats(history).astype(raw.dtype), raw], axis=1)
    taps = [columns[:, w : w + tokens] for w in range(sizes.conv_width)]
    y = activated(taps, weight, bias)
    return jnp.where(valid, y, 0), jnp.where(valid, steps(dt, dt_bias, sizes), 0)


def places_on_paths(ancestors: jax.Array, sizes: Sizes) -> list[jax.Array]:
    """int32[B, T] column of each tap of a tree's tokens: their nearest ancestors, then the history."""
    token = jnp.arange(ancestors.shape[1])
    above = (ancestors[..., None] >> token) & 1 > 0
    above &= token < token[:, None]  # [B, T, T]
    depth, nearest = above.sum(-1), token
    places = [jnp.broadcast_to(sizes.history + token, ancestors.shape)]
    for back in range(1, sizes.conv_width):
        nearest = jnp.max(jnp.where(above & (token < nearest[..., None]), token, -1), axis=-1)
        before = depth - back  # of the columns before the window when negative
        places.append(sizes.history + jnp.where(before < 0, before, nearest))
    return places[::-1]


def causal_conv_window_xla(
    projected,
    weight,
    bias,
    dt_bias,
    conv,
    xB,
    dt,
    starts,
    first,
    num_valid,
    ancestors,
    *,
    layer,
    sizes: Sizes,
    moves: bool = True,
):
    """See `api.causal_conv_window`."""
    projected = whole(projected, 3, weight.dtype)
    rows, tokens, _ = projected.shape
    slots, history = xB.shape[2], sizes.history
    token, slot, row = jnp.arange(tokens), jnp.arange(slots), jnp.arange(rows)[:, None]
    new = (token >= first[:, None]) & (token < num_valid[:, None])  # [B, T]
    live = new.any(1)
    raw, own_dt = sizes.split(projected)
    raw = jnp.where(new[..., None], raw, 0)
    old_bits = conv[layer, :rows, : history + tokens]
    old = floats(old_bits).astype(raw.dtype)
    raw = jnp.where((token < first[:, None])[..., None], old[:, history:], raw)
    columns = jnp.concatenate([old[:, :history], raw], axis=1)
    if ancestors is None:
        taps = [columns[:, w : w + tokens] for w in range(sizes.conv_width)]
    else:
        places = places_on_paths(ancestors, sizes)
        taps = [jnp.take_along_axis(columns, place[..., None], axis=1) for place in places]
    records, C = jnp.split(activated(taps, weight, bias), [sizes.record_size], axis=-1)

    place = jnp.where(new, starts[:, None] + token, slots)  # out of the ring is dropped
    xB = xB.at[layer, row, place].set(stored(records, xB.dtype), mode="drop")
    dt = dt.at[layer, row, place].set(steps(own_dt, dt_bias, sizes), mode="drop")

    moved = live & (num_valid == tokens) & moves
    written = live[:, None] & (token >= first[:, None])
    changed = jnp.concatenate([jnp.repeat(moved[:, None], history, axis=1), written], axis=1)
    values = stored(jnp.concatenate([columns[:, tokens:], raw], axis=1), conv.dtype)
    values = jnp.where(changed[..., None], values, old_bits)
    conv = conv.at[layer, :rows, : history + tokens].set(values)

    C = jnp.where(new[..., None], C, 0)
    seen = new[..., None] & (slot <= (starts[:, None] + token)[..., None])  # [B, T, S]
    B = jnp.where(seen.any(1)[..., None], floats(xB[layer, :rows, :, sizes.inner_size :]), 0)
    grouped = (x.reshape(rows, -1, sizes.num_groups, sizes.state_size) for x in (C, B))
    scores = jnp.einsum(
        "btgr,bsgr->btgs", *(x.astype(jnp.float32) for x in grouped), precision=HIGHEST
    )
    return conv, xB, dt, C, jnp.where(seen[:, :, None], scores, 0)

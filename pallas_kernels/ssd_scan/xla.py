"""Chunked form for XLA: matrix products inside a tile, the state carried between tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.decay import lag, running_decay
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.ssd_scan.reference import Scan
from pallas_kernels.tiles import kept_state, with_usual_tile


def ssd_scan_xla(arrays: Scan, *, tile: int | None = None):
    """See `api.ssd_scan`; the token count is padded up to whole tiles here, of the usual size for None.

    Within a tile, with a_t = dt_t A and c its running sum (arXiv 2405.21060, section 6):
    y_q = exp(c_q) S C_q + sum over k <= q of exp(c_q - c_k) dt_k (C_q . B_k) x_k,
    S'  = exp(c_last) S + sum over k of exp(c_last - c_k) dt_k x_k B_k^T.
    """
    if tile is None:
        return with_usual_tile(ssd_scan_xla, arrays)
    x, dt, A, B, C, initial_state, lengths, state_lengths = arrays
    rows, tokens, heads, width = x.shape
    groups, size = B.shape[2:]
    per_group = heads // groups
    tile = min(tile, -(-tokens // 8) * 8)
    tiles = -(-tokens // tile)
    pad = tiles * tile - tokens
    position = jnp.arange(tiles * tile)
    valid = position < lengths[:, None]  # [B, T]

    def split(a: jax.Array):
        a = jnp.pad(a, ((0, 0), (0, pad)) + ((0, 0),) * (a.ndim - 2))
        a = jnp.where(valid.reshape(valid.shape + (1,) * (a.ndim - 2)), a, 0)
        return jnp.moveaxis(a.reshape(rows, tiles, tile, *a.shape[2:]), 1, 0)  # [c, B, Q, ...]

    def by_group(a: jax.Array):
        return a.reshape(*a.shape[:3], groups, per_group, *a.shape[4:])

    causal = jnp.tril(jnp.ones((tile, tile), bool))

    rates = A.reshape(groups, per_group)

    def after(state: jax.Array, x: jax.Array, dt: jax.Array, B: jax.Array) -> jax.Array:
        """The state after a tile's tokens, whose step sizes are dt [B, Q, G, h]."""
        decay = running_decay(dt * rates, axis=1)
        last = [part[:, -1:] for part in decay]  # [B, 1, G, h]
        left = x * (dt * jnp.exp(lag(last, decay)))[..., None]
        added = jnp.einsum("bkghp,bkgr->bghpr", left, B, precision=HIGHEST)
        return state * jnp.exp(sum(last))[:, 0, ..., None, None] + added

    def body(carry: tuple, tokens_of_tile: tuple):  # states: [B, G, h, P, R]
        state, kept, start = carry
        x, dt, B, C = tokens_of_tile
        decay = running_decay(dt * rates, axis=1)  # [B, Q, G, h] twice
        scores = jnp.einsum("bqgr,bkgr->bgqk", C, B, precision=HIGHEST)
        steps = [jnp.moveaxis(part, 1, 3) for part in decay]  # [B, G, h, Q]
        late, early = ([s[..., :, None] for s in steps], [s[..., None, :] for s in steps])
        between = jnp.where(causal, lag(late, early), -jnp.inf)
        weights = scores[:, :, None] * jnp.exp(between)  # [B, G, h, Q, K]
        xdt = x * dt[..., None]
        y = jnp.einsum("bghqk,bkghp->bqghp", weights, xdt, precision=HIGHEST)
        carried = jnp.einsum("bqgr,bghpr->bqghp", C, state, precision=HIGHEST)
        y = y + carried * jnp.exp(sum(decay))[..., None]

        def make(counts: jax.Array) -> jax.Array:
            return after(state, x, jnp.where(counts[..., None, None], dt, 0), B)

        kept = kept_state(kept, state_lengths - start, tile, make)
        return (after(state, x, dt, B), kept, start + tile), y

    f32 = jnp.float32
    xs = (
        by_group(split(x.astype(f32))),
        by_group(split(dt.astype(f32))),
        split(B.astype(f32)),
        split(C.astype(f32)),
    )
    state = initial_state.reshape(rows, groups, per_group, width, size)
    (_, state, _), y = jax.lax.scan(body, (state, state, jnp.int32(0)), xs)
    y = jnp.moveaxis(y, 0, 1).reshape(rows, tiles * tile, heads, width)
    y = jnp.where(valid[:, :, None, None], y, 0)[:, :tokens]  # even where the state is not finite
    return y.astype(x.dtype), state.reshape(rows, heads, width, size)

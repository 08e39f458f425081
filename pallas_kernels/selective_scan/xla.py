"""The scan for XLA: tiles of a few tokens, whose states exist at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.selective_scan.reference import SelectiveScan

TILE = 8  # tokens; with more, a tile's states leave the cache of a CPU


def selective_scan_xla(arrays: SelectiveScan):
    """See `api.selective_scan`; the token count is padded up to whole tiles here."""
    x, dt, A, B, C, state, valid, kept = arrays
    rows, tokens, channels = x.shape
    tile = min(TILE, tokens)
    tiles = -(-tokens // tile)
    A = A.astype(jnp.float32)

    def split(a: jax.Array):
        """[B, T, ...] as float32[c, B, Q, ...], zero where a token is not valid."""
        mask = valid.astype(bool).reshape(*valid.shape, *(1,) * (a.ndim - 2))
        a = jnp.where(mask, a.astype(jnp.float32), 0)
        a = jnp.pad(a, ((0, 0), (0, tiles * tile - tokens), (0, 0)))
        return jnp.moveaxis(a.reshape(rows, tiles, tile, *a.shape[2:]), 1, 0)

    def body(carry: tuple, tokens_of_tile: tuple):
        state, states, start = carry
        x, dt, B, C = tokens_of_tile
        # A token that is not valid has dt = 0: its decay is 1 and it adds 0.
        decays = jnp.exp(dt[..., None] * A)  # [B, Q, E, R]
        added = (dt * x)[..., None] * B[:, :, None]
        after = []
        for q in range(tile):
            state = decays[:, q] * state + added[:, q]
            after.append(state)
        all_states = jnp.stack(after, axis=1)  # [B, Q, E, R]
        place = kept - 1 - start  # [B, K] in the tile
        inside = (place >= 0) & (place < tile)
        index = jnp.clip(place, 0, tile - 1)[..., None, None]
        found = jnp.take_along_axis(all_states, index, axis=1)
        states = jnp.where(inside[..., None, None], found, states)
        y = jnp.einsum("bqer,bqr->bqe", all_states, C, precision=HIGHEST)
        return (state, states, start + tile), y

    states = jnp.repeat(state[:, None], kept.shape[1], axis=1)
    parts = tuple(split(a) for a in (x, dt, B, C))
    (_, states, _), y = jax.lax.scan(body, (state, states, jnp.int32(0)), parts)
    y = jnp.moveaxis(y, 0, 1).reshape(rows, -1, channels)[:, :tokens]
    return jnp.where(valid.astype(bool)[..., None], y, 0), states

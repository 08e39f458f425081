"""The definitions, through the token-by-token scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ssd_scan.reference import ssd_scan_reference


def ssd_window_reference(state, x, dt, A, B, C, starts, num_valid):
    """Runs the recurrence over the ring for each query, C standing only at the query's slot."""
    slots = jnp.arange(x.shape[1])
    x = x.astype(jnp.float32)  # the scan returns the dtype of x

    def query(t_and_C):
        t, C_t = t_and_C  # C_t: [B, G, R]
        at_slot = (slots == (starts + t)[:, None])[:, :, None, None]  # [B, S, 1, 1]
        last = jnp.where(t < num_valid, starts + t + 1, 0)
        y, _ = ssd_scan_reference(
            x, dt, A, B, jnp.where(at_slot, C_t[:, None], 0), state, last, last
        )
        return jnp.sum(jnp.where(at_slot, y, 0), axis=1)

    ys = jax.lax.map(query, (jnp.arange(C.shape[1]), jnp.moveaxis(C, 1, 0)))
    return jnp.moveaxis(ys, 0, 1)


def ssd_window_frames_reference(arena, frames, exists, x, dt, A, B, C, starts, num_valid):
    """Gathers the states, zeros where there is none, and asks `ssd_window_reference`."""
    rows, (heads, width), size = x.shape[0], x.shape[2:], C.shape[-1]
    words = arena[frames]  # [B, n, W]
    whole = min(words.shape[-1] // (width * size), heads) * width * size
    state = jax.lax.bitcast_convert_type(words[..., :whole], jnp.float32)
    state = state.reshape(rows, -1, width, size)[:, :heads]
    state = jnp.where(exists[:, None, None, None], state, 0.0)
    return ssd_window_reference(state, x, dt, A, B, C, starts, num_valid), arena


def fold_reference(state, x, dt, A, B, lengths):
    return ssd_scan_reference(x, dt, A, B, B, state, lengths, lengths)[1]

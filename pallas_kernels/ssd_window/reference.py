"""The definitions, through the token-by-token scan."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.ssd_scan.reference import ssd_scan_reference


def ssd_window_reference(state, x, dt, A, B, C, starts, num_valid):
    """Runs the whole recurrence over the ring for each query, C standing only at the query's slot."""
    rows, tokens = C.shape[:2]
    slots = x.shape[1]
    ys = []
    for t in range(tokens):
        slot = starts + t
        at_slot = jnp.arange(slots)[None] == slot[:, None]
        C_ring = jnp.where(at_slot[:, :, None, None], C[:, t, None], 0)
        y, _ = ssd_scan_reference(x, dt, A, B, C_ring, state, slot + 1, slot + 1)
        y = jnp.sum(jnp.where(at_slot[:, :, None, None], y, 0), axis=1)
        ys.append(jnp.where((t < num_valid)[:, None, None], y, 0))
    return jnp.stack(ys, axis=1)


def fold_reference(state, x, dt, A, B, lengths):
    return ssd_scan_reference(x, dt, A, B, B, state, lengths, lengths)[1]

"""The definitions, through the token-by-token scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.checkpoint import read_states, write_states
from pallas_kernels.records import RecordSizes, split_records
from pallas_kernels.ssd_scan.reference import ssd_scan_reference


def ssd_window_frames_reference(
    arena: jax.Array,
    frames: jax.Array,
    exists: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    starts: jax.Array,
    num_valid: jax.Array,
    ancestors: jax.Array | None,
):
    """Gathers the states, and runs the recurrence over the ring for each query, C standing only at the query's slot.

    The steps of records that a query does not see change nothing: their dt is 0.
    """
    state = read_states(arena, frames, exists, RecordSizes.of(x, B))
    slots = jnp.arange(x.shape[1])
    x = x.astype(jnp.float32)  # the scan returns the dtype of x
    seen = visible(starts, C.shape[1], x.shape[1], ancestors)

    def query(inputs: tuple):
        t, C_t, seen_t = inputs  # C_t: [B, G, R], seen_t: [B, S]
        at_slot = (slots == (starts + t)[:, None])[:, :, None, None]  # [B, S, 1, 1]
        last = jnp.where(t < num_valid, starts + t + 1, 0)
        own_dt, own_C = jnp.where(seen_t[..., None], dt, 0.0), jnp.where(at_slot, C_t[:, None], 0)
        y, _ = ssd_scan_reference(x, own_dt, A, B, own_C, state, last, last)
        return jnp.sum(jnp.where(at_slot, y, 0), axis=1)

    queries = (jnp.arange(C.shape[1]), jnp.moveaxis(C, 1, 0), jnp.moveaxis(seen, 1, 0))
    return jnp.moveaxis(jax.lax.map(query, queries), 0, 1), arena


def visible(starts: jax.Array, tokens: int, slots: int, ancestors: jax.Array | None) -> jax.Array:
    """bool[B, T, S]: the records a query sees: those before the window, and its own and its ancestors'."""
    slot = jnp.arange(slots)
    new = slot - starts[:, None]  # [B, S] number of the new token at a slot
    if ancestors is None:
        return new[:, None] <= jnp.arange(tokens)[:, None]
    bits = ancestors[:, :, None] >> jnp.clip(new, 0, 31)[:, None]
    return (new[:, None] < 0) | ((bits & 1 > 0) & (new < tokens)[:, None])


def ssd_window_rings_reference(
    arena: jax.Array,
    frames: jax.Array,
    exists: jax.Array,
    xB: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    C: jax.Array,
    D: jax.Array,
    starts: jax.Array,
    num_valid: jax.Array,
    ancestors: jax.Array | None,
    scores: jax.Array,
    *,
    layer: int,
    first_frame: int,
    records: RecordSizes,
    dtype: jnp.dtype,
):
    """Cuts the layer's records out of the rings and asks the window over frames; makes its own scores."""
    rows, tokens = C.shape[:2]
    x, B = split_records(xB[layer, :rows], records)
    C = C.reshape(rows, tokens, records.num_groups, records.state_size)
    own = (x, dt[layer, :rows], A[layer], B, C)
    per_layer = -(-records.num_heads // records.per_frame(arena))
    frames = frames[:, first_frame : first_frame + per_layer]
    y, _ = ssd_window_frames_reference(arena, frames, exists, *own, starts, num_valid, ancestors)
    place = jnp.minimum(starts[:, None] + jnp.arange(tokens), x.shape[1] - 1)
    new = jnp.take_along_axis(x, place[:, :, None, None], axis=1).astype(jnp.float32)
    counts = (jnp.arange(tokens) < num_valid[:, None])[..., None, None]
    return (y + jnp.where(counts, D[:, None] * new, 0)).astype(dtype)


def fold_reference(
    state: jax.Array, x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, lengths: jax.Array
):
    """See `api.fold`: the last state of the scan."""
    return ssd_scan_reference(x, dt, A, B, B, state, lengths, lengths)[1]


def fold_frames_reference(
    arena: jax.Array,
    read: jax.Array,
    write: jax.Array,
    exists: jax.Array,
    lengths: jax.Array,
    xB: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    *,
    records: RecordSizes,
    per_layer: int,
):
    """Folds one row and one layer after another."""
    for row in range(read.shape[0]):
        for layer in range(A.shape[0]):
            own = slice(layer * per_layer, (layer + 1) * per_layer)
            one = slice(row, row + 1)
            old = read_states(arena, read[one, own], exists[one], records)
            x, B = split_records(xB[layer, one], records)
            length = jnp.maximum(lengths[one], 0)
            new = fold_reference(old, x, dt[layer, one], A[layer], B, length)
            folded = write_states(arena, write[one, own], new, records)
            arena = jnp.where(lengths[row] >= 0, folded, arena)
    return arena

"""The definitions, through the token-by-token scan."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import BITS, FLAGS, FLOAT32, FLOATS, INTS, WORDS
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.records import RecordSizes, read_states, split_records, write_states
from pallas_kernels.ssd_scan.reference import Scan, ssd_scan_reference


class WindowFrames(NamedTuple):
    """Arrays of `api.ssd_window_frames`, which fills in `num_valid`.

    Attributes:
        x: [B, S, M, P] ring records; slots past the last valid query are never read.
        dt: [B, S, M] float32 ring step sizes.
        A: [M] decay rates, negative.
        B: [B, S, G, R] ring records.
        C: [B, T, G, R] of the new tokens.
        arena: uint32[U, W] frames; a frame holds W // (P R) whole heads of float32 bits, [h, P, R].
        frames: int32[B, F] frames of each row's state, in the order of its heads; the last one may be partly empty.
        exists: bool[B]; where false the state is zero, and what its frames hold does not matter.
        starts: int32[B] slot of the first new token; starts + num_valid is at most S.
        num_valid: int32[B] new tokens that count, or None for T.
        ancestors: int32[B, T] of a tree of new tokens: bit j of ancestors[b, t] is set where token j is an ancestor of
            token t, or t itself, and ancestors come first. None for a chain.
    """

    x: Annotated[jax.Array, FLOATS, "B S M P"]
    dt: Annotated[jax.Array, FLOATS, "B S M"]
    A: Annotated[jax.Array, FLOATS, "M"]
    B: Annotated[jax.Array, FLOATS, "B S G R"]
    C: Annotated[jax.Array, FLOATS, "B T G R"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    frames: Annotated[jax.Array, INTS, "B F"]
    exists: Annotated[jax.Array, FLAGS, "B"]
    starts: Annotated[jax.Array, INTS, "B"]
    num_valid: Annotated[jax.Array | None, INTS, "None B"] = None
    ancestors: Annotated[jax.Array | None, INTS, "None B T"] = None


class WindowRings(NamedTuple):
    """Arrays of `api.ssd_window_rings`.

    Attributes:
        C: [B, T, G R] of the new tokens.
        xB: [L, B', S, M P + G R] rings of all layers, B' >= B; floats, or their bits as unsigned integers.
        dt: float32[L, B', S, M] rings of the step sizes.
        A: float32[L, M] decay rates of all layers.
        D: float32[M] factor of a new token's own x in its output.
        scores: float32[B, T, G, S] C . B of every query and slot, as `causal_conv_window` leaves them; those of slots
            a query does not see do not matter.
        frames: int32[B, F] frames of whole checkpoints.
        arena, exists, starts, num_valid, ancestors: as in `WindowFrames`.
    """

    C: Annotated[jax.Array, FLOATS, "B T GR"]
    xB: Annotated[jax.Array, FLOATS + BITS, "L rows S record"]
    dt: Annotated[jax.Array, FLOATS, "L rows S M"]
    A: Annotated[jax.Array, FLOATS, "L M"]
    D: Annotated[jax.Array, FLOATS, "M"]
    scores: Annotated[jax.Array, FLOATS, "B T G S"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    frames: Annotated[jax.Array, INTS, "B F"]
    exists: Annotated[jax.Array, FLAGS, "B"]
    starts: Annotated[jax.Array, INTS, "B"]
    num_valid: Annotated[jax.Array, INTS, "B"]
    ancestors: Annotated[jax.Array | None, INTS, "None B T"] = None


class WindowScores(NamedTuple):
    """Arrays of `api.ssd_window_scores`, as in `WindowRings`."""

    C: Annotated[jax.Array, FLOATS, "B T GR"]
    xB: Annotated[jax.Array, FLOATS + BITS, "L rows S record"]
    starts: Annotated[jax.Array, INTS, "B"]
    num_valid: Annotated[jax.Array, INTS, "B"]


class Fold(NamedTuple):
    """Arrays of `api.fold`, which fills in `lengths`."""

    x: Annotated[jax.Array, FLOATS, "B S M P"]
    dt: Annotated[jax.Array, FLOATS, "B S M"]
    A: Annotated[jax.Array, FLOATS, "M"]
    B: Annotated[jax.Array, FLOATS, "B S G R"]
    state: Annotated[jax.Array, FLOAT32, "B M P R"]
    lengths: Annotated[jax.Array, INTS, "None B"]


class FoldFrames(NamedTuple):
    """Arrays of `api.fold_frames`.

    Attributes:
        lengths: int32[B] records to fold; a row of length -1 is left alone.
        xB, dt, A: as in `WindowRings`; row b's records are at place b of the rings.
        arena: as in `WindowFrames`.
        read, write: int32[B, F] frames of each row's old and new checkpoint, the same or others, layer by layer; what
            follows the last layer's is not looked at.
        exists: bool[B]; where false the old state is zero.
    """

    lengths: Annotated[jax.Array, INTS, "B"]
    xB: Annotated[jax.Array, FLOATS + BITS, "L rows S record"]
    dt: Annotated[jax.Array, FLOATS, "L rows S M"]
    A: Annotated[jax.Array, FLOATS, "L M"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    read: Annotated[jax.Array, INTS, "B F"]
    write: Annotated[jax.Array, INTS, "B F"]
    exists: Annotated[jax.Array, FLAGS, "B"]


def ssd_window_frames_reference(arrays: WindowFrames):
    """Gathers the states, and runs the recurrence over the ring for each query, C standing only at the query's slot.

    The steps of records that a query does not see change nothing: their dt is 0.
    """
    x, dt, A, B, C, arena, frames, exists, starts, num_valid, ancestors = arrays
    state = read_states(arena, frames, exists, RecordSizes.of(x, B))
    slots = jnp.arange(x.shape[1])
    x = x.astype(jnp.float32)  # the scan returns the dtype of x
    seen = visible(starts, C.shape[1], x.shape[1], ancestors)

    def query(inputs: tuple):
        t, C_t, seen_t = inputs  # C_t: [B, G, R], seen_t: [B, S]
        at_slot = (slots == (starts + t)[:, None])[:, :, None, None]  # [B, S, 1, 1]
        last = jnp.where(t < num_valid, starts + t + 1, 0)
        own_dt, own_C = jnp.where(seen_t[..., None], dt, 0.0), jnp.where(at_slot, C_t[:, None], 0)
        y, _ = ssd_scan_reference(Scan(x, own_dt, A, B, own_C, state, last, last))
        return jnp.sum(jnp.where(at_slot, y, 0), axis=1)

    queries = (jnp.arange(C.shape[1]), jnp.moveaxis(C, 1, 0), jnp.moveaxis(seen, 1, 0))
    return jnp.moveaxis(jax.lax.map(query, queries), 0, 1), arena


def ssd_window_scores_reference(arrays: WindowScores, *, layer: int, records: RecordSizes):
    """See `api.ssd_window_scores`."""
    C, xB, starts, num_valid = arrays
    rows, tokens, _ = C.shape
    _, B = split_records(xB[layer, :rows], records)
    C = C.reshape(rows, tokens, records.num_groups, records.state_size)
    seen = visible(starts, tokens, B.shape[1], None)
    seen &= (jnp.arange(tokens) < num_valid[:, None])[..., None]  # [B, T, S]
    B = jnp.where(seen.any(1)[..., None, None], B.astype(jnp.float32), 0)  # others may hold NaN
    products = jnp.einsum("btgr,bsgr->btgs", C.astype(jnp.float32), B, precision=HIGHEST)
    return jnp.where(seen[:, :, None], products, 0)


def visible(starts: jax.Array, tokens: int, slots: int, ancestors: jax.Array | None) -> jax.Array:
    """bool[B, T, S]: the records a query sees: those before the window, and its own and its ancestors'."""
    slot = jnp.arange(slots)
    new = slot - starts[:, None]  # [B, S] number of the new token at a slot
    if ancestors is None:
        return new[:, None] <= jnp.arange(tokens)[:, None]
    bits = ancestors[:, :, None] >> jnp.clip(new, 0, 31)[:, None]
    return (new[:, None] < 0) | ((bits & 1 > 0) & (new < tokens)[:, None])


def ssd_window_rings_reference(
    arrays: WindowRings,
    *,
    layer: int,
    first_frame: int,
    records: RecordSizes,
    dtype: jnp.dtype,
):
    """Cuts the layer's records out of the rings and asks the window over frames; makes its own scores."""
    C, xB, dt, A, D, scores, arena, frames, exists, starts, num_valid, ancestors = arrays
    rows, tokens = C.shape[:2]
    x, B = split_records(xB[layer, :rows], records)
    C = C.reshape(rows, tokens, records.num_groups, records.state_size)
    own = (x, dt[layer, :rows], A[layer], B, C, arena)
    per_layer = -(-records.num_heads // records.per_frame(arena))
    frames = frames[:, first_frame : first_frame + per_layer]
    given = WindowFrames(*own, frames, exists, starts, num_valid, ancestors)
    y, _ = ssd_window_frames_reference(given)
    place = jnp.minimum(starts[:, None] + jnp.arange(tokens), x.shape[1] - 1)
    new = jnp.take_along_axis(x, place[:, :, None, None], axis=1).astype(jnp.float32)
    counts = (jnp.arange(tokens) < num_valid[:, None])[..., None, None]
    return (y + jnp.where(counts, D[:, None] * new, 0)).astype(dtype)


def fold_reference(arrays: Fold):
    """See `api.fold`: the last state of the scan."""
    x, dt, A, B, state, lengths = arrays
    return ssd_scan_reference(Scan(x, dt, A, B, B, state, lengths, lengths))[1]


def add_records_reference(
    state: jax.Array, x: jax.Array, exponents: jax.Array, B: jax.Array, lengths: jax.Array
) -> jax.Array:
    """The state after each row's first `lengths` records, one after another: S' = exp(exponent_j) S + x_j B_j^T.

    Args:
        state: float32[B, M, P, R]. x: [B, S, M, P]. exponents: [B, S, M] logarithms of the decays. B: [B, S, G, R].
    """
    B = jnp.repeat(B, x.shape[2] // B.shape[2], axis=2)

    def record(state: jax.Array, slot: tuple):
        place, *parts = slot
        x, exponents, B = (part.astype(jnp.float32) for part in parts)
        new = jnp.exp(exponents)[..., None, None] * state + x[..., None] * B[:, :, None]
        return jnp.where((place < lengths)[:, None, None, None], new, state), None

    slots = (jnp.arange(x.shape[1]), *(jnp.moveaxis(part, 1, 0) for part in (x, exponents, B)))
    return jax.lax.scan(record, state, slots)[0]


def fold_frames_reference(
    arrays: FoldFrames, *, records: RecordSizes, per_layer: int, scaled: bool
):
    """Folds one row and one layer after another."""
    lengths, xB, dt, A, arena, read, write, exists = arrays
    for row in range(read.shape[0]):
        for layer in range(A.shape[0]):
            own = slice(layer * per_layer, (layer + 1) * per_layer)
            one = slice(row, row + 1)
            old = read_states(arena, read[one, own], exists[one], records)
            x, B = split_records(xB[layer, one], records)
            length = jnp.maximum(lengths[one], 0)
            steps = dt[layer, one]
            if scaled:
                new = fold_reference(Fold(x, steps, A[layer], B, old, length))
            else:
                new = add_records_reference(old, x, steps * A[layer], B, length)
            folded = write_states(arena, write[one, own], new, records)
            arena = jnp.where(lengths[row] >= 0, folded, arena)
    return arena

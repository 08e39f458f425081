"""The definitions, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import BITS, FLAGS, FLOAT32, FLOATS, INTS, WORDS
from pallas_kernels.causal_conv.reference import of_length_one
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.operands import stored
from pallas_kernels.records import RecordSizes, read_states, split_records, write_states
from pallas_kernels.ssd_window.reference import add_records_reference, visible


class DeltaScan(NamedTuple):
    """Arrays of `api.gated_delta_scan`, which fills in the last three."""

    q: Annotated[jax.Array, FLOATS, "B T G R"]
    k: Annotated[jax.Array, FLOATS, "B T G R"]
    v: Annotated[jax.Array, FLOATS, "B T M P"]
    log_decay: Annotated[jax.Array, FLOATS, "B T M"]
    beta: Annotated[jax.Array, FLOATS, "B T M"]
    initial_state: Annotated[jax.Array | None, FLOATS, "None B M P R"]
    lengths: Annotated[jax.Array | None, INTS, "None B"]
    state_lengths: Annotated[jax.Array | None, INTS, "None B"]


class DeltaScanFrames(NamedTuple):
    """Arrays of `api.gated_delta_scan_frames`.

    Attributes:
        vkq: [B, T, E] outputs of the convolution, v [M P] | k [G R] | q [G R]; k and q of any length.
        dt: float32[B, T, M] step sizes. A: float32[M] rates of decay, negative; dt A is the logarithm of a decay.
        projected: [B, T, columns] of which the last M are b, the logits of the rates of writing; the others are not
            read.
        arena: uint32[U, W]; a frame holds W // (P R) whole heads of float32 bits, [h, P, R].
        read, write: int32[B, F] frames of each row's first and last checkpoint, the same or others.
        exists: bool[B]; where false the first state is zero, whatever its frames hold.
        lengths, state_lengths: int32[B] tokens of each row, and those after which the last checkpoint stands.
    """

    vkq: Annotated[jax.Array, FLOATS, "B T E"]
    dt: Annotated[jax.Array, FLOAT32, "B T M"]
    A: Annotated[jax.Array, FLOAT32, "M"]
    projected: Annotated[jax.Array, FLOATS, "B T columns"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    read: Annotated[jax.Array, INTS, "B F"]
    write: Annotated[jax.Array, INTS, "B F"]
    exists: Annotated[jax.Array, FLAGS, "B"]
    lengths: Annotated[jax.Array, INTS, "B"]
    state_lengths: Annotated[jax.Array, INTS, "B"]


class DeltaWindow(NamedTuple):
    """Arrays of `api.gated_delta_window_frames`.

    Attributes:
        q: [B, T, G, R], v: [B, T, M, P], beta: float32[B, T, M] of the new tokens.
        u: [B, S, M, P] ring records; those of new tokens do not matter.
        k: [B, S, G, R], log_decay: float32[B, S, M] ring records, with those of the new tokens.
        arena: uint32[U, W] frames; a frame holds W // (P R) whole heads of float32 bits, [h, P, R].
        frames: int32[B, F] frames of each row's state, in the order of its heads; the last one may be partly empty.
        exists: bool[B]; where false the state is zero, and what its frames hold does not matter.
        starts: int32[B] slot of the first token of the window.
        num_known, num_valid: int32[B]. The first `num_known` tokens of the window have their u in the ring already;
            the tokens from there to `num_valid` are new. starts + num_valid is at most S.
        ancestors: int32[B, T] of a tree of new tokens, as in `ssd_window.WindowFrames`; None for a chain.
    """

    q: Annotated[jax.Array, FLOATS, "B T G R"]
    v: Annotated[jax.Array, FLOATS, "B T M P"]
    beta: Annotated[jax.Array, FLOAT32, "B T M"]
    u: Annotated[jax.Array, FLOATS, "B S M P"]
    k: Annotated[jax.Array, FLOATS, "B S G R"]
    log_decay: Annotated[jax.Array, FLOAT32, "B S M"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    frames: Annotated[jax.Array, INTS, "B F"]
    exists: Annotated[jax.Array, FLAGS, "B"]
    starts: Annotated[jax.Array, INTS, "B"]
    num_known: Annotated[jax.Array, INTS, "B"]
    num_valid: Annotated[jax.Array, INTS, "B"]
    ancestors: Annotated[jax.Array | None, INTS, "None B T"] = None


class DeltaRings(NamedTuple):
    """Arrays of `api.gated_delta_window_rings`.

    Attributes:
        q: [B, T, G R], v: [B, T, M P], beta: float32[B, T, M] of the new tokens.
        scores: float32[B, 2, T, G, S] k_t . k and q_t . k of every token and slot, as `causal_conv_window` leaves them;
            those of slots that a token does not see do not matter.
        uk: [L, B', S, M P + G R] rings of all layers, B' >= B, with the k of the new tokens; floats, or their bits as
            unsigned integers.
        dt: float32[L, B', S, M] rings of the step sizes.
        A: float32[L, M] decay rates of all layers; the logarithm of a decay is dt A.
        frames: int32[B, F] frames of whole checkpoints.
        arena, exists, starts, num_known, num_valid, ancestors: as in `DeltaWindow`.
    """

    q: Annotated[jax.Array, FLOATS, "B T GR"]
    v: Annotated[jax.Array, FLOATS, "B T MP"]
    beta: Annotated[jax.Array, FLOAT32, "B T M"]
    scores: Annotated[jax.Array, FLOAT32, "B 2 T G S"]
    uk: Annotated[jax.Array, FLOATS + BITS, "L rows S record"]
    dt: Annotated[jax.Array, FLOAT32, "L rows S M"]
    A: Annotated[jax.Array, FLOAT32, "L M"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    frames: Annotated[jax.Array, INTS, "B F"]
    exists: Annotated[jax.Array, FLAGS, "B"]
    starts: Annotated[jax.Array, INTS, "B"]
    num_known: Annotated[jax.Array, INTS, "B"]
    num_valid: Annotated[jax.Array, INTS, "B"]
    ancestors: Annotated[jax.Array | None, INTS, "None B T"] = None


class DeltaFold(NamedTuple):
    """Arrays of `api.gated_delta_fold`, which fills in `lengths`."""

    u: Annotated[jax.Array, FLOATS, "B S M P"]
    k: Annotated[jax.Array, FLOATS, "B S G R"]
    log_decay: Annotated[jax.Array, FLOATS, "B S M"]
    state: Annotated[jax.Array, FLOAT32, "B M P R"]
    lengths: Annotated[jax.Array | None, INTS, "None B"]


def gated_delta_scan_reference(arrays: DeltaScan):
    """See `api.gated_delta_scan`; one token after another."""
    q, k, v, log_decay, beta, initial_state, lengths, state_lengths = arrays
    per_group = v.shape[2] // k.shape[2]
    positions = jnp.arange(v.shape[1])
    q, k = (jnp.repeat(x, per_group, axis=2).astype(jnp.float32) for x in (q, k))

    def step(carry: tuple, token: tuple):
        state, kept = carry
        t, q, k, v, log_decay, beta = token
        new, u = _updated(state, k, v, log_decay, beta)
        valid = (t < lengths)[:, None, None]
        state = jnp.where(valid[..., None], new, state)
        kept = jnp.where((t < state_lengths)[:, None, None, None], state, kept)
        y = jnp.einsum("bmpr,bmr->bmp", state, q, precision=HIGHEST)
        return (state, kept), (jnp.where(valid, y, 0), jnp.where(valid, u, 0))

    tokens = (positions, *(jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta)))
    (_, kept), (y, u) = jax.lax.scan(step, (initial_state, initial_state), tokens)
    return jnp.moveaxis(y, 0, 1).astype(v.dtype), jnp.moveaxis(u, 0, 1), kept


def gated_delta_scan_frames_reference(
    arrays: DeltaScanFrames,
    *,
    records: RecordSizes,
    first_frame: int,
    scan: Callable = gated_delta_scan_reference,
):
    """Reads all states, scans, and writes all states."""
    vkq, dt, A, projected, arena, read, write, exists, lengths, state_lengths = arrays
    lead, heads = vkq.shape[:2], records.num_heads
    valid = (jnp.arange(lead[1]) < lengths[:, None])[..., None]
    vkq, dt, b = (jnp.where(valid, x, 0) for x in (vkq, dt, projected[..., -heads:]))
    v, k, q = jnp.split(vkq, [records.inner_size, records.record_size], axis=-1)
    k, q = (of_length_one(x.reshape(*lead, records.num_groups, records.state_size)) for x in (k, q))
    k, q = k.astype(vkq.dtype), q * records.state_size**-0.5
    per_layer = -(-heads // records.per_frame(arena))
    read, write = (a[:, first_frame : first_frame + per_layer] for a in (read, write))
    state = read_states(arena, read, exists, records)
    v = v.reshape(*lead, heads, records.head_dim).astype(jnp.float32)
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    y, u, state = scan(DeltaScan(q, k, v, dt * A, beta, state, lengths, state_lengths))
    ukq = jnp.concatenate([x.reshape(*lead, -1).astype(vkq.dtype) for x in (u, k, q)], axis=-1)
    y = y.reshape(*lead, -1).astype(vkq.dtype)
    return y, ukq, write_states(arena, write, state, records)


def gated_delta_window_frames_reference(arrays: DeltaWindow):
    """Gathers the states, and runs the recurrence over the ring for each new token, by the records that it sees."""
    q, v, beta, u, k, log_decay, arena, frames, exists, starts, known, valid, ancestors = arrays
    tokens, (slots, groups) = q.shape[1], k.shape[1:3]
    first = read_states(arena, frames, exists, RecordSizes.of(u, k))
    q, k = (jnp.repeat(x, v.shape[2] // groups, axis=2).astype(jnp.float32) for x in (q, k))
    number = jnp.arange(slots) - starts[:, None]  # [B, S] of the token of the window at a slot
    at_slot = jnp.clip(number, 0, tokens - 1)
    v, beta = (
        jnp.take_along_axis(x, at_slot.reshape(*at_slot.shape, *(1,) * (x.ndim - 2)), axis=1)
        for x in (v, beta)
    )
    seen = visible(starts, tokens, slots, ancestors) & (number < valid[:, None])[:, None]

    def record(carry: tuple, slot: tuple):
        state, _ = carry
        u, v, k, log_decay, beta, known, seen = slot
        _, made = _updated(state, k, v, log_decay, beta)
        made = jnp.where(known[:, None, None], u, made.astype(u.dtype))
        decayed = jnp.exp(log_decay)[..., None, None] * state
        new = decayed + made.astype(jnp.float32)[..., None] * k[:, :, None]
        return jax.tree.map(
            lambda new, old: jnp.where(seen.reshape(-1, *(1,) * (new.ndim - 1)), new, old),
            *((new, made), carry),
        ), None

    def token(inputs: tuple):
        q_t, seen_t = inputs
        per_slot = (u, v, k, log_decay, beta, number < known[:, None], seen_t)
        by_slot = [jnp.moveaxis(x, 1, 0) for x in per_slot]
        (state, made), _ = jax.lax.scan(record, (first, jnp.zeros_like(u[:, 0])), by_slot)
        return jnp.einsum("bmpr,bmr->bmp", state, q_t, precision=HIGHEST), made

    made = jax.lax.map(token, (jnp.moveaxis(q, 1, 0), jnp.moveaxis(seen, 1, 0)))
    counts = (jnp.arange(tokens) < valid[:, None])[..., None, None]
    y, made = (jnp.where(counts, jnp.moveaxis(x, 0, 1), 0) for x in made)
    return y, made, arena


def gated_delta_window_rings_reference(
    arrays: DeltaRings,
    *,
    layer: int,
    first_frame: int,
    records: RecordSizes,
    dtype: jnp.dtype,
):
    """Cuts the layer's records out of the rings and asks the window over frames; makes its own scores."""
    q, v, beta, _, uk, dt, A, arena, frames, exists, starts, known, valid, ancestors = arrays
    (rows, tokens, _), slots = q.shape, uk.shape[2]
    u, k = split_records(uk[layer, :rows], records)
    per_layer = -(-records.num_heads // records.per_frame(arena))
    y, made, _ = gated_delta_window_frames_reference(
        DeltaWindow(
            q=q.reshape(rows, tokens, *k.shape[2:]),
            v=v.reshape(rows, tokens, *u.shape[2:]),
            beta=beta,
            u=u,
            k=k,
            log_decay=dt[layer, :rows] * A[layer],
            arena=arena,
            frames=frames[:, first_frame : first_frame + per_layer],
            exists=exists,
            starts=starts,
            num_known=known,
            num_valid=valid,
            ancestors=ancestors,
        )
    )
    token = jnp.arange(tokens)
    new = (token >= known[:, None]) & (token < valid[:, None])  # [B, T]
    own = new[:, None] & (jnp.arange(slots)[:, None] == (starts[:, None] + token)[:, None])
    made = jnp.take_along_axis(made, own.argmax(2)[..., None, None], axis=1)  # [B, S, M, P]
    made = stored(made.reshape(rows, slots, -1), uk.dtype)
    old = uk[layer, :rows, :, : records.inner_size]
    uk = uk.at[layer, :rows, :, : records.inner_size].set(
        jnp.where(own.any(2)[..., None], made, old)
    )
    return jnp.where(new[..., None, None], y, 0).astype(dtype), uk


def gated_delta_fold_reference(arrays: DeltaFold):
    """See `api.gated_delta_fold`; one record after another."""
    u, k, log_decay, state, lengths = arrays
    return add_records_reference(state, u, log_decay, k, lengths)


def _updated(
    state: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The state [B, M, P, R] after a token with k [B, M, R], v [B, M, P], log_decay and beta [B, M]; and u."""
    decayed = jnp.exp(log_decay.astype(jnp.float32))[..., None, None] * state
    seen = jnp.einsum("bmpr,bmr->bmp", decayed, k, precision=HIGHEST)
    u = beta.astype(jnp.float32)[..., None] * (v.astype(jnp.float32) - seen)
    return decayed + u[..., None] * k[:, :, None], u

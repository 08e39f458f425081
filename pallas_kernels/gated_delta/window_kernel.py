"""Windows of the gated delta rule on a GPU: every state is read once, from the frame it lies in.

A program is one warp, with some channels of a head's state in registers, as in `ssd_window`: bound by reading states.
A channel of what a token writes depends on that channel alone, so no program waits for another.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.decay import coarse_and_fine, lags
from pallas_kernels.gated_delta.reference import DeltaRings
from pallas_kernels.operands import stored, widen
from pallas_kernels.plan import over_limit
from pallas_kernels.records import RecordSizes, state_words
from pallas_kernels.triton import Ref, call, cdiv, iota, load, power_of_two, store

LANES = 32  # columns of a state, a cache line, that are summed across threads; others within one
PER_WARP = 64 * 32  # elements of a state
MAX_SLOTS = 128  # running sums of `decay.coarse_and_fine` are exact to there


@dataclass(frozen=True)
class Config:
    """Launch parameters: warps of a program, and channels of a head's state that it has."""

    channels: int
    num_warps: int = 1

    @classmethod
    def of_window(cls, records: RecordSizes) -> Config:
        """64 elements of a state in each thread of one warp."""
        channels = max(1, PER_WARP // power_of_two(records.state_size))
        return cls(min(channels, power_of_two(records.head_dim)))


def why_unsupported(records: RecordSizes, slots: int) -> str | None:
    """Why the kernel cannot take these shapes, or None."""
    reason = over_limit(("a ring must have at most {} slots", MAX_SLOTS, slots))
    return reason or records.why_unsupported()


def _window_kernel(
    arena_ref: Ref,  # [U, W] uint32
    frames_ref: Ref,  # [B, n]
    exists_ref: Ref,  # [B]
    dt_ref: Ref,  # [L, B', S, M]
    A_ref: Ref,  # [L, M]
    q_ref: Ref,  # [B, T, G R]
    v_ref: Ref,  # [B, T, M P]
    beta_ref: Ref,  # [B, T, M]
    scores_ref: Ref,  # [B, 2, T, G, S]
    starts_ref: Ref,  # [B]
    known_ref: Ref,  # [B]
    valid_ref: Ref,  # [B]
    ancestors_ref: Ref,  # [B, T]
    uk_ref: Ref,  # [L, B', S, M P + G R]
    y_ref: Ref,  # [B, T, M P]
    *,
    layer: int,
    first_frame: int,
    records: RecordSizes,
    per_frame: int,
    channels: int,
    tree: bool,
):
    """`channels` of one head's outputs, and of what its tokens write."""
    row, head = pl.program_id(0), pl.program_id(1)
    group = head // (records.num_heads // records.num_groups)
    start, tokens = starts_ref[row], y_ref.shape[1]
    first, count = jnp.maximum(known_ref[row], 0), jnp.minimum(valid_ref[row], tokens)
    slot = iota(uk_ref.shape[2], 0, 2)  # [S, 1]
    p = pl.program_id(2) * channels + iota(channels)
    lane = iota(min(records.state_size, LANES))
    inside = p < records.head_dim
    column = head * records.head_dim + p
    frame = frames_ref[row, first_frame + head // per_frame]
    live = first < count
    there = (exists_ref[row] > 0) & live

    def columns_of_state(begin: int):
        words, held = state_words(records, head % per_frame, p[:, None], begin + lane[None, :])
        return widen(load(arena_ref, frame, words, mask=held & there))

    # Loaded once, before the loop over tokens. A row without a checkpoint, or without new tokens, reads none.
    state = [columns_of_state(begin) for begin in range(0, records.state_size, LANES)]
    # What tokens wrote before the first new one; what is loaded of other slots, which may hold anything, is zero.
    made = live & (slot < start + first) & inside[None, :]
    u = widen(load(uk_ref, layer, row, slot, column[None, :], mask=made))  # [S, P]
    dt = load(dt_ref, layer, row, slot, head, mask=live & (slot < start + count))  # [S, 1]
    decays = coarse_and_fine(dt * A_ref[layer, head])

    def token(t: jax.Array, u: jax.Array):
        # A token sees what was there before the window, and the tokens before it; in a tree, its ancestors.
        seen = slot <= start + t
        if tree:
            bits = ancestors_ref[row, t] >> jnp.clip(slot - start, 0, 31)
            seen = (slot < start) | (seen & (bits & 1 > 0))
        totals, lag = lags([jnp.where(seen, part, 0.0) for part in decays])
        before, kept = seen & (slot != start + t), jnp.exp(totals[0] + totals[1])
        between = jnp.where(before, jnp.exp(lag), 0.0)

        def read(which: int, *vector: Ref | jax.Array | int):
            """What k, or q, reads in the state and in what was written before the token.

            By columns of a cache line: products add up within a thread, and across threads only once.
            """
            products = []
            for i, columns in enumerate(state):
                r = i * LANES + lane
                *place, first = vector
                own = load(
                    *place, first + group * records.state_size + r, mask=r < records.state_size
                )
                products.append(columns * widen(own)[None, :])
            of_state = jnp.sum(functools.reduce(jnp.add, products), axis=1)
            scores = load(scores_ref, row, which, t, group, slot, mask=before)
            return kept * of_state + jnp.sum(between * scores * u, axis=0)

        beta = beta_ref[row, t, head]
        v = widen(load(v_ref, row, t, column, mask=inside))
        # Rounded as the ring keeps it before anything reads it: a later window gets the same numbers.
        known = read(0, uk_ref, layer, row, start + t, records.inner_size)
        new = stored(beta * (v - known), uk_ref.dtype)
        store(uk_ref, layer, row, start + t, column, value=new, mask=inside)
        new = widen(new)
        y = read(1, q_ref, row, t, 0) + scores_ref[row, 1, t, group, start + t] * new
        store(y_ref, row, t, column, value=y, mask=inside)
        return jnp.where(slot == start + t, new[None, :], u)

    def blank(t: jax.Array, _: None):
        store(y_ref, row, t, column, value=jnp.zeros(p.shape, jnp.float32), mask=inside)

    # Tokens that do not count become zero, so that no padding reaches the next layer as NaN.
    jax.lax.fori_loop(0, jnp.minimum(first, tokens), blank, None)
    jax.lax.fori_loop(first, count, token, u)
    jax.lax.fori_loop(jnp.maximum(count, 0), tokens, blank, None)


def gated_delta_window_rings_pallas(
    arrays: DeltaRings,
    *,
    layer: int,
    first_frame: int,
    records: RecordSizes,
    dtype: jnp.dtype,
    config: Config | None = None,
):
    """See `api.gated_delta_window_rings`."""
    q, v, beta, scores, uk, dt, A, arena, frames, exists, starts, known, valid, ancestors = arrays
    rows, tokens, _ = q.shape
    config = config or Config.of_window(records)
    tree = ancestors is not None
    ancestors = ancestors if tree else jnp.zeros((1, 1), jnp.int32)
    uk, y = call(
        _window_kernel,
        *(arena, frames, exists.astype(jnp.int32), dt, A, q, v, beta, scores),
        *(starts, known, valid, ancestors, uk),
        grid=(rows, records.num_heads, cdiv(records.head_dim, config.channels)),
        outputs=[13, jax.ShapeDtypeStruct((rows, tokens, records.inner_size), dtype)],
        name="gated_delta_window",
        num_warps=config.num_warps,
        num_stages=1,
        layer=layer,
        first_frame=first_frame,
        records=records,
        per_frame=records.per_frame(arena),
        channels=config.channels,
        tree=tree,
    )
    return y.reshape(rows, tokens, records.num_heads, records.head_dim), uk

"""Window and fold on a GPU: one program per head, which reads its state once, from the frame it lies in.

Both are bound by reading states (32 KB a head of 64 x 128), so products are sums over registers, in float32
and without tensor cores: what a window of 16 tokens computes still hides behind the read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.bits import stored, widen
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.records import Records, split_records, state_words
from pallas_kernels.triton import call, coarse_and_fine, line, load, store

MAX_SLOTS = 128  # running sums of `decay.running_decay` are exact to there


@dataclass(frozen=True)
class Config:
    """Launch parameters."""

    num_warps: int = 4
    num_stages: int = 1

    @classmethod
    def of(cls, records: Records) -> Config:
        """64 elements of a state in each thread, as 4 warps have of 64 x 128: 3 to 4 programs then fit on an SM."""
        return cls(num_warps=max(4, records.state_elements // (64 * 32)))


def why_unsupported(records: Records, slots: int) -> str | None:
    """Why the kernels cannot take these shapes, or None."""
    if slots > MAX_SLOTS:
        return f"a ring must have at most {MAX_SLOTS} slots for 'pallas', got {slots}; use 'xla'"
    return records.why_unsupported()


def _window_kernel(
    arena_ref,  # [U, W] uint32
    frames_ref,  # [B, n]
    exists_ref,  # [B]
    xB_ref,  # [L, B', S, M P + G R]
    dt_ref,  # [L, B', S, M]
    A_ref,  # [L, M]
    C_ref,  # [B, T, G R]
    scores_ref,  # [B, T, G, S]
    D_ref,  # [M]
    starts_ref,  # [B]
    valid_ref,  # [B]
    ancestors_ref,  # [B, T]
    y_ref,  # [B, T, M P]
    *,
    layer: int,
    first_frame: int,
    records: Records,
    per_frame: int,
    tree: bool,
    skips: bool,
):
    row, head = pl.program_id(0), pl.program_id(1)
    group = head // (records.num_heads // records.num_groups)
    start, count = starts_ref[row], valid_ref[row]
    slot = line(xB_ref.shape[2], 0, 2)  # [S, 1]
    p, r = line(records.head_dim), line(records.state_size)
    inside = p < records.head_dim
    column = head * records.head_dim + p

    words, held = state_words(records, head % per_frame, p[:, None], r[None, :])
    held &= (exists_ref[row] > 0) & (count > 0)
    state = widen(
        load(arena_ref, frames_ref[row, first_frame + head // per_frame], words, mask=held)
    )
    live = slot < start + count
    x = load(xB_ref, layer, row, slot, column[None, :], mask=live & inside[None, :])
    x, dt = widen(x), load(dt_ref, layer, row, slot, head, mask=live)  # [S, P], [S, 1]
    coarse, fine = coarse_and_fine(dt * A_ref[layer, head])

    def query(t, _):
        in_group = r < records.state_size
        C = load(C_ref, row, t, group * records.state_size + r, mask=in_group)
        C = widen(C)[None, :]
        seen = slot <= start + t
        if tree:
            bits = ancestors_ref[row, t] >> jnp.clip(slot - start, 0, 31)
            seen = (slot < start) | (seen & (bits & 1 > 0))
        parts = [jnp.where(seen, part, 0.0) for part in (coarse, fine)]
        totals = [jnp.sum(part) for part in parts]
        lag = sum(
            total - jnp.cumsum(part, axis=0) for total, part in zip(totals, parts, strict=True)
        )
        scores = load(scores_ref, row, t, group, slot, mask=seen)
        weights = jnp.where(seen, jnp.exp(lag) * dt * scores, 0.0)
        y = jnp.sum(weights * x, axis=0)
        y = y + jnp.exp(totals[0] + totals[1]) * jnp.sum(state * C, axis=1)
        if skips:
            skip = load(xB_ref, layer, row, start + t, column, mask=inside)
            y = y + D_ref[head] * widen(skip)
        store(y_ref, row, t, column, value=y, mask=inside)

    def blank(t, _):
        store(y_ref, row, t, column, value=jnp.zeros(p.shape, jnp.float32), mask=inside)

    jax.lax.fori_loop(0, count, query, None)
    jax.lax.fori_loop(count, y_ref.shape[1], blank, None)


def ssd_window_rings_pallas(
    arena,
    frames,
    exists,
    xB,
    dt,
    A,
    C,
    D,
    starts,
    num_valid,
    ancestors,
    scores,
    *,
    layer,
    first_frame,
    records: Records,
    dtype,
    config: Config | None = None,
):
    """See `api.ssd_window_rings`."""
    rows, tokens, _ = C.shape
    config = config or Config.of(records)
    tree, skips = ancestors is not None, D is not None
    kernel = functools.partial(
        _window_kernel,
        layer=layer,
        first_frame=first_frame,
        records=records,
        per_frame=records.per_frame(arena),
        tree=tree,
        skips=skips,
    )
    ancestors = ancestors if tree else jnp.zeros((1, 1), jnp.int32)
    D = D if skips else A[layer]
    if scores is None:
        scores = _scores(C, xB[layer, :rows], records)
    y = call(
        kernel,
        *(arena, frames, exists.astype(jnp.int32), xB, dt, A, C, scores, D),
        *(starts, num_valid, ancestors),
        grid=(rows, records.num_heads),
        out_shape=jax.ShapeDtypeStruct((rows, tokens, records.inner_size), dtype),
        name="ssd_window",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y.reshape(rows, tokens, records.num_heads, records.head_dim)


def _scores(C, xB, records: Records):
    """C . B of every query and slot, float32[B, T, G, S]."""
    _, B = split_records(xB, records)
    C = C.reshape(*C.shape[:2], *B.shape[2:])
    product = functools.partial(jnp.einsum, precision=HIGHEST)
    return product("btgr,bsgr->btgs", C.astype(jnp.float32), B.astype(jnp.float32))


def _fold_kernel(
    arena_in_ref,  # [U, W], the same memory as arena_ref
    read_ref,  # [B, F]
    write_ref,  # [B, F]
    exists_ref,  # [B]
    lengths_ref,  # [B]
    xB_ref,  # [L, B', S, M P + G R]
    dt_ref,  # [L, B', S, M]
    A_ref,  # [L, M]
    arena_ref,
    *,
    records: Records,
    per_frame: int,
    per_layer: int,
):
    layer, head = pl.program_id(0), pl.program_id(1)
    group = head // (records.num_heads // records.num_groups)
    frame = layer * per_layer + head // per_frame
    p, r = line(records.head_dim, 0, 2), line(records.state_size, 1, 2)
    words, held = state_words(records, head % per_frame, p, r)
    A = A_ref[layer, head]

    def fold_row(row, _):
        length = jnp.minimum(lengths_ref[row], xB_ref.shape[2])  # never past the row's ring

        @pl.when(length >= 0)
        def _():
            def add(step, carry):
                """One record, the last one first, so that what decays it is summed on the way."""
                added, lag = carry
                slot = length - 1 - step
                x = load(
                    xB_ref,
                    *(layer, row, slot, head * records.head_dim + p),
                    mask=p < records.head_dim,
                )
                B = load(
                    xB_ref,
                    *(layer, row, slot, records.inner_size + group * records.state_size + r),
                    mask=r < records.state_size,
                )
                dt = dt_ref[layer, row, slot, head]
                added = added + widen(x) * (dt * jnp.exp(lag)) * widen(B)
                return added, lag + dt * A

            start = (jnp.zeros(words.shape, jnp.float32), jnp.float32(0))
            added, lag = jax.lax.fori_loop(0, length, add, start)
            old = load(arena_ref, read_ref[row, frame], words, mask=held & (exists_ref[row] > 0))
            new = widen(old) * jnp.exp(lag) + added
            value = stored(new, jnp.uint32)
            store(arena_ref, write_ref[row, frame], words, value=value, mask=held)

    jax.lax.fori_loop(0, lengths_ref.shape[0], fold_row, None)


def fold_frames_pallas(
    arena,
    read,
    write,
    exists,
    lengths,
    xB,
    dt,
    A,
    *,
    records: Records,
    per_layer,
    config: Config | None = None,
):
    """See `api.fold_frames`. The grid walks over layers and heads; a program folds its head of one row after
    another, so a step in which no row folds costs no more than looking at their lengths."""
    config = config or Config.of(records)
    kernel = functools.partial(
        _fold_kernel,
        records=records,
        per_frame=records.per_frame(arena),
        per_layer=per_layer,
    )
    return call(
        kernel,
        *(arena, read, write, exists.astype(jnp.int32), lengths, xB, dt, A),
        grid=A.shape,
        out_shape=jax.ShapeDtypeStruct(arena.shape, arena.dtype),
        name="ssd_fold",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={0: 0},
    )


def _joined(x, B):
    """x [B, S, M, P] and B [B, S, G, R] as a ring of one layer."""
    lead = x.shape[:2]
    parts = (x.reshape(*lead, -1), B.astype(x.dtype).reshape(*lead, -1))
    return jnp.concatenate(parts, axis=-1)[None]


def _in_frames(state):
    """state [B, M, P, R] as an arena with a frame per head, and the frames int32[B, M]."""
    rows, heads = state.shape[:2]
    arena = jax.lax.bitcast_convert_type(state, jnp.uint32).reshape(rows * heads, -1)
    return arena, jnp.arange(rows * heads, dtype=jnp.int32).reshape(rows, heads)


def ssd_window_frames_pallas(arena, frames, exists, x, dt, A, B, C, starts, num_valid, ancestors):
    """See `api.ssd_window_frames`: records that do not lie in rings are joined first."""
    records = Records.of(x, B)
    y = ssd_window_rings_pallas(
        *(arena, frames, exists, _joined(x, B), dt[None], A[None]),
        C.reshape(*C.shape[:2], -1),
        *(None, starts, num_valid, ancestors, None),
        layer=0,
        first_frame=0,
        records=records,
        dtype=jnp.float32,
    )
    return y, arena


def ssd_window_pallas(state, x, dt, A, B, C, starts, num_valid, ancestors):
    """See `api.ssd_window`."""
    arena, frames = _in_frames(state)
    exists = jnp.ones(state.shape[0], jnp.int32)
    return ssd_window_frames_pallas(
        arena, frames, exists, x, dt, A, B, C, starts, num_valid, ancestors
    )[0]


def fold_pallas(state, x, dt, A, B, lengths):
    """See `api.fold`."""
    arena, frames = _in_frames(state)
    exists = jnp.ones(state.shape[0], jnp.int32)
    arena = fold_frames_pallas(
        *(arena, frames, frames, exists, lengths, _joined(x, B), dt[None], A[None]),
        records=Records.of(x, B),
        per_layer=state.shape[1],
    )
    return jax.lax.bitcast_convert_type(arena, jnp.float32).reshape(state.shape)

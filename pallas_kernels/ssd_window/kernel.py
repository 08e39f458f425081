"""Window and fold on a GPU: every state is read once, from the frame it lies in.

Both are bound by reading states (32 KB a head of 64 x 128). A window takes a state in parts of some channels, each
a program of one warp, so that many read while others compute; its products are sums over registers, in float32 and
without tensor cores. A fold adds the records of a ring as one product on tensor cores.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.decay import coarse_and_fine, lags
from pallas_kernels.operands import floats, stored, widen
from pallas_kernels.plan import over_limit
from pallas_kernels.records import RecordSizes, state_words
from pallas_kernels.ssd_window.reference import FoldFrames, WindowRings, WindowScores
from pallas_kernels.triton import Ref, call, cdiv, dot, iota, load, power_of_two, store

NUM_PIECES = 3  # of bfloat16, with 8 bits each of a float32's 24
LEAST_SIDE = 16  # of a product on tensor cores
PROGRAMS_OF_A_HEAD = 4  # that fold rows at the same time
LANES = 32  # columns of a state, a cache line, that are summed across threads; others within one
PER_WARP = 64 * 32  # elements of a state
MOST_FOLDED = (
    128 * 128
)  # elements of a state that a program of a fold has; registers spill with twice as many
SCORED_SLOTS = 8  # B of 256 columns: 64 registers of each thread of a warp
MAX_SLOTS = 128  # running sums of `decay.running_decay` are exact to there


@dataclass(frozen=True)
class Config:
    """Launch parameters.

    Attributes:
        num_warps: of a program. channels: of a head's state that one program has.
    """

    num_warps: int
    num_stages: int = 1
    channels: int = 0

    @classmethod
    def of_window(cls, records: RecordSizes) -> Config:
        """64 elements of a state in each thread of one warp, which waits for no other: 16 programs fit on an SM."""
        channels = max(1, PER_WARP // power_of_two(records.state_size))
        return cls(num_warps=1, channels=min(channels, power_of_two(records.head_dim)))

    @classmethod
    def of_fold(cls, records: RecordSizes) -> Config:
        """As many for each thread of 4 to 8 warps: 3 programs of 64 x 128 fit on an SM."""
        elements = min(records.state_elements, MOST_FOLDED)
        channels = max(1, elements // power_of_two(records.state_size))
        return cls(num_warps=max(4, elements // PER_WARP), channels=channels)


def why_unsupported(records: RecordSizes, slots: int) -> str | None:
    """Why the kernels cannot take these shapes, or None."""
    reason = over_limit(("a ring must have at most {} slots", MAX_SLOTS, slots))
    return reason or records.why_unsupported()


def _window_kernel(
    arena_ref: Ref,  # [U, W] uint32
    frames_ref: Ref,  # [B, n]
    exists_ref: Ref,  # [B]
    xB_ref: Ref,  # [L, B', S, M P + G R]
    dt_ref: Ref,  # [L, B', S, M]
    A_ref: Ref,  # [L, M]
    C_ref: Ref,  # [B, T, G R]
    scores_ref: Ref,  # [B, T, G, S]
    D_ref: Ref,  # [M]
    starts_ref: Ref,  # [B]
    valid_ref: Ref,  # [B]
    ancestors_ref: Ref,  # [B, T]
    y_ref: Ref,  # [B, T, M P]
    *,
    layer: int,
    first_frame: int,
    records: RecordSizes,
    per_frame: int,
    channels: int,
    tree: bool,
):
    """`channels` of one head's outputs."""
    row, head = pl.program_id(0), pl.program_id(1)
    group = head // (records.num_heads // records.num_groups)
    start, count = starts_ref[row], valid_ref[row]
    slot = iota(xB_ref.shape[2], 0, 2)  # [S, 1]
    p = pl.program_id(2) * channels + iota(channels)
    lane = iota(min(records.state_size, LANES))
    inside = p < records.head_dim
    column = head * records.head_dim + p
    frame = frames_ref[row, first_frame + head // per_frame]
    there = (exists_ref[row] > 0) & (count > 0)

    def columns_of_state(first: int):
        words, held = state_words(records, head % per_frame, p[:, None], first + lane[None, :])
        return widen(load(arena_ref, frame, words, mask=held & there))

    # The state is loaded once, before the loop over queries, and stays in registers: reading it is nearly all that a
    # window costs. A row without a checkpoint, or without new tokens, reads none.
    state = [columns_of_state(first) for first in range(0, records.state_size, LANES)]
    # Slots past the last new token may hold anything, NaN too: what is loaded there is zero.
    live = slot < start + count
    x = load(xB_ref, layer, row, slot, column[None, :], mask=live & inside[None, :])
    x, dt = widen(x), load(dt_ref, layer, row, slot, head, mask=live)  # [S, P], [S, 1]
    # Decays are sums in two parts: a difference of two plain running sums would lose digits where a head forgets
    # fast.
    decays = coarse_and_fine(dt * A_ref[layer, head])

    def query(t: jax.Array, _: None):
        # C times the state by columns of a cache line: the products add up within a thread, and across threads only
        # once.
        products = []
        for i, columns in enumerate(state):
            r = i * LANES + lane
            in_group = r < records.state_size
            C = load(C_ref, row, t, group * records.state_size + r, mask=in_group)
            products.append(columns * widen(C)[None, :])
        # Decay counts what a query sees and nothing else: in a tree the siblings between it and a record do not
        # exist for it.
        seen = slot <= start + t
        if tree:
            bits = ancestors_ref[row, t] >> jnp.clip(slot - start, 0, 31)
            seen = (slot < start) | (seen & (bits & 1 > 0))
        totals, lag = lags([jnp.where(seen, part, 0.0) for part in decays])
        scores = load(scores_ref, row, t, group, slot, mask=seen)
        # A slot that the query does not see must weigh nothing, whatever its step size is.
        weights = jnp.where(seen, jnp.exp(lag) * dt * scores, 0.0)
        y = jnp.sum(weights * x, axis=0)
        of_state = jnp.sum(functools.reduce(jnp.add, products), axis=1)
        y = y + jnp.exp(totals[0] + totals[1]) * of_state
        skip = load(xB_ref, layer, row, start + t, column, mask=inside)
        y = y + D_ref[head] * widen(skip)
        store(y_ref, row, t, column, value=y, mask=inside)

    def blank(t: jax.Array, _: None):
        store(y_ref, row, t, column, value=jnp.zeros(p.shape, jnp.float32), mask=inside)

    # Queries that do not count become zero, so that no padding reaches the next layer as NaN.
    jax.lax.fori_loop(0, count, query, None)
    jax.lax.fori_loop(count, y_ref.shape[1], blank, None)


def ssd_window_rings_pallas(
    arrays: WindowRings,
    *,
    layer: int,
    first_frame: int,
    records: RecordSizes,
    dtype: jnp.dtype,
    config: Config | None = None,
):
    """See `api.ssd_window_rings`."""
    C, xB, dt, A, D, scores, arena, frames, exists, starts, num_valid, ancestors = arrays
    rows, tokens, _ = C.shape
    config = config or Config.of_window(records)
    tree = ancestors is not None
    ancestors = ancestors if tree else jnp.zeros((1, 1), jnp.int32)
    (y,) = call(
        _window_kernel,
        *(arena, frames, exists.astype(jnp.int32), xB, dt, A, C, scores, D),
        *(starts, num_valid, ancestors),
        grid=(rows, records.num_heads, cdiv(records.head_dim, config.channels)),
        outputs=[jax.ShapeDtypeStruct((rows, tokens, records.inner_size), dtype)],
        name="ssd_window",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        layer=layer,
        first_frame=first_frame,
        records=records,
        per_frame=records.per_frame(arena),
        channels=config.channels,
        tree=tree,
    )
    return y.reshape(rows, tokens, records.num_heads, records.head_dim)


def _scores_kernel(
    C_ref: Ref,  # [B, T, G R]
    xB_ref: Ref,  # [L, B', S, M P + G R]
    starts_ref: Ref,  # [B]
    valid_ref: Ref,  # [B]
    scores_ref: Ref,  # [B, T, G, S]
    *,
    layer: int,
    records: RecordSizes,
    block_slots: int,
):
    """The scores of one group's C and of some slots."""
    row, group = pl.program_id(0), pl.program_id(1)
    slots, start, count = xB_ref.shape[2], starts_ref[row], valid_ref[row]
    slot = pl.program_id(2) * block_slots + iota(block_slots)
    r = iota(records.state_size)
    inside, own = r < records.state_size, group * records.state_size + r
    held = (slot < jnp.minimum(start + count, slots)) & (count > 0)
    column = records.inner_size + own[None, :]
    mask = held[:, None] & inside[None, :]
    B = widen(load(xB_ref, layer, row, slot[:, None], column, mask=mask))

    def query(t: jax.Array, _: None):
        C = widen(load(C_ref, row, t, own, mask=inside & (t < count)))
        scores = jnp.sum(B * C[None, :], axis=1)
        scores = jnp.where((t < count) & (slot <= start + t), scores, 0.0)
        store(scores_ref, row, t, group, slot, value=scores, mask=slot < slots)

    jax.lax.fori_loop(0, C_ref.shape[1], query, None)


def ssd_window_scores_pallas(
    arrays: WindowScores, *, layer: int, records: RecordSizes, block_slots: int = SCORED_SLOTS
):
    """See `api.ssd_window_scores`. A program holds B of some slots in registers, and takes all tokens through them."""
    C, xB, starts, num_valid = arrays
    (rows, tokens, _), slots = C.shape, xB.shape[2]
    shape = (rows, tokens, records.num_groups, slots)
    (scores,) = call(
        _scores_kernel,
        *(C, xB, starts, num_valid),
        grid=(rows, records.num_groups, cdiv(slots, block_slots)),
        outputs=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        name="ssd_window_scores",
        num_warps=1,
        layer=layer,
        records=records,
        block_slots=block_slots,
    )
    return scores


def _fold_kernel(
    read_ref: Ref,  # [B, F]
    write_ref: Ref,  # [B, F]
    exists_ref: Ref,  # [B]
    lengths_ref: Ref,  # [B]
    xB_ref: Ref,  # [L, B', S, M P + G R]
    dt_ref: Ref,  # [L, B', S, M]
    A_ref: Ref,  # [L, M]
    arena_ref: Ref,  # [U, W]
    *,
    records: RecordSizes,
    per_frame: int,
    per_layer: int,
    channels: int,
    scaled: bool,
):
    """Folds `channels` of one head in some of the rows that fold: every n-th, where n programs share them."""
    layer, head = pl.program_id(0), pl.program_id(1)
    blocks = cdiv(records.head_dim, channels)
    part, sharing = pl.program_id(2) // blocks, pl.num_programs(2) // blocks
    first = pl.program_id(2) % blocks * channels
    group = head // (records.num_heads // records.num_groups)
    frame = layer * per_layer + head // per_frame
    # At least 16 a side, for tensor cores; what is padding is loaded as zero.
    p, r = first + iota(max(channels, LEAST_SIDE)), iota(max(records.state_size, LEAST_SIDE))
    inside = p < jnp.minimum(first + channels, records.head_dim)
    slot = iota(max(xB_ref.shape[2], LEAST_SIDE), 0, 2)  # [S, 1]
    words, held = state_words(records, head % per_frame, p[:, None], r[None, :])
    held = held & inside[:, None]
    A = A_ref[layer, head]
    # Which rows fold is known on the device alone. A running count numbers them, and the programs of a head share
    # them: mostly none folds, and a program is done after this.
    row_of_all = iota(lengths_ref.shape[0])
    in_batch = row_of_all < lengths_ref.shape[0]
    folds = load(lengths_ref, row_of_all, mask=in_batch, other=-1) >= 0
    ended = jnp.cumsum(folds.astype(jnp.int32), axis=0)

    def fold_row(i: jax.Array, _: None):
        # The row of this number: as many rows lie before it as have a smaller count.
        row = jnp.sum((ended <= part + i * sharing) & in_batch, dtype=jnp.int32)
        live = slot < jnp.minimum(lengths_ref[row], xB_ref.shape[2])  # never past the row's ring
        columns = head * records.head_dim + p[None, :]
        x = load(xB_ref, layer, row, slot, columns, mask=live & inside[None, :])
        columns = records.inner_size + group * records.state_size + r[None, :]
        B = load(xB_ref, layer, row, slot, columns, mask=live & (r < records.state_size)[None, :])
        dt = load(dt_ref, layer, row, slot, head, mask=live)  # [S, 1]
        # The decay from each record to the end of the ring, by sums in two parts, as in a window.
        totals, lag = lags(coarse_and_fine(dt * A))
        # Scaled in float32 and split afterwards: rounded to bfloat16, a state would lose digits with every fold.
        x = widen(x) * (dt * jnp.exp(lag) if scaled else jnp.exp(lag))
        there = held & (exists_ref[row] > 0)
        added = _product(x, floats(B))
        # Read this late, it shares no registers with the product.
        old = widen(load(arena_ref, read_ref[row, frame], words, mask=there))
        new = old * jnp.exp(totals[0] + totals[1]) + added
        store(arena_ref, write_ref[row, frame], words, value=stored(new, jnp.uint32), mask=held)

    count = jnp.sum(folds, dtype=jnp.int32)
    jax.lax.fori_loop(0, cdiv(count - part, sharing), fold_row, None)


def _product(x: jax.Array, B: jax.Array):
    """x^T B in float32 on tensor cores, which take bfloat16: a float32 is the sum of three."""
    pieces = [
        (i, a, j, b) for i, a in enumerate(_bfloat16s(x)) for j, b in enumerate(_bfloat16s(B))
    ]
    products = [dot(a.T, b) for i, a, j, b in reversed(pieces) if i + j < NUM_PIECES]
    return sum(products[1:], products[0])  # the least first


def _bfloat16s(x: jax.Array) -> list[jax.Array]:
    """What adds up to x, the largest first."""
    if x.dtype == jnp.bfloat16:
        return [x]
    pieces = []
    for _ in range(NUM_PIECES):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        piece = jax.lax.bitcast_convert_type(bits, jnp.float32)
        pieces.append(piece.astype(jnp.bfloat16))
        x = x - piece
    return pieces


def fold_frames_pallas(
    arrays: FoldFrames,
    *,
    records: RecordSizes,
    per_layer: int,
    scaled: bool,
    config: Config | None = None,
):
    """See `api.fold_frames`. A few programs share a head of one layer, each with some of the rows that fold: a step in
    which no row folds costs no more than looking at their lengths."""
    lengths, xB, dt, A, arena, read, write, exists = arrays
    config = config or Config.of_fold(records)
    blocks = cdiv(records.head_dim, config.channels)
    (arena,) = call(
        _fold_kernel,
        *(arena, read, write, exists.astype(jnp.int32), lengths, xB, dt, A),
        grid=(*A.shape, min(lengths.shape[0], PROGRAMS_OF_A_HEAD) * blocks),
        outputs=[0],
        name="ssd_fold",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        records=records,
        per_frame=records.per_frame(arena),
        per_layer=per_layer,
        channels=config.channels,
        scaled=scaled,
    )
    return arena

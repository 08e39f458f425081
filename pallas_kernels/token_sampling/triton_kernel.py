"""Sampling in Triton: five launches, each row split among programs, and 1 to 4 walks over its logits.

1. `_maxima`: the largest logit of each part of a row, its token, and the maxima of small groups of tokens.
2. `_narrow`: where an edge can be. With top-k it is no lower than the k-th largest of the group maxima, since k tokens
   are at or above that. With top-p alone a walk sums the mass above 15 levels, and the edge is between two of them.
3. `_narrow_more`: finer levels between these, for a row that may have too many tokens there.
4. `_gather`: tokens that are surely kept are drawn from, each part by itself. Those near an edge become candidates.
5. `_choose`: one program a row finds the edges among the candidates, draws from what is left, and takes the best.

Rows that ask for less do less: a greedy row is done after the first launch, and one without edges skips the next two.
If there are more candidates than room, the last launch walks over the row itself, slowly.

Masses are integers, 2^-40 of the most likely token's, and so are counts. Their sums are exact, so tokens depend
neither on the order of sums nor on the order in which candidates are stored.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.jax_triton import call
from pallas_kernels.token_sampling.reference import SamplingArrays
from pallas_kernels.triton import cdiv, power_of_two

LEVELS = tl.constexpr(16)  # sums of mass: at or above 15 levels, and of all tokens
SLACK = tl.constexpr(2.0**-16)  # more than a float32 sum of masses can be wrong by, relatively
ONE = tl.constexpr(2.0**40)  # the mass of the most likely token
# A mass is stored in two words; the lower one has 30 bits.
LOW_BITS = tl.constexpr(30)
LOW_MASK = tl.constexpr(2**30 - 1)
LN2 = tl.constexpr(0.6931471805599453)
# More than rounding can be, where noise is compared with its bound.
BOUND_SLACK = tl.constexpr(1e-3)
BRANCHES = tl.constexpr(16)  # a search divides its range by


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes, in tokens, and warps of a program; all powers of two.

    Attributes:
        part: tokens of one program of all launches but the last.
        line, group: the maximum of a group is over `group` neighbours in each of a part's lines.
        piece: what a program that gathers takes at once. block: the same where tokens are chosen.
        room: candidates that are stored for a row.
        part_warps, gather_warps, choose_warps: of `_maxima` and `_narrow`, of `_gather`, and of `_choose`.
    """

    part: int = 4096
    line: int = 1024
    group: int = 16
    piece: int = 512
    block: int = 1024
    room: int = 8192
    part_warps: int = 8
    gather_warps: int = 4
    choose_warps: int = 8

    def __post_init__(self):
        if self.part % self.line or self.part % self.piece or self.line % self.group:
            raise ValueError(
                "Config: line and piece must divide part, and group must divide line, got "
                f"{self.line}, {self.piece}, {self.part} and {self.group}"
            )


@triton.jit
def _row_of(logits: tl.tensor, row: tl.tensor, VOCAB: tl.constexpr):
    return logits + row.to(tl.int64) * VOCAB


@triton.jit
def _num_banned(banned: tl.tensor, row: tl.tensor, BANNED: tl.constexpr, BANNED_LINE: tl.constexpr):
    """Places up to the last that is used; hardly ever more than none."""
    place = tl.arange(0, BANNED_LINE)
    bans = tl.load(banned + row * BANNED + place, mask=place < BANNED, other=-1)
    return tl.max(tl.where(bans >= 0, place + 1, 0))


@triton.jit
def _allowed(
    x: tl.tensor,
    ids: tl.tensor,
    banned: tl.tensor,
    row: tl.tensor,
    num_banned: tl.tensor,
    BANNED: tl.constexpr,
):
    """The logits, -inf where they are NaN or their tokens banned."""
    x = tl.where(x > float("-inf"), x, float("-inf"))
    for i in range(num_banned):
        x = tl.where(ids == tl.load(banned + row * BANNED + i), float("-inf"), x)
    return x


@triton.jit
def _part(
    logits: tl.tensor,
    banned: tl.tensor,
    VOCAB: tl.constexpr,
    BANNED: tl.constexpr,
    BANNED_LINE: tl.constexpr,
    PART: tl.constexpr,
):
    """A program's tokens and their logits: [PART]."""
    part, row = tl.program_id(0), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    x = tl.load(_row_of(logits, row, VOCAB) + ids, mask=ids < VOCAB, other=float("-inf"))
    num_banned = _num_banned(banned, row, BANNED, BANNED_LINE)
    return ids, _allowed(x, ids, banned, row, num_banned, BANNED)


@triton.jit
def _top(values: tl.tensor, row: tl.tensor, PARTS: tl.constexpr, PARTS_LINE: tl.constexpr):
    """The row's largest logit."""
    part = tl.arange(0, PARTS_LINE)
    return tl.max(tl.load(values + row * PARTS + part, mask=part < PARTS, other=float("-inf")))


@triton.jit
def _scaled(x: tl.tensor, top: tl.tensor, temperature: tl.tensor, min_p: tl.tensor):
    """(x - top) / temperature, -inf below what min_p keeps."""
    floor = tl.where(min_p > 0, tl.log(min_p), float("-inf"))
    x = tl.div_rn(x - top, temperature)
    return tl.where(x >= floor, x, float("-inf"))


@triton.jit
def _sortable(x: tl.tensor):
    """See `numbers.sortable`."""
    bits = tl.where(x == 0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _mass(x: tl.tensor):
    return (tl.exp(x) * ONE).to(tl.int64)


@triton.jit
def _mix(x: tl.tensor):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _uniform(keys: tl.tensor, row: tl.tensor, ids: tl.tensor):
    """See `numbers.token_hash`, and the first half of `numbers.gumbel`."""
    low, high = tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
    bits = _mix(_mix(ids.to(tl.uint32) + low) ^ high)
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)


@triton.jit
def _gumbel(uniform: tl.tensor):
    """See `numbers.gumbel`. It is at most -log(uniform), and little less where it is large."""
    # log1p(-uniform), by what rounding 1 - uniform has changed.
    rest = 1 - uniform
    exact = tl.where(rest == 1, 1.0, tl.log(rest) / (rest - 1))
    return -tl.log(exact * uniform)


@triton.jit
def _first_best(values: tl.tensor, ids: tl.tensor, VOCAB: tl.constexpr):
    """The largest value and the first token that has it; VOCAB where all are -inf."""
    best = tl.max(values)
    none = best == float("-inf")
    return best, tl.where(none, VOCAB, tl.min(tl.where(values == best, ids, VOCAB)))


@triton.jit
def _maxima(
    logits: tl.tensor,  # [B, V]
    banned: tl.tensor,  # [B, n]
    values: tl.tensor,  # [B, parts] the largest logit
    tokens: tl.tensor,  # [B, parts] its first token
    groups: tl.tensor,  # [B, parts * PART_GROUPS] largest logits
    counts: tl.tensor,  # [B] candidates
    VOCAB: tl.constexpr,
    BANNED: tl.constexpr,
    BANNED_LINE: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    LINE: tl.constexpr,
    GROUP: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1)
    ids, x = _part(logits, banned, VOCAB, BANNED, BANNED_LINE, PART)
    value, token = _first_best(x, ids, VOCAB)
    tl.store(values + row * PARTS + part, value)
    tl.store(tokens + row * PARTS + part, token)
    PART_GROUPS: tl.constexpr = LINE // GROUP
    # Groups are of neighbours in each of several lines: the maxima over lines are taken within a thread.
    lines = tl.max(tl.reshape(x, [PART // LINE, LINE]), 0)
    maxima = tl.max(tl.reshape(lines, [PART_GROUPS, GROUP]), 1)
    place = (row * PARTS + part) * PART_GROUPS + tl.arange(0, PART_GROUPS)
    tl.store(groups + place, maxima)
    # Candidates are counted from zero; this launch is over before any is stored.
    if part == 0:
        tl.store(counts + row, 0)


@triton.jit
def _kth_largest(x: tl.tensor, k: tl.tensor):
    """Of k values or more: the largest that k of them reach. It is found bit by bit."""
    order = _sortable(x).to(tl.uint32, bitcast=True) ^ 0x80000000
    edge = tl.full([], 0, tl.uint32)
    for i in range(32):
        higher = edge | (tl.full([], 0x80000000, tl.uint32) >> i)
        edge = tl.where(tl.sum((order >= higher).to(tl.int32)) >= k, higher, edge)
    bits = (edge ^ 0x80000000).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _bracket(
    levels: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    p: tl.tensor,
    ROOM: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_LINE: tl.constexpr,
):
    """Levels that the edge of top-p is between, and whether there are few enough tokens there.

    Tokens below the first are left out; those at or above the second are surely kept.
    """
    part, level = tl.arange(0, PARTS_LINE), tl.arange(0, LEVELS)
    place = masses + (row * PARTS + part[:, None]) * LEVELS + level[None, :]
    above = tl.sum(tl.load(place, mask=(part < PARTS)[:, None], other=0.0), 0)
    edges = tl.load(levels + row * LEVELS + level)
    needed = p * tl.max(above)
    low = tl.max(tl.where(above >= needed * (1 + SLACK), edges, float("-inf")))
    high = tl.min(tl.where(above < needed * (1 - SLACK), edges, 1.0))
    # Each token weighs at least as much as its level. If all that may be kept are few, none is drawn from yet.
    heavy = tl.max(tl.where(edges == high, above, 0.0))
    light = tl.min(tl.where(edges == low, above, float("inf")))
    some = low > float("-inf")
    high = tl.where(some & (light <= ROOM * tl.exp(low)), 1.0, high)
    return low, high, some & (light - heavy <= ROOM * tl.exp(low))


@triton.jit
def _weigh(
    x: tl.tensor,
    edges: tl.tensor,
    levels: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    PARTS: tl.constexpr,
):
    """Stores the levels of a row, and the masses of a part that are at or above them."""
    part, level = tl.program_id(0), tl.arange(0, LEVELS)
    if part == 0:
        tl.store(levels + row * LEVELS + level, edges)
    weights = tl.exp(x)
    for i in tl.static_range(LEVELS):
        edge = tl.max(tl.where(level == i, edges, float("-inf")))
        above = tl.sum(tl.where(x >= edge, weights, 0.0))
        tl.store(masses + (row * PARTS + part) * LEVELS + i, above)


@triton.jit
def _narrow(
    logits: tl.tensor,  # [B, V]
    temperature: tl.tensor,  # [B]
    top_k: tl.tensor,  # [B]
    top_p: tl.tensor,  # [B]
    min_p: tl.tensor,  # [B]
    banned: tl.tensor,  # [B, n]
    values: tl.tensor,  # [B, parts]
    groups: tl.tensor,  # [B, GROUPS]
    bound: tl.tensor,  # [B] with top-k, a logit that its edge is not below
    levels: tl.tensor,  # [B, LEVELS] with top-p alone
    masses: tl.tensor,  # [B, parts, LEVELS] float32
    VOCAB: tl.constexpr,
    BANNED: tl.constexpr,
    BANNED_LINE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_LINE: tl.constexpr,
    PART: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_LINE: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1)
    t, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    by_count = (k > 0) & (k < VOCAB)
    # At least k tokens are as large as the k-th largest of the group maxima, so the edge of top-k is not below it.
    # One program a row finds it, without a walk.
    if (t > 0) & by_count & (part == 0):
        place = tl.arange(0, GROUPS_LINE)
        maxima = tl.load(groups + row * GROUPS + place, mask=place < GROUPS, other=float("-inf"))
        tl.store(bound + row, _kth_largest(maxima, k))
    if (t > 0) & (by_count == 0) & (p < 1):
        # Less than 1 - p of the mass is below the last level but one: V tokens, and the most likely one weighs 1.
        step = tl.log(VOCAB / (1 - p)) / (LEVELS - 1)
        level = tl.arange(0, LEVELS)
        edges = tl.where(level < LEVELS - 1, -step * (level + 1), float("-inf"))
        _, x = _part(logits, banned, VOCAB, BANNED, BANNED_LINE, PART)
        top = _top(values, row, PARTS, PARTS_LINE)
        _weigh(_scaled(x, top, t, tl.load(min_p + row)), edges, levels, masses, row, PARTS)


@triton.jit
def _narrow_more(
    logits: tl.tensor,  # [B, V]
    temperature: tl.tensor,  # [B]
    top_k: tl.tensor,  # [B]
    top_p: tl.tensor,  # [B]
    min_p: tl.tensor,  # [B]
    banned: tl.tensor,  # [B, n]
    values: tl.tensor,  # [B, parts]
    levels: tl.tensor,  # [B, LEVELS]
    masses: tl.tensor,  # [B, parts, LEVELS]
    is_finer: tl.tensor,  # [B] whether the next two hold something
    finer: tl.tensor,  # [B, LEVELS]
    finer_masses: tl.tensor,  # [B, parts, LEVELS]
    VOCAB: tl.constexpr,
    BANNED: tl.constexpr,
    BANNED_LINE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_LINE: tl.constexpr,
    PART: tl.constexpr,
    ROOM: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1)
    t, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    if (t > 0) & ((k <= 0) | (k >= VOCAB)) & (p < 1):
        # Finer levels only where too many tokens lie between two coarse ones: then another walk is cheaper than
        # candidates that do not fit.
        low, high, few = _bracket(levels, masses, row, p, ROOM, PARTS, PARTS_LINE)
        many = (few == 0) & (low > float("-inf"))
        if part == 0:
            tl.store(is_finer + row, many.to(tl.int32))
        if many:
            level = tl.arange(0, LEVELS)
            high = tl.minimum(high, 0.0)
            edges = high - (high - low) * (level * (1.0 / (LEVELS - 2)))
            edges = tl.where(level == LEVELS - 2, low, edges)
            edges = tl.where(level == LEVELS - 1, float("-inf"), edges)
            _, x = _part(logits, banned, VOCAB, BANNED, BANNED_LINE, PART)
            top = _top(values, row, PARTS, PARTS_LINE)
            x = _scaled(x, top, t, tl.load(min_p + row))
            _weigh(x, edges, finer, finer_masses, row, PARTS)


@triton.jit
def _store_mass(words: tl.tensor, mass: tl.tensor):
    tl.store(words, (mass >> LOW_BITS).to(tl.int32))
    tl.store(words + 1, (mass & LOW_MASK).to(tl.int32))


@triton.jit
def _load_mass(words: tl.tensor, mask: tl.tensor):
    """The sum of what `_store_mass` has stored."""
    upper = tl.sum(tl.load(words, mask=mask, other=0).to(tl.int64))
    return (upper << LOW_BITS) + tl.sum(tl.load(words + 1, mask=mask, other=0).to(tl.int64))


@triton.jit
def _reached(
    values: tl.tensor,
    largest: tl.tensor,
    keys: tl.tensor,
    row: tl.tensor,
    top: tl.tensor,
    t: tl.tensor,
    m: tl.tensor,
    high: tl.tensor,
    PARTS: tl.constexpr,
    PARTS_LINE: tl.constexpr,
):
    """The best score among the largest of each part: few tokens need noise to see that they are below it."""
    part = tl.arange(0, PARTS_LINE)
    here, own = part < PARTS, row * PARTS + part
    s = _scaled(tl.load(values + own, mask=here, other=float("-inf")), top, t, m)
    noise = _gumbel(_uniform(keys, row, tl.load(largest + own, mask=here, other=0)))
    return tl.max(tl.where(s >= high, s + noise, float("-inf")))


@triton.jit
def _gather(
    logits: tl.tensor,  # [B, V]
    keys: tl.tensor,  # [B, 2]
    temperature: tl.tensor,  # [B]
    top_k: tl.tensor,  # [B]
    top_p: tl.tensor,  # [B]
    min_p: tl.tensor,  # [B]
    banned: tl.tensor,  # [B, n]
    values: tl.tensor,  # [B, parts]
    largest: tl.tensor,  # [B, parts]
    bound: tl.tensor,  # [B]
    levels: tl.tensor,  # [B, LEVELS]
    masses: tl.tensor,  # [B, parts, LEVELS]
    is_finer: tl.tensor,  # [B]
    finer: tl.tensor,  # [B, LEVELS]
    finer_masses: tl.tensor,  # [B, parts, LEVELS]
    counts: tl.tensor,  # [B] candidates, in place
    scores: tl.tensor,  # [B, parts] best of what is surely kept
    tokens: tl.tensor,  # [B, parts] its token
    sums: tl.tensor,  # [B, parts, 4] masses of all tokens and of those surely kept, in two words each
    bounds: tl.tensor,  # [B, 2] scaled logits: candidates are at or above the first and below the second
    found: tl.tensor,  # [B, ROOM] their logits
    found_ids: tl.tensor,  # [B, ROOM] their tokens
    VOCAB: tl.constexpr,
    BANNED: tl.constexpr,
    BANNED_LINE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_LINE: tl.constexpr,
    PART: tl.constexpr,
    PIECE: tl.constexpr,
    ROOM: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1)
    t, k = tl.load(temperature + row), tl.load(top_k + row)
    p, m = tl.load(top_p + row), tl.load(min_p + row)
    if t > 0:
        top, own = _top(values, row, PARTS, PARTS_LINE), row * PARTS + part
        low, high = tl.full([], float("-inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
        by_count = (k > 0) & (k < VOCAB)
        by_mass = (by_count == 0) & (p < 1)
        if by_count:
            low, high = _scaled(tl.load(bound + row), top, t, m), tl.full([], 1.0, tl.float32)
        if by_mass:
            if tl.load(is_finer + row) != 0:
                low, high, _ = _bracket(finer, finer_masses, row, p, ROOM, PARTS, PARTS_LINE)
            else:
                low, high, _ = _bracket(levels, masses, row, p, ROOM, PARTS, PARTS_LINE)
        if part == 0:
            tl.store(bounds + 2 * row, low)
            tl.store(bounds + 2 * row + 1, high)
        # A score that some token surely reaches: tokens whose noise cannot lift them above it need no logarithms.
        reached = _reached(values, largest, keys, row, top, t, m, high, PARTS, PARTS_LINE)
        num_banned = _num_banned(banned, row, BANNED, BANNED_LINE)
        lane = tl.arange(0, PIECE)
        score, token = (
            tl.full([PIECE], float("-inf"), tl.float32),
            tl.full([PIECE], VOCAB, tl.int32),
        )
        total, kept = tl.zeros([PIECE], tl.int64), tl.zeros([PIECE], tl.int64)
        for i in range(PART // PIECE):
            ids = part * PART + i * PIECE + lane
            x = tl.load(_row_of(logits, row, VOCAB) + ids, mask=ids < VOCAB, other=float("-inf"))
            x = _allowed(x, ids, banned, row, num_banned, BANNED)
            s = _scaled(x, top, t, m)
            best = tl.max(s)
            if by_mass:
                # Integers: their sum does not depend on the order in which programs add up.
                mass = _mass(s)
                total += mass
                kept += tl.where(s >= high, mass, 0)
            if (by_count | by_mass) & (best >= low):
                near = (s >= low) & (s < high) & (s > float("-inf"))
                # Places are taken by one atomic addition a piece. In which order candidates lie depends on timing,
                # the token chosen from them does not.
                amount = tl.sum(near.to(tl.int32))
                if amount > 0:
                    start = tl.atomic_add(counts + row, amount, sem="relaxed")
                    place = start + tl.cumsum(near.to(tl.int32), 0) - 1
                    near = near & (place < ROOM)
                    tl.store(found + row * ROOM + place, x, mask=near)
                    tl.store(found_ids + row * ROOM + place, ids, mask=near)
            if best >= high:
                uniform = _uniform(keys, row, ids)
                # -log2(u) bounds the noise from above and costs one fast logarithm; two precise ones follow only
                # where the bound says that it matters.
                reach = tl.where(s >= high, s - tl.log2(uniform) * LN2, float("-inf"))
                if tl.max(reach) + BOUND_SLACK >= reached:
                    noisy = tl.where(s >= high, s + _gumbel(uniform), float("-inf"))
                    token = tl.where(noisy > score, ids, token)
                    score = tl.maximum(noisy, score)
        best_score, best_token = _first_best(score, token, VOCAB)
        tl.store(scores + own, best_score)
        tl.store(tokens + own, best_token)
        if by_mass:
            _store_mass(sums + 4 * own, tl.sum(total))
            _store_mass(sums + 4 * own + 2, tl.sum(kept))


@triton.jit
def _candidates(
    i: tl.tensor,
    logits: tl.tensor,
    found: tl.tensor,
    found_ids: tl.tensor,
    banned: tl.tensor,
    row: tl.tensor,
    stored: tl.tensor,
    size: tl.tensor,
    num_banned: tl.tensor,
    top: tl.tensor,
    t: tl.tensor,
    m: tl.tensor,
    high: tl.tensor,
    VOCAB: tl.constexpr,
    BANNED: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens of a block and their scaled logits, -inf for what is no candidate."""
    place = i * BLOCK + tl.arange(0, BLOCK)
    here = place < size
    near = found + row * ROOM + place
    x = tl.load(near, mask=here & stored, other=float("-inf"))
    ids = tl.load(found_ids + row * ROOM + place, mask=here & stored, other=0)
    whole = tl.load(
        _row_of(logits, row, VOCAB) + place, mask=here & (stored == 0), other=float("-inf")
    )
    ids = tl.where(stored, ids, place)
    x = _allowed(tl.where(stored, x, whole), ids, banned, row, num_banned, BANNED)
    s = _scaled(x, top, t, m)
    return ids, tl.where(s < high, s, float("-inf"))


@triton.jit
def _search(
    low: tl.tensor,
    high: tl.tensor,
    needed: tl.tensor,
    size: tl.tensor,
    place: tl.tuple,  # the arguments of `_candidates` that are the same for all blocks
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    BANNED: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest edge in [low, high), as bits, such that the candidates at or above it reach `needed`; else `low`."""
    while high - low > 1:
        step = (high - low + BRANCHES - 1) // BRANCHES
        edges = tl.minimum(low + step * (1 + tl.arange(0, BRANCHES)), high)
        sums = tl.zeros([BRANCHES], tl.int64)
        for i in range(tl.cdiv(size, BLOCK)):
            ids, s = _candidates(i, *place, VOCAB, BANNED, ROOM, BLOCK)
            if BY_MASS:
                weights = _mass(s)
            else:
                weights = tl.full([BLOCK], 1, tl.int64)
            above = _sortable(s)[:, None] >= edges[None, :]
            sums += tl.sum(tl.where(above, weights[:, None], 0), 0)
        enough = (sums >= needed) & (edges < high)
        high = tl.min(tl.where(enough, high, edges))
        low = tl.max(tl.where(enough, edges, low))
    return low


@triton.jit
def _choose(
    logits: tl.tensor,  # [B, V]
    keys: tl.tensor,  # [B, 2]
    temperature: tl.tensor,  # [B]
    top_k: tl.tensor,  # [B]
    top_p: tl.tensor,  # [B]
    min_p: tl.tensor,  # [B]
    banned: tl.tensor,  # [B, n]
    values: tl.tensor,  # [B, parts]
    largest: tl.tensor,  # [B, parts]
    counts: tl.tensor,  # [B]
    scores: tl.tensor,  # [B, parts]
    drawn: tl.tensor,  # [B, parts]
    sums: tl.tensor,  # [B, parts, 4]
    bounds: tl.tensor,  # [B, 2]
    found: tl.tensor,  # [B, ROOM]
    found_ids: tl.tensor,  # [B, ROOM]
    chosen: tl.tensor,  # [B] the tokens
    VOCAB: tl.constexpr,
    BANNED: tl.constexpr,
    BANNED_LINE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_LINE: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    t, k, p, m = (
        tl.load(temperature + row),
        tl.load(top_k + row),
        tl.load(top_p + row),
        tl.load(min_p + row),
    )
    part = tl.arange(0, PARTS_LINE)
    own, here = row * PARTS + part, part < PARTS
    value = tl.load(values + own, mask=here, other=float("-inf"))
    top, token = _first_best(value, tl.load(largest + own, mask=here, other=VOCAB), VOCAB)
    if t > 0:
        score = tl.load(scores + own, mask=here, other=float("-inf"))
        best, token = _first_best(score, tl.load(drawn + own, mask=here, other=VOCAB), VOCAB)
        count = tl.load(counts + row)
        # Rows whose kept tokens were all drawn from already are done. If candidates did not fit, the row itself is
        # searched: slow, and the same token.
        if count > 0:
            stored = count <= ROOM
            size = tl.where(stored, count, VOCAB)
            num_banned = tl.where(stored, 0, _num_banned(banned, row, BANNED, BANNED_LINE))
            below = tl.load(bounds + 2 * row + 1)
            edge = _sortable(tl.load(bounds + 2 * row))
            high = tl.minimum(_sortable(below), 1)  # above the bits of 0, the largest there is
            place = (logits, found, found_ids, banned, row, stored)
            place += (size, num_banned, top, t, m, below)
            by_count = (k > 0) & (k < VOCAB)
            if by_count:
                edge = _search(
                    edge, high, k.to(tl.int64), size, place, False, VOCAB, BANNED, ROOM, BLOCK
                )
            if p < 1:
                total, kept = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
                if by_count:
                    for i in range(tl.cdiv(size, BLOCK)):
                        ids, s = _candidates(i, *place, VOCAB, BANNED, ROOM, BLOCK)
                        total += tl.sum(tl.where(_sortable(s) >= edge, _mass(s), 0))
                else:
                    total = _load_mass(sums + 4 * own, here)
                    kept = _load_mass(sums + 4 * own + 2, here)
                needed = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64) - kept
                edge = _search(edge, high, needed, size, place, True, VOCAB, BANNED, ROOM, BLOCK)
            # The draw among candidates with the same noise as everywhere, so it does not matter which launch looks
            # at a token.
            lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
            lane_token = tl.full([BLOCK], VOCAB, tl.int32)
            for i in range(tl.cdiv(size, BLOCK)):
                ids, s = _candidates(i, *place, VOCAB, BANNED, ROOM, BLOCK)
                noisy = tl.where(
                    _sortable(s) >= edge, s + _gumbel(_uniform(keys, row, ids)), float("-inf")
                )
                # Candidates are in no order: of equal scores the first token.
                better = (noisy > lane_best) | ((noisy == lane_best) & (ids < lane_token))
                lane_best = tl.where(better, noisy, lane_best)
                lane_token = tl.where(better, ids, lane_token)
            # The best of the candidates against the best of what was surely kept; of equal scores the first token.
            found_best, first = _first_best(lane_best, lane_token, VOCAB)
            ahead = (found_best > best) | ((found_best == best) & (first < token))
            token = tl.where(ahead, first, token)
    tl.store(chosen + row, tl.where(token == VOCAB, 0, token))


def sample_tokens_triton(arrays: SamplingArrays, *, config: Config | None = None):
    """See `api.sample_tokens`."""
    logits, keys, temperature, top_k, top_p, min_p, banned = arrays.keyed()
    config = config or Config()
    (rows, vocab), num_banned = logits.shape, banned.shape[1]
    parts = cdiv(vocab, config.part)
    num_groups = parts * (config.line // config.group)
    of = {"VOCAB": vocab, "BANNED": num_banned, "BANNED_LINE": power_of_two(num_banned)}
    of |= {"PARTS": parts}
    walk = {"PART": config.part, "grid": (parts, rows), "num_warps": config.part_warps}
    line = {"PARTS_LINE": power_of_two(parts)}

    def floats(*shape: int):
        return jax.ShapeDtypeStruct((rows, *shape), jnp.float32)

    def ints(*shape: int):
        return jax.ShapeDtypeStruct((rows, *shape), jnp.int32)

    values, tokens, groups, counts = call(
        *(_maxima, logits, banned),
        outputs=[floats(parts), ints(parts), floats(num_groups), ints()],
        **(of | walk),
        LINE=config.line,
        GROUP=config.group,
    )
    asked = (temperature, top_k, top_p, min_p, banned)
    bound, levels, masses = call(
        *(_narrow, logits, *asked, values, groups),
        outputs=[floats(), floats(LEVELS.value), floats(parts, LEVELS.value)],
        **(of | walk | line),
        GROUPS=num_groups,
        GROUPS_LINE=power_of_two(num_groups),
    )
    finer = call(
        *(_narrow_more, logits, *asked, values, levels, masses),
        outputs=[ints(), floats(LEVELS.value), floats(parts, LEVELS.value)],
        **(of | walk | line),
        ROOM=config.room,
    )
    found = call(
        *(_gather, logits, keys, *asked, values, tokens, bound, levels, masses, *finer, counts),
        outputs=[
            *(floats(parts), ints(parts), ints(parts, 4), floats(2)),
            *(floats(config.room), ints(config.room)),
        ],
        in_place=[15],
        **(of | walk | line | {"num_warps": config.gather_warps}),
        PIECE=config.piece,
        ROOM=config.room,
    )
    (chosen,) = call(
        *(_choose, logits, keys, *asked, values, tokens, *found),
        outputs=[ints()],
        grid=(rows,),
        num_warps=config.choose_warps,
        **(of | line),
        ROOM=config.room,
        BLOCK=config.block,
    )
    return chosen

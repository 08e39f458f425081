"""The scan in Triton: what `triton_scan` launches. Imports triton, which is optional.

Tokens are taken in chunks of CHUNK. Where dt is 0, and on padding, `early` is infinite: such a token leaves no trace.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-128.0)  # exp of it is zero in float32
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rounded(a: tl.tensor, INTERPRETED: tl.constexpr):
    """The nearest bfloat16, which the interpreter would not round to but cut off; NaN and infinities stay."""
    if INTERPRETED:
        bits = a.to(tl.float32).to(tl.uint32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, up, bits) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return a.to(tl.bfloat16)


@triton.jit
def _operand(a: tl.tensor, INTERPRETED: tl.constexpr):
    """Rounded to bfloat16 for a product; the interpreter multiplies float32 alone."""
    if INTERPRETED:
        return _rounded(a, INTERPRETED).to(tl.float32)
    else:
        return a.to(tl.bfloat16)


@triton.jit
def _scaled(xs: tl.tensor, left: tl.tensor, INTERPRETED: tl.constexpr):
    """x^T with a factor for every token, [P, CHUNK]."""
    return _operand(tl.trans(xs).to(tl.float32) * left[None, :], INTERPRETED)


@triton.jit
def _line(
    decays: tl.tensor,
    tokens: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Where a head's decays begin."""
    return decays + (row.to(tl.int64) * HEADS + head) * (2 * tl.cdiv(tokens, CHUNK) * CHUNK)


@triton.jit
def _outputs(
    xs: tl.tensor,  # [CHUNK, P]
    Bs: tl.tensor,  # [CHUNK, R]
    Cs: tl.tensor,  # [CHUNK, R]
    state: tl.tensor,  # [P, R]
    late: tl.tensor,  # [CHUNK]
    early: tl.tensor,  # [CHUNK]
    skip: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    SKIPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """y of a chunk, [CHUNK, P]: what the state at its start gives, and what its own tokens give."""
    out = tl.dot(Cs, tl.trans(_operand(state, INTERPRETED))) * tl.exp2(late)[:, None]
    between = tl.where(q[:, None] >= k[None, :], late[:, None] - early[None, :], float("-inf"))
    weights = tl.dot(Cs, tl.trans(Bs)) * tl.exp2(between)
    if SKIPS:
        weights = tl.where(q[:, None] == k[None, :], weights + skip, weights)
    return tl.dot(_operand(weights, INTERPRETED), _operand(xs, INTERPRETED), out)


@triton.jit
def decay_kernel(
    dt: tl.tensor,  # [B, T, M]
    A: tl.tensor,  # [M]
    lengths: tl.tensor,  # [B]
    sizes: tl.tensor,  # first_frame, T, 0
    decays: tl.tensor,  # [B, M, T' / CHUNK, 2, CHUNK]
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Of every token `late`, log2 of the decay from its chunk's start up to it, and `early`, that less log2 of its dt.

    A token k adds exp2(late_q - early_k) times x_k to a later token q of its chunk: one exponential, dt included.
    """
    chunk, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens, end = tl.load(sizes + 1), tl.load(lengths + row)
    q, head = tl.arange(0, CHUNK), tile * TILE + tl.arange(0, TILE)
    token, held = chunk * CHUNK + q, head < HEADS
    places = (row.to(tl.int64) * tokens + token)[:, None] * HEADS + head[None, :]
    steps = tl.load(dt + places, mask=(token < end)[:, None] & held[None, :], other=0.0)
    steps = steps.to(tl.float32)
    rate = tl.load(A + head, mask=held, other=0.0).to(tl.float32)
    # One float32 sum is enough here: what it is off by is nothing beside the rounding of bfloat16. In base 2, since
    # that is what the hardware raises.
    late = tl.cumsum(tl.maximum(steps * rate[None, :], LOWEST) * LOG2E, axis=0)
    line = _line(decays, tokens, row, head, HEADS, CHUNK)[None, :] + 2 * chunk * CHUNK
    tl.store(line + q[:, None], late, mask=held[None, :])
    # dt goes into the exponent as its logarithm: one exponential in place of one and a product, for each pair of
    # tokens.
    traced = steps > 0
    early = tl.where(traced, late - tl.log2(tl.where(traced, steps, 1.0)), float("inf"))
    tl.store(line + CHUNK + q[:, None], early, mask=held[None, :])


@triton.jit
def added_kernel(
    xBC: tl.tensor,  # [B, T, E]
    decays: tl.tensor,  # [B, M, T' / CHUNK, 2, CHUNK]
    lengths: tl.tensor,  # [B]
    sizes: tl.tensor,  # first_frame, T, 0
    added: tl.tensor,  # [B, M, S, P R] at the place of the segment that follows; the first one's stays free
    totals: tl.tensor,  # [B, M, S] in the same way
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """What a segment that another one follows adds to a state of zeros, and log2 of its decay.

    From the last chunk to the first: so nothing added is ever scaled again.
    """
    E: tl.constexpr = HEADS * WIDTH + 2 * GROUPS * SIZE
    head, segment, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(lengths + row) > (segment + 1) * SEGMENT:
        tokens = tl.load(sizes + 1)
        q, p, r = tl.arange(0, CHUNK), tl.arange(0, P), tl.arange(0, R)
        x = head * WIDTH + p[None, :]
        B = HEADS * WIDTH + head // (HEADS // GROUPS) * SIZE + r[None, :]
        line = _line(decays, tokens, row, head, HEADS, CHUNK)
        xBC += row.to(tl.int64) * tokens * E
        state, later = tl.zeros((P, R), tl.float32), 0.0
        # Only segments that another one follows, and those are full: no masks for tokens in this loop.
        for i in range(SEGMENT // CHUNK):
            start = (segment + 1) * SEGMENT - (i + 1) * CHUNK
            at = (start + q)[:, None] * E
            xs = tl.load(xBC + at + x, mask=(p < WIDTH)[None, :], other=0.0)
            Bs = tl.load(xBC + at + B, mask=(r < SIZE)[None, :], other=0.0)
            total = tl.load(line + 2 * start + CHUNK - 1)
            left = tl.exp2(later + total - tl.load(line + 2 * start + CHUNK + q))
            state = tl.dot(_scaled(xs, left, INTERPRETED), _operand(Bs, INTERPRETED), state)
            later += total
        unit = (row * HEADS + head) * tl.cdiv(tokens, SEGMENT) + segment + 1
        words = p[:, None] * SIZE + r[None, :]
        held = (p < WIDTH)[:, None] & (r < SIZE)[None, :]
        tl.store(added + unit.to(tl.int64) * (WIDTH * SIZE) + words, state, mask=held)
        tl.store(totals + unit, later)


@triton.jit
def starts_kernel(
    starts: tl.tensor,  # [B, M, S, P R] in: what the segment before each adds; out: the states they start from
    arena: tl.tensor,  # [U, W]
    read: tl.tensor,  # [B, F]
    exists: tl.tensor,  # [B]
    totals: tl.tensor,  # [B, M, S]
    lengths: tl.tensor,  # [B]
    sizes: tl.tensor,  # first_frame, T, 0
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    FRAMES: tl.constexpr,
    FRAME: tl.constexpr,
    PER_FRAME: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """States at the starts of a row's segments, from its first state and what each segment adds, one after another."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Words of a state are independent here, so a state is shared among programs; segments follow one another.
    word = part * BLOCK + tl.arange(0, BLOCK)
    held = word < WORDS
    frame = tl.load(read + row * FRAMES + tl.load(sizes) + head // PER_FRAME).to(tl.int64)
    there = held & (tl.load(exists + row) != 0)
    state = tl.load(arena + frame * FRAME + head % PER_FRAME * WORDS + word, mask=there, other=0)
    state = state.to(tl.float32, bitcast=True)
    begin = state
    unit = (row * HEADS + head) * tl.cdiv(tl.load(sizes + 1), SEGMENT)
    starts += unit.to(tl.int64) * WORDS + word
    totals += unit
    count = tl.cdiv(tl.load(lengths + row), SEGMENT)
    for first in range(1, count, AHEAD):
        # What is added to several segments is asked for together. A state goes to the place of what it was made of: by
        # then that has been read, so no store has to wait for a load on its way.
        places = starts + first * WORDS
        added, decays = (), ()
        for i in tl.static_range(AHEAD):
            more = first + i < count
            added += (tl.load(places + i * WORDS, mask=held & more, other=0.0),)
            decays += (tl.load(totals + first + i, mask=more, other=0.0),)
        for i in tl.static_range(AHEAD):
            state = state * tl.exp2(decays[i]) + added[i]
            tl.store(places + i * WORDS, state, mask=held & (first + i < count))
    # The scan does not read the arena: its programs run in any order, and a row's last one may write a checkpoint over
    # the one that was read. This store is the last one, since no load moves past it.
    tl.store(starts, begin, mask=held)


@triton.jit
def scan_kernel(
    arena: tl.tensor,  # [U, W]
    read: tl.tensor,  # [B, F]
    write: tl.tensor,  # [B, F]
    exists: tl.tensor,  # [B]
    xBC: tl.tensor,  # [B, T, E]
    D: tl.tensor,  # [M]
    decays: tl.tensor,  # [B, M, T' / CHUNK, 2, CHUNK]
    starts: tl.tensor,  # [B, M, S, P R]; not read where rows are not CUT into segments
    lengths: tl.tensor,  # [B]
    state_lengths: tl.tensor,  # [B]
    sizes: tl.tensor,  # first_frame, T, 0
    y: tl.tensor,  # [B, T, M P]
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    FRAMES: tl.constexpr,
    FRAME: tl.constexpr,
    PER_FRAME: tl.constexpr,
    SKIPS: tl.constexpr,
    CUT: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A segment of one head from the state at its start; the last chunk of a row comes after the others, with masks."""
    INNER: tl.constexpr = HEADS * WIDTH
    E: tl.constexpr = INNER + 2 * GROUPS * SIZE
    head, segment, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, k, p, r = tl.arange(0, CHUNK), tl.arange(0, CHUNK), tl.arange(0, P), tl.arange(0, R)
    in_p, in_r = (p < WIDTH)[None, :], (r < SIZE)[None, :]
    held = (p < WIDTH)[:, None] & in_r
    words = head % PER_FRAME * (WIDTH * SIZE) + p[:, None] * SIZE + r[None, :]
    skip = 0.0
    if SKIPS:
        skip = tl.load(D + head).to(tl.float32)
    first = segment * SEGMENT
    # Where the row's last chunk starts.
    final = tl.maximum(tl.cdiv(tl.load(lengths + row), CHUNK) - 1, 0) * CHUNK

    # Segments after the row's last token have nothing but padding to write.
    if first <= final:
        tokens = tl.load(sizes + 1)
        if CUT:
            unit = (row * HEADS + head) * tl.cdiv(tokens, SEGMENT) + segment
            start_words = p[:, None] * SIZE + r[None, :]
            start_words += unit.to(tl.int64) * (WIDTH * SIZE)
            state = tl.load(starts + start_words, mask=held, other=0.0)
        else:
            place = row * FRAMES + tl.load(sizes) + head // PER_FRAME
            frame = tl.load(read + place).to(tl.int64) * FRAME
            there = held & (tl.load(exists + row) != 0)
            state = tl.load(arena + frame + words, mask=there, other=0)
            state = state.to(tl.float32, bitcast=True)

        inputs, x = xBC + row.to(tl.int64) * tokens * E, head * WIDTH
        B = INNER + head // (HEADS // GROUPS) * SIZE
        C = B + GROUPS * SIZE
        line = _line(decays, tokens, row, head, HEADS, CHUNK)
        outputs = y + row.to(tl.int64) * tokens * INNER + x
        # All chunks but the last are full and hold no checkpoint: the loop has no masks for tokens, and its loads
        # run ahead.
        for start in range(first, tl.minimum(final, first + SEGMENT), CHUNK):
            at = (start + q)[:, None]
            xs = tl.load(inputs + (at * E + (x + p)[None, :]), mask=in_p, other=0.0)
            Bs = tl.load(inputs + (at * E + (B + r)[None, :]), mask=in_r, other=0.0)
            Cs = tl.load(inputs + (at * E + (C + r)[None, :]), mask=in_r, other=0.0)
            Bs, Cs = _operand(Bs, INTERPRETED), _operand(Cs, INTERPRETED)
            late = tl.load(line + 2 * start + q)
            early = tl.load(line + 2 * start + CHUNK + k)
            total = tl.load(line + 2 * start + CHUNK - 1)
            scaled = _scaled(xs, tl.exp2(total - early), INTERPRETED)
            out = _outputs(xs, Bs, Cs, state, late, early, skip, q, k, SKIPS, INTERPRETED)
            # The old state is the accumulator of the product, so adding it takes no instruction of its own.
            state = tl.dot(scaled, Bs, state * tl.exp2(total))
            tl.store(outputs + at * INNER + p[None, :], _rounded(out, INTERPRETED), mask=in_p)

        if final < first + SEGMENT:
            # All places are worked out again, from numbers the compiler cannot know to be the same: the loop has no
            # register to spare for them.
            zero = tl.load(sizes + 2)
            row += zero
            head += zero
            tokens, end = tl.load(sizes + 1), tl.load(lengths + row)
            kept = tl.load(state_lengths + row)
            start = tl.maximum(tl.cdiv(end, CHUNK) - 1, 0) * CHUNK
            inputs, x = xBC + row.to(tl.int64) * tokens * E, head * WIDTH
            B = INNER + head // (HEADS // GROUPS) * SIZE
            C = B + GROUPS * SIZE
            line = _line(decays, tokens, row, head, HEADS, CHUNK)
            outputs = y + row.to(tl.int64) * tokens * INNER + x
            at = (start + q)[:, None]
            # The last chunk may end anywhere, and the checkpoint stands in it: here are the masks.
            real = at < end
            xs = tl.load(inputs + (at * E + (x + p)[None, :]), mask=in_p & real, other=0.0)
            Bs = tl.load(inputs + (at * E + (B + r)[None, :]), mask=in_r & real, other=0.0)
            Cs = tl.load(inputs + (at * E + (C + r)[None, :]), mask=in_r & real, other=0.0)
            Bs, Cs = _operand(Bs, INTERPRETED), _operand(Cs, INTERPRETED)
            late = tl.load(line + 2 * start + q)
            early = tl.load(line + 2 * start + CHUNK + k)
            out = _outputs(xs, Bs, Cs, state, late, early, skip, q, k, SKIPS, INTERPRETED)
            tl.store(
                outputs + at * INNER + p[None, :], _rounded(out, INTERPRETED), mask=in_p & real
            )
            if kept > start:  # the checkpoint stands in this chunk, or at its start
                total = tl.load(line + start + kept - 1)
                left = tl.where(start + k < kept, tl.exp2(total - early), 0.0)
                state = tl.dot(_scaled(xs, left, INTERPRETED), Bs, state * tl.exp2(total))
            place = row * FRAMES + tl.load(sizes) + head // PER_FRAME
            frame = tl.load(write + place).to(tl.int64) * FRAME
            words = head % PER_FRAME * (WIDTH * SIZE) + p[:, None] * SIZE + r[None, :]
            tl.store(arena + frame + words, state.to(tl.uint32, bitcast=True), mask=held)

    zero = tl.load(sizes + 2)
    row += zero
    head += zero
    first += zero
    tokens, end = tl.load(sizes + 1), tl.load(lengths + row)
    outputs = y + row.to(tl.int64) * tokens * INNER + head * WIDTH
    # Padding from the row's end on, in this segment: zero, whatever its inputs are.
    zeros = tl.zeros((CHUNK, P), tl.bfloat16)
    padding = tl.maximum(first, end // CHUNK * CHUNK)
    for start in range(padding, tl.minimum(first + SEGMENT, tokens), CHUNK):
        at = (start + q)[:, None]
        tl.store(outputs + at * INNER + p[None, :], zeros, mask=(at >= end) & (at < tokens) & in_p)

"""The padded shapes that steps are compiled for. There are few, because each one costs seconds of compilation.

A wide page table costs only the bytes of its int32 entries, because attention walks no further than the rows' own
lengths. The number of steps in a decode loop is data; its bucket only gives the room for results. A fork is compiled
once for each row count of the prefill that it follows. Exact mode has one shape for everything. `EngineConfig.shapes`
says how many shapes there are:

- "fine" is for a CPU, where a program compiles in seconds. A prefill dispatch has 1, 4, 16, ... rows, up to max_rows.
  It has grain, 4 grain, 8 grain, ... tokens per row, up to prefill_tokens, with rows x tokens within the budget. Decode
  runs over ring rows 0 .. rows - 1; the row counts are 1, a middle size if max_rows is at least 8, and max_rows. Page
  tables are 256, 1024, ... pages wide, up to what a sequence can need.
- "coarse" is for a GPU, where a program compiles in half a minute, and where a step of few tokens takes as long as
  reading the weights. A prefill dispatch has 1 row of 8192, 2048, 512 or 128 tokens (a quarter at a time), or 4 rows of
  the short sizes. A prompt is cut so that little of its last chunk is padding (`first_chunk`). Decode has 1 row, 64
  rows, or max_rows. Page tables have one width. All forks have one shape, because the logits of a prefill are padded to
  the most rows that any prefill has.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hybrid_jax.config import EngineConfig

SMALLEST_WIDTH = 256
# For coarse shapes.
SHORTEST_CHUNK = 128
SEVERAL_ROWS = 4  # rows of a prefill dispatch that has more than one
TOKENS_OF_SEVERAL = 2048  # at most, for all of these rows together
MIDDLE_ROWS = 64
# What a dispatch costs beside its tokens, as a number of tokens. This is an estimate: on an H200, at 4.3 TB/s and
# 400 TFLOP/s, reading the weights takes as long as computing 93 tokens, whatever the model. Launches take the rest.
DISPATCH_TOKENS = 150


@dataclass(frozen=True, order=True)
class PrefillBucket:
    """Rows, tokens per row, and pages per row of a prefill dispatch."""

    rows: int
    tokens: int
    width: int


@dataclass(frozen=True, order=True)
class DecodeBucket:
    """Ring rows, steps there is room for, and pages per row of a decode dispatch."""

    rows: int
    steps: int
    width: int


def smallest_that_fits(sizes: tuple[int, ...], needed: int, what: str) -> int:
    """The first of ascending sizes that is at least `needed`.

    Raises:
        ValueError: all are smaller.
    """
    for size in sizes:
        if size >= needed:
            return size
    raise ValueError(
        f"bucket: {what} must be at most {sizes[-1]}, got {needed}; shapes are {sizes}"
    )


@functools.lru_cache(maxsize=64)
def prefill_shapes(engine: EngineConfig) -> tuple[tuple[int, int], ...]:
    """(rows, tokens per row) of all prefill dispatches, ordered by tokens."""
    coarse = engine.shapes == "coarse"
    tokens = _coarse_tokens(engine) if coarse else _fine_tokens(engine)
    rows = (1, SEVERAL_ROWS) if coarse else _fine_rows(engine)
    budget = min(engine.prefill_tokens, TOKENS_OF_SEVERAL) if coarse else engine.prefill_tokens
    most = engine.max_rows
    return tuple((r, t) for t in tokens for r in rows if r == 1 or (r * t <= budget and r <= most))


def _fine_rows(engine: EngineConfig) -> tuple[int, ...]:
    most = min(engine.max_rows, engine.prefill_tokens // engine.grain)
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size *= 4
    return (*sizes, size) if size == most else (*sizes, most)


def _fine_tokens(engine: EngineConfig) -> tuple[int, ...]:
    sizes, size = [engine.grain], 4 * engine.grain
    while size < engine.prefill_tokens:
        sizes.append(size)
        size *= 2
    return tuple(sorted({*sizes, engine.prefill_tokens}))


def _coarse_tokens(engine: EngineConfig) -> tuple[int, ...]:
    sizes, size = [engine.prefill_tokens], engine.prefill_tokens // 4
    while size >= SHORTEST_CHUNK:
        sizes.append(size // engine.grain * engine.grain)
        size //= 4
    return tuple(sorted(sizes))


def prefill_rows(engine: EngineConfig) -> tuple[int, ...]:
    """Row counts of prefill dispatches, ascending."""
    return tuple(sorted({rows for rows, _ in prefill_shapes(engine)}))


def prefill_tokens(engine: EngineConfig) -> tuple[int, ...]:
    """Tokens per row of prefill dispatches, ascending multiples of grain; the last is the longest chunk."""
    return tuple(sorted({tokens for _, tokens in prefill_shapes(engine)}))


def logits_rows(engine: EngineConfig, rows: int) -> int:
    """Rows of the logits that a prefill of `rows` rows hands on to a fork."""
    return prefill_rows(engine)[-1] if engine.shapes == "coarse" else rows


@functools.lru_cache(maxsize=1 << 14)
def first_chunk(engine: EngineConfig, num_tokens: int) -> int:
    """How long the first chunk is when one row has `num_tokens` to compute: all of them, or a whole shape."""
    sizes = prefill_tokens(engine)
    if num_tokens > sizes[-1] or engine.shapes == "fine":
        return min(num_tokens, sizes[-1])
    return _cheapest(sizes, num_tokens)[1]


@functools.lru_cache(maxsize=1 << 14)
def _cheapest(sizes: tuple[int, ...], num_tokens: int) -> tuple[int, int]:
    """The least cost of computing `num_tokens`, in tokens, and the length of the first chunk for that cost.

    `num_tokens` is at most the largest size.
    """
    whole = next(size for size in sizes if size >= num_tokens)
    ways = [(whole + DISPATCH_TOKENS, num_tokens)]
    if full := [size for size in sizes if size < num_tokens]:
        rest, _ = _cheapest(sizes, num_tokens - full[-1])
        ways.append((full[-1] + DISPATCH_TOKENS + rest, full[-1]))
    return min(ways)


@functools.lru_cache(maxsize=64)
def decode_rows(engine: EngineConfig) -> tuple[int, ...]:
    """Ring-row counts of decode dispatches, ascending."""
    sizes = {1, engine.max_rows}
    if engine.shapes == "coarse":
        return tuple(sorted(sizes | {min(MIDDLE_ROWS, engine.max_rows)}))
    if engine.max_rows >= 8:
        middle = 2
        while middle * middle < engine.max_rows:
            middle *= 2
        sizes.add(middle)
    return tuple(sorted(sizes))


def decode_steps(engine: EngineConfig) -> tuple[int, ...]:
    """Room for results of decode dispatches, ascending."""
    return (engine.steps_per_dispatch,)


@functools.lru_cache(maxsize=64)
def widths(engine: EngineConfig, max_pages: int) -> tuple[int, ...]:
    """Page-table widths, ascending; (1,) for a model without attention."""
    sizes, size = [], SMALLEST_WIDTH
    while size < max_pages and engine.shapes == "fine":
        sizes.append(size)
        size *= 4
    return (*sizes, max(max_pages, 1))


def slot_sizes(engine: EngineConfig) -> tuple[int, ...]:
    """Lines of the slot table that one dispatch writes, ascending."""
    return (64,) if engine.shapes == "coarse" else (1, 8, 64)


def rows_within_budget(engine: EngineConfig, num_tokens: int) -> int:
    """How many prefill rows of up to `num_tokens` tokens each one dispatch may hold; at least 1."""
    size = smallest_that_fits(prefill_tokens(engine), num_tokens, "tokens of a prefill chunk")
    return max(rows for rows, tokens in prefill_shapes(engine) if tokens == size)


def prefill_bucket(
    engine: EngineConfig, *, num_rows: int, num_tokens: int, num_pages: int, max_pages: int
) -> PrefillBucket:
    """The smallest prefill shape that fits.

    Args:
        engine: row and token limits.
        num_rows: rows with a chunk.
        num_tokens: tokens of the longest chunk.
        num_pages: pages of the longest row.
        max_pages: pages of the longest sequence possible.
    """
    size = smallest_that_fits(prefill_tokens(engine), num_tokens, "tokens of a prefill chunk")
    rows = tuple(rows for rows, tokens in prefill_shapes(engine) if tokens == size)
    return PrefillBucket(
        smallest_that_fits(rows, num_rows, "rows of a prefill dispatch"),
        size,
        smallest_that_fits(widths(engine, max_pages), num_pages, "pages of a row"),
    )


def decode_bucket(
    engine: EngineConfig, *, num_rows: int, num_steps: int, num_pages: int, max_pages: int
) -> DecodeBucket:
    """The smallest decode shape that fits; `num_rows` is the highest ring row in use plus one."""
    return DecodeBucket(
        smallest_that_fits(decode_rows(engine), num_rows, "rows of a decode dispatch"),
        smallest_that_fits(decode_steps(engine), num_steps, "steps of a decode dispatch"),
        smallest_that_fits(widths(engine, max_pages), num_pages, "pages of a row"),
    )

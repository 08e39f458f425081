"""The padded shapes steps are compiled for: few, because each one costs seconds of compilation.

Rows of a prefill dispatch are 1, 4, 16, ... up to max_rows; its tokens per row are grain, 4 grain, 8 grain,
... up to prefill_tokens, rows x tokens within the budget. Decode runs over ring rows 0 .. rows - 1: 1, a
middle size from 8 rows on, max_rows; its loop's count is data, and the
bucket is the room for its results. Page tables are 256, 1024, ... pages wide, at most what a
sequence can need: a wider table costs only the bytes of its int32 entries, since attention walks no
further than the rows' own lengths. A fork is compiled once per row count of the prefill it follows. Exact
mode has one shape for everything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hybrid_jax.config import EngineConfig

SMALLEST_WIDTH = 256


@dataclass(frozen=True, order=True)
class PrefillBucket:
    """Rows, tokens per row, and pages per row of a prefill dispatch."""

    rows: int
    tokens: int
    width: int


@dataclass(frozen=True, order=True)
class ForkBucket:
    """Rows of the prefill dispatch that is forked from; every fork of a plan goes into one dispatch."""

    rows: int


@dataclass(frozen=True, order=True)
class DecodeBucket:
    """Ring rows, steps there is room for, and pages per row of a decode dispatch."""

    rows: int
    steps: int
    width: int


@dataclass(frozen=True, order=True)
class ExactBucket:
    """The one shape of exact mode: a window of `tokens` = grain for every ring row."""

    rows: int
    tokens: int
    width: int


def smallest_that_fits(sizes: tuple[int, ...], needed: int, what: str) -> int:
    """The first of ascending sizes that is at least `needed`.

    Raises:
        ValueError: none is.
    """
    for size in sizes:
        if size >= needed:
            return size
    raise ValueError(
        f"bucket: {what} must be at most {sizes[-1]}, got {needed}; shapes are {sizes}"
    )


@functools.lru_cache(maxsize=64)
def prefill_rows(engine: EngineConfig) -> tuple[int, ...]:
    """Row counts of prefill dispatches, ascending."""
    most = min(engine.max_rows, engine.prefill_tokens // engine.grain)
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size *= 4
    return (*sizes, size) if size == most else (*sizes, most)


@functools.lru_cache(maxsize=64)
def prefill_tokens(engine: EngineConfig) -> tuple[int, ...]:
    """Tokens per row of prefill dispatches, ascending multiples of grain; the last is the longest chunk."""
    sizes, size = [engine.grain], 4 * engine.grain
    while size < engine.prefill_tokens:
        sizes.append(size)
        size *= 2
    return tuple(sorted({*sizes, engine.prefill_tokens}))


@functools.lru_cache(maxsize=64)
def decode_rows(engine: EngineConfig) -> tuple[int, ...]:
    """Ring-row counts of decode dispatches, ascending."""
    sizes = {1, engine.max_rows}
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
def widths(max_pages: int) -> tuple[int, ...]:
    """Page-table widths, ascending; (1,) for a model without attention."""
    sizes, size = [], SMALLEST_WIDTH
    while size < max_pages:
        sizes.append(size)
        size *= 4
    return (*sizes, max(max_pages, 1))


def rows_within_budget(engine: EngineConfig, num_tokens: int) -> int:
    """Most prefill rows of up to `num_tokens` tokens each that one dispatch may hold; at least 1."""
    tokens = smallest_that_fits(prefill_tokens(engine), num_tokens, "tokens of a prefill chunk")
    return max(
        rows for rows in prefill_rows(engine) if rows * tokens <= engine.prefill_tokens or rows == 1
    )


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
    return PrefillBucket(
        smallest_that_fits(prefill_rows(engine), num_rows, "rows of a prefill dispatch"),
        smallest_that_fits(prefill_tokens(engine), num_tokens, "tokens of a prefill chunk"),
        smallest_that_fits(widths(max_pages), num_pages, "pages of a row"),
    )


def decode_bucket(
    engine: EngineConfig, *, num_rows: int, num_steps: int, num_pages: int, max_pages: int
) -> DecodeBucket:
    """The smallest decode shape that fits; `num_rows` is the highest ring row in use plus one."""
    return DecodeBucket(
        smallest_that_fits(decode_rows(engine), num_rows, "rows of a decode dispatch"),
        smallest_that_fits(decode_steps(engine), num_steps, "steps of a decode dispatch"),
        smallest_that_fits(widths(max_pages), num_pages, "pages of a row"),
    )


def exact_bucket(engine: EngineConfig, *, max_pages: int) -> ExactBucket:
    """The shape of exact mode."""
    return ExactBucket(engine.max_rows, engine.grain, max(max_pages, 1))


def all_buckets(
    engine: EngineConfig, *, max_pages: int
) -> list[PrefillBucket | ForkBucket | DecodeBucket | ExactBucket]:
    """Every shape a run can meet, the small ones first: what a warm-up compiles."""
    if engine.exact:
        return [exact_bucket(engine, max_pages=max_pages)]
    prefill = {
        PrefillBucket(rows, tokens, width)
        for tokens in prefill_tokens(engine)
        for rows in prefill_rows(engine)
        if rows <= rows_within_budget(engine, tokens)
        for width in widths(max_pages)
    }
    decode = {
        DecodeBucket(rows, steps, width)
        for rows in decode_rows(engine)
        for steps in decode_steps(engine)
        for width in widths(max_pages)
    }
    forks = [ForkBucket(rows) for rows in prefill_rows(engine) if engine.max_rows > 1]
    return [*sorted(prefill), *forks, *sorted(decode)]

"""The padded shapes that steps are compiled for. There are few, because each one costs seconds of compilation.

A wide page table costs only the bytes of its int32 entries, because attention walks no further than the rows' own
lengths. The number of steps in a decode loop is data; its bucket only gives the room for results. A fork is compiled
once, because the logits of a prefill are padded to the most rows that any prefill has. Exact mode has one shape for
everything. `EngineConfig.shapes` says how many shapes there are:

- "fine" is for a CPU, where a program compiles in seconds. A prefill dispatch has 1, 4, 16, ... rows, up to max_rows.
  It has grain, 4 grain, 8 grain, ... tokens per row, up to prefill_tokens, with rows x tokens within the budget. Decode
  runs over ring rows 0 .. rows - 1; the row counts are 1, a middle size if max_rows is at least 8, and max_rows. Page
  tables are 256, 1024, ... pages wide, up to what a sequence can need.
- "coarse" is for a GPU, where a program compiles in half a minute, and where a step of few tokens takes as long as
  reading the weights. A prefill dispatch has 1 row of 8192, 2560, 896, 384 or 128 tokens, or 4 rows of the short sizes.
  A prompt is cut so that little of its last chunk is padding (`first_chunk`). Decode has 1 row, 64 rows, or max_rows.
  Page tables have one width. Sizes grow by a factor of about 3: a further program takes as long to compile as
  about a million tokens of a 7B model take to compute, and `benchmarks/gpu/prefill_shapes.py` says what sizes save.
  What is left of 8,192 tokens after a hit of 90 % fits into one dispatch of 896.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from hybrid_jax.config import EngineConfig

SMALLEST_WIDTH = 256
# Slots that one dispatch writes to the device's table. Padding costs next to nothing.
COPIED_FRAMES = 8  # frames that one program copies between the arena and the host's memory
SLOT_WRITES = 64
# For coarse shapes. Tokens per row of prefill dispatches, beside prefill_tokens; multiples of every grain.
CHUNKS = (128, 384, 896, 2560)
SEVERAL_ROWS = 4  # rows of a prefill dispatch that has more than one
TOKENS_OF_SEVERAL = 2048  # at most, for all of these rows together
MIDDLE_ROWS = 64
# What a dispatch costs beside its tokens, as a number of tokens. This is an estimate: on an H200, at 4.3 TB/s and
# 400 TFLOP/s, reading the weights takes as long as computing 93 tokens, whatever the model. Launches take the rest.
DISPATCH_TOKENS = 150


class AfterCut(IntEnum):
    """What the layers after a model's cut do in a prefill dispatch; each can do what those before it do.

    They write what they keep of all tokens. Beyond that, they do nothing, or take the last tokens of prompts that end,
    or take all tokens.
    """

    NOTHING = 1
    ENDS = 2
    ALL = 3


@dataclass(frozen=True, order=True)
class PrefillBucket:
    """Rows, tokens per row, and pages per row of a prefill dispatch, and what the layers after a cut do."""

    rows: int
    tokens: int
    width: int
    after_cut: AfterCut = AfterCut.ALL


@dataclass(frozen=True, order=True)
class DecodeBucket:
    """Ring rows, steps there is room for, pages per row, and tokens of a row in each step, of a decode dispatch."""

    rows: int
    steps: int
    width: int
    tokens: int = 1


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


class Shapes:
    """The shapes of an engine, as `shapes_of` chooses them.

    Args:
        engine: its settings.
        prefill: (rows, tokens per row) of all prefill dispatches, ordered by tokens.
        decode_rows: ring-row counts of decode dispatches.

    Attributes:
        prefill, decode_rows: as given, the rows ascending.
        prefill_rows, prefill_tokens: rows of prefill dispatches, and tokens per row, ascending. The last number of
            tokens is the longest chunk.
        decode_steps: room for steps of decode dispatches.
        logits_rows: lines of the logits that a prefill hands on to a fork, whatever its rows.
        forks: whether siblings fork.
    """

    forks = True

    def __init__(
        self,
        engine: EngineConfig,
        prefill: Iterable[tuple[int, int]],
        decode_rows: Iterable[int],
    ):
        self.prefill = tuple(prefill)
        self.prefill_rows = tuple(sorted({rows for rows, _ in self.prefill}))
        self.prefill_tokens = tuple(sorted({tokens for _, tokens in self.prefill}))
        self.decode_rows = tuple(sorted(decode_rows))
        self.decode_steps, self._grain = engine.steps_per_dispatch, engine.grain
        self.logits_rows = self.prefill_rows[-1]

    def widths(self, max_pages: int) -> tuple[int, ...]:
        """Page-table widths, ascending; (1,) for a model without attention."""
        return (max(max_pages, 1),)

    def first_chunk(self, num_tokens: int) -> int:
        """How long the first chunk is when one row has `num_tokens` to compute: all of them, or a whole shape."""
        return min(num_tokens, self.prefill_tokens[-1])

    def prefill_of(self, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Tokens per row of a prefill whose longest chunk has `num_tokens`, and its possible row counts, ascending."""
        size = smallest_that_fits(self.prefill_tokens, num_tokens, "tokens of a prefill chunk")
        return size, tuple(rows for rows, tokens in self.prefill if tokens == size)

    def prefill_bucket(
        self,
        *,
        num_rows: int,
        num_tokens: int,
        num_pages: int,
        max_pages: int,
        after_cut: AfterCut = AfterCut.ALL,
    ) -> PrefillBucket:
        """The smallest prefill shape that fits.

        Args:
            num_rows: rows with a chunk.
            num_tokens: tokens of the longest chunk.
            num_pages: pages of the longest row.
            max_pages: pages of the longest sequence possible.
            after_cut: what layers after a cut do.
        """
        tokens, rows = self.prefill_of(num_tokens)
        return PrefillBucket(
            smallest_that_fits(rows, num_rows, "rows of a prefill dispatch"),
            tokens,
            smallest_that_fits(self.widths(max_pages), num_pages, "pages of a row"),
            after_cut,
        )

    def steps_of(self, tokens: int) -> int:
        """The most steps of a decode dispatch in which each row feeds up to `tokens`; a ring fills once at most."""
        return max(1, min(self.decode_steps, self._grain // tokens))

    def decode_bucket(
        self, *, num_rows: int, num_pages: int, max_pages: int, tokens: int = 1
    ) -> DecodeBucket:
        """The smallest decode shape that fits.

        Args:
            num_rows: the highest ring row in use plus one.
            num_pages, max_pages: as for `prefill_bucket`.
            tokens: of a row in each step.
        """
        return DecodeBucket(
            smallest_that_fits(self.decode_rows, num_rows, "rows of a decode dispatch"),
            self.steps_of(tokens),
            smallest_that_fits(self.widths(max_pages), num_pages, "pages of a row"),
            tokens,
        )


class FineShapes(Shapes):
    """Many shapes, because a program compiles in seconds."""

    def __init__(self, engine: EngineConfig):
        budget, most = engine.prefill_tokens, engine.max_rows
        widest = min(most, budget // engine.grain)
        tokens = {engine.grain, budget, *_growing(4 * engine.grain, budget, 2)}
        rows = {widest, *_growing(1, widest, 4)}
        decode_rows = {1, most}
        if most >= 8:
            middle = 2
            while middle * middle < most:
                middle *= 2
            decode_rows.add(middle)
        super().__init__(engine, _within(budget, rows, tokens), decode_rows)

    def widths(self, max_pages: int) -> tuple[int, ...]:
        return (*_growing(SMALLEST_WIDTH, max_pages, 4), max(max_pages, 1))


class CoarseShapes(Shapes):
    """Few shapes, because a program compiles in half a minute."""

    def __init__(self, engine: EngineConfig):
        most = engine.prefill_tokens
        tokens = {most, *(size for size in CHUNKS if 3 * size <= 2 * most)}
        rows = {1, SEVERAL_ROWS} if engine.max_rows >= SEVERAL_ROWS else {1}
        budget = min(most, TOKENS_OF_SEVERAL)
        decode_rows = {1, min(MIDDLE_ROWS, engine.max_rows), engine.max_rows}
        super().__init__(engine, _within(budget, rows, tokens), decode_rows)

    def first_chunk(self, num_tokens: int) -> int:
        sizes = self.prefill_tokens
        return sizes[-1] if num_tokens > sizes[-1] else _cheapest(sizes, num_tokens)[1]


class ExactShapes(Shapes):
    """One shape for everything: a window of grain tokens for every ring row.

    Siblings do not fork, because a fork's logits would come from another program.
    """

    forks = False

    def __init__(self, engine: EngineConfig):
        super().__init__(engine, [(engine.max_rows, engine.grain)], [engine.max_rows])
        self.decode_steps = 1


@functools.lru_cache(maxsize=64)
def shapes_of(engine: EngineConfig) -> Shapes:
    """The shapes of an engine."""
    if engine.exact:
        return ExactShapes(engine)
    return CoarseShapes(engine) if engine.shapes == "coarse" else FineShapes(engine)


def _growing(first: int, below: int, factor: int) -> Iterator[int]:
    """first, first * factor, ... below a limit."""
    while first < below:
        yield first
        first *= factor


def _within(budget: int, rows: set[int], tokens: set[int]) -> Iterator[tuple[int, int]]:
    """All pairs of rows and tokens per row whose product is within the budget, and all of one row."""
    return ((r, t) for t in sorted(tokens) for r in sorted(rows) if r == 1 or r * t <= budget)


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

"""Named shapes for the tests and the benchmark of frame_io: token records into pages."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `update_tokens`.

    Attributes:
        name: says what the shape is for.
        tokens: T, records per row.
        base: position of each row's first record; its length is the number of rows.
        begin, end: positions that are written; None for all of them.
        page_tokens: tokens of a page. words: of one record.
        pages: width of the page table. unused: entries at its end that name the sink.
        offset: word of the frame where the page's first token lies.
        tail: words of the frame behind the page's last token.
        shared: page 0 is one frame for all rows.
        large: from a real model, for benchmarks; unit tests leave it out.
    """

    name: str
    tokens: int
    base: tuple[int, ...]
    begin: tuple[int, ...] | None = None
    end: tuple[int, ...] | None = None
    page_tokens: int = 16
    words: int = 6
    pages: int = 4
    unused: int = 0
    offset: int = 0
    tail: int = 0
    shared: bool = False
    large: bool = False

    @property
    def rows(self) -> int:
        return len(self.base)

    @property
    def frame_words(self) -> int:
        return self.offset + self.page_tokens * self.words + self.tail


CASES = (
    Case(name="decode", tokens=1, base=(0, 15, 16, 63)),
    Case(name="decode_inert_rows", tokens=1, base=(3, 0, 17), begin=(3, 0, 0), end=(4, 0, 0)),
    Case(name="decode_inside_a_frame", tokens=1, base=(5, 31), offset=24, tail=10),
    Case(name="decode_many_rows", tokens=1, base=tuple(range(0, 66)), pages=5, words=2),
    Case(name="one_page", tokens=5, base=(0, 11, 37), pages=3),
    Case(name="two_pages", tokens=5, base=(12, 15, 28), offset=32, tail=4),
    Case(name="three_pages", tokens=32, base=(8, 31)),
    Case(name="whole_pages", tokens=32, base=(0, 32), words=3, offset=7),
    Case(
        name="part_of_a_window",
        tokens=32,
        base=(0, 32, 16, 0, 32),
        begin=(7, 32, 47, 0, 0),
        end=(8, 49, 48, 0, 0),
        tail=5,
    ),
    Case(
        name="behind_a_shared_page",
        tokens=32,
        base=(0, 0),
        begin=(16, 20),
        end=(32, 21),
        shared=True,
    ),
    Case(name="page_longer_than_the_window", tokens=5, page_tokens=64, base=(60, 3), pages=2),
    Case(name="last_page_of_the_table", tokens=32, base=(40, 56), end=(64, 64), tail=1),
    Case(name="short_table", tokens=32, base=(0, 16), end=(9, 32), pages=3, unused=1),
    Case(
        name="nemotron_h_8b_decode",
        tokens=1,
        base=tuple(range(0, 2048, 64)),
        page_tokens=64,
        words=1024,
        pages=33,
        large=True,
    ),
    Case(
        name="bamba_9b_prefill",
        tokens=512,
        base=(0, 512, 1024, 32),
        page_tokens=64,
        words=1024,
        pages=25,
        large=True,
    ),
)
SMALL_CASES = tuple(case for case in CASES if not case.large)


def make_inputs(case: Case, *, seed: int = 0) -> dict:
    """Random arguments of `update_tokens` for a case; frames lie in shuffled order, with spare ones between."""
    rng = np.random.default_rng(seed)
    count = case.rows * case.pages
    ids = rng.permutation(np.arange(1, count + 8))[:count].reshape(case.rows, case.pages)
    if case.shared:
        ids[:, 0] = ids[0, 0]
    if case.unused:
        ids[:, -case.unused :] = 0

    def words(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.integers(0, 2**32, shape, np.uint32))

    base = np.array(case.base, np.int32)
    begin = base if case.begin is None else np.array(case.begin, np.int32)
    end = base + case.tokens if case.end is None else np.array(case.end, np.int32)
    return {
        "arena": words(count + 8, case.frame_words),
        "values": words(case.rows, case.tokens, case.words),
        "table": jnp.asarray(ids, jnp.int32),
        "base": jnp.asarray(base),
        "begin": jnp.asarray(begin),
        "end": jnp.asarray(end, jnp.int32),
        "offset": case.offset,
        "page_tokens": case.page_tokens,
    }

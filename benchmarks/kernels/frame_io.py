"""Frames of one arena: copying and reading whole ones, and writing tokens' records into pages.

    python -m benchmarks.kernels.frame_io [--smoke] [--cases copy] [--sweep] [--out FILE]

Frames of 256 KB: a page of 64 tokens of one group of layers, or 8 heads of a state of 64 x 128. Everything is bytes,
so the share of the floor is the share of the copy's bandwidth. Results are compared word by word. "xla" goes by slices,
as on a CPU; "xla scatter" is what one would write for a GPU. The reference writes one frame or token after another: of
large cases it would take hours to compile, and "xla" is the truth there.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.kernels import report
from benchmarks.kernels.harness import Case, Side, Work
from pallas_kernels import frame_io
from pallas_kernels.frame_io import cases as shapes
from pallas_kernels.frame_io import kernel
from pallas_kernels.frame_io.kernel import Config

FRAME_WORDS = 65536
SWEEP = [Config(words=words, num_warps=warps) for words in (512, 1024, 4096) for warps in (2, 4, 8)]
NAMES = ("pallas", "xla", "reference")
MOST_WRITES = 16  # frames or tokens up to which the reference of a write is compiled
# A page is a frame of 256 KB: few pages a row keep the arena small.
DECODE = shapes.Case(
    name="update_64x1",
    tokens=1,
    base=tuple(i % 60 for i in range(64)),
    page_tokens=64,
    words=1024,
    pages=4,
    large=True,
)
UPDATES = (
    DECODE,
    replace(DECODE, name="update_64x5", tokens=5),
    replace(DECODE, name="update_1x8192", tokens=8192, base=(32,), pages=129),
)


def made(name: str, operation: str, wrap, *, names=NAMES, others=(), **fields) -> Case:
    """A case of one of the package's operations.

    Args:
        wrap: a function of the operation -> a call. names: implementations, the last one the truth.
        others: sides of the benchmark's own.
    """
    public, own = getattr(frame_io, operation), getattr(kernel, f"{operation}_pallas")
    sides = [
        Side(name=which, call=wrap(functools.partial(public, implementation=which)))
        for which in names
    ]
    return Case(
        operation="frame_io",
        name=name,
        truth=sides[-1].call,
        sides=(*sides, *others),
        configs={
            f"{c.words} words {c.num_warps}w": wrap(functools.partial(own, config=c)) for c in SWEEP
        },
        tolerance=0.0,
        **fields,
    )


def names_of(writes: int) -> tuple[str, ...]:
    """Implementations of a case that writes so many frames or tokens."""
    return NAMES if writes <= MOST_WRITES else NAMES[:2]


def arena_result(outputs, arena, inputs):
    return arena


def draw_frames(count: int, words: int, key: jax.Array):
    """An arena of twice as many frames, and two disjoint halves of them in random order."""
    keys = jax.random.split(key)
    ids = 1 + jax.random.permutation(keys[0], 2 * count)
    arena = jax.random.bits(keys[1], (2 * count + 1, words))
    return arena, {"sources": ids[:count], "targets": ids[count:]}


def copy_case(count: int, words: int) -> Case:
    def wrap(run):
        return lambda arena, ids: ((), run(arena, ids["sources"], ids["targets"]))

    def scatter(arena, sources, targets):
        return arena.at[targets].set(arena[sources], unique_indices=True)

    return made(
        f"copy_{count}",
        "copy_frames",
        wrap,
        names=names_of(count),
        others=[Side(name="xla scatter", call=wrap(scatter))],
        draw=functools.partial(draw_frames, count, words),
        result=arena_result,
        work=Work(bytes=8.0 * count * words),
    )


def read_case(count: int, words: int) -> Case:
    def draw(key):
        arena, ids = draw_frames(count, words, key)
        return (), {"arena": arena, "ids": ids["sources"]}

    def wrap(run):
        return lambda carry, inputs: (run(**inputs, offset=0, words=words), carry)

    work = Work(bytes=8.0 * count * words)
    return made(f"read_{count}", "read_frames", wrap, draw=draw, work=work)


def draw_update(shape: shapes.Case, key: jax.Array):
    keys, count = jax.random.split(key, 3), shape.rows * shape.pages
    ids = 1 + jax.random.permutation(keys[0], count)
    base = jnp.asarray(shape.base, jnp.int32)
    return jax.random.bits(keys[1], (count + 1, shape.frame_words)), {
        "values": jax.random.bits(keys[2], (shape.rows, shape.tokens, shape.words)),
        "table": ids.reshape(shape.rows, shape.pages),
        "base": base,
        "begin": base,
        "end": base + shape.tokens,
    }


def update_case(shape: shapes.Case) -> Case:
    def wrap(run):
        static = {"offset": shape.offset, "page_tokens": shape.page_tokens}
        return lambda arena, inputs: ((), run(arena, **inputs, **static))

    def scatter(arena, values, table, base, begin, end, offset, page_tokens):
        position = base[:, None] + jnp.arange(shape.tokens)  # [B, T], all of them written
        frame = jnp.take_along_axis(table, position // page_tokens, axis=1)
        first = offset + position % page_tokens * shape.words
        column = first[..., None] + jnp.arange(shape.words)
        return arena.at[frame[..., None], column].set(values, unique_indices=True)

    tokens = shape.rows * shape.tokens
    return made(
        shape.name,
        "update_tokens",
        wrap,
        names=names_of(tokens),
        others=[Side(name="xla scatter", call=wrap(scatter))],
        draw=functools.partial(draw_update, shape),
        result=arena_result,
        work=Work(bytes=8.0 * tokens * shape.words, tokens=tokens),
    )


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        small = next(shape for shape in shapes.CASES if shape.name == "two_pages")
        return [copy_case(3, 40), update_case(small), read_case(3, 40)]
    updates = [update_case(shape) for shape in UPDATES]
    copies = [copy_case(count, FRAME_WORDS) for count in (1024, 64)]
    return [updates[0], copies[0], updates[2], read_case(1024, FRAME_WORDS), copies[1], updates[1]]


if __name__ == "__main__":
    report.main("frame_io", __doc__.splitlines()[0], cases)

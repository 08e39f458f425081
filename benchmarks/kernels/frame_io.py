"""Frames of one arena: copying and reading whole ones.

    python -m benchmarks.kernels.frame_io [--smoke] [--cases copy] [--sweep] [--out FILE]

Frames of 256 KB: a page of 64 tokens of a few layers, or 8 heads of a state of 64 x 128. Everything is bytes,
so the share of the floor is the share of the copy's bandwidth. Results are compared word by word. "xla" goes by slices,
as on a CPU; "xla scatter" is what one would write for a GPU. The reference writes one frame after another: of large
cases it would take hours to compile, and "xla" is the truth there.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.kernels import report
from benchmarks.kernels.harness import Case, Side, Work, with_arrays
from pallas_kernels import frame_io
from pallas_kernels.frame_io import Config, Copy, Read

FRAME_WORDS = 65536
SWEEP = [Config(words=words, num_warps=warps) for words in (512, 1024, 4096) for warps in (2, 4, 8)]
NAMES = ("pallas", "xla", "reference")
OWN = {
    "read_frames": (frame_io.read_frames_pallas, Read),
    "copy_frames": (frame_io.copy_frames_pallas, Copy),
}
MOST_WRITES = 16  # frames up to which the reference of a write is compiled


def made(name: str, operation: str, wrap, *, names=NAMES, others=(), **fields) -> Case:
    """A case of one of the package's operations.

    Args:
        wrap: a function of the operation -> a call. names: implementations, the last one the truth.
        others: sides of the benchmark's own.
    """
    public = getattr(frame_io, operation)
    own, arrays = OWN[operation]
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
            f"{c.words} words {c.num_warps}w": wrap(with_arrays(own, arrays, config=c))
            for c in SWEEP
        },
        tolerance=0.0,
        **fields,
    )


def names_of(writes: int) -> tuple[str, ...]:
    """Implementations of a case that writes so many frames."""
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
        return lambda arena, ids: ((), run(arena=arena, **ids))

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


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        return [copy_case(3, 40), read_case(3, 40), read_case(5, 40)]
    copies = [copy_case(count, FRAME_WORDS) for count in (1024, 64)]
    return [copies[0], read_case(1024, FRAME_WORDS), copies[1]]


if __name__ == "__main__":
    report.main("frame_io", __doc__.splitlines()[0], cases)

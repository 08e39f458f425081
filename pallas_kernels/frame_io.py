"""Reading, writing and copying equal frames of one uint32 arena.

The arena is uint32[U, W]: frame u is row u, and frame 0 is the sink, where padding writes and nothing
reads. Ids are trusted: a device would clip one that lies outside silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import INTS, WORDS, check, check_words
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.triton import Ref, call, cdiv, iota, load, store

# The forms for XLA are dynamic slices, never gather or scatter: on a CPU those cost 20 to 50 times as much, and XLA can
# do every such write in place. Indices stay two-dimensional, since a flat one passes 2^31 in a large arena.
# Slices that are written out. More of them are a loop, which costs more per slice and less to compile.
UNROLL_LIMIT = 64


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters: a block of 1,024 words is two 16-byte accesses in each thread."""

    words: int = 1024
    num_warps: int = 4


CONFIG = Config()


class Read(NamedTuple):
    """Arrays of `read_frames`."""

    arena: Annotated[jax.Array, WORDS, "frames words"]
    ids: Annotated[jax.Array, INTS, "..."]


class Write(NamedTuple):
    """Arrays of `write_frames`."""

    arena: Annotated[jax.Array, WORDS, "frames words"]
    ids: Annotated[jax.Array, INTS, "..."]
    values: Annotated[jax.Array, WORDS, "... written"]


class Move(NamedTuple):
    """Arrays of `move_words`."""

    arena: Annotated[jax.Array, WORDS, "frames words"]
    sources: Annotated[jax.Array, INTS, "B n 2"]
    targets: Annotated[jax.Array, INTS, "B n 2"]


class Copy(NamedTuple):
    """Arrays of `copy_frames`."""

    arena: Annotated[jax.Array, WORDS, "frames words"]
    sources: Annotated[jax.Array, INTS, "n"]
    targets: Annotated[jax.Array, INTS, "n"]


def read_frames(
    arena: jax.Array,
    ids: jax.Array,
    *,
    offset: int = 0,
    words: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Copies words [offset, offset + words) of frames ids int32[...] out of the arena: uint32[..., words]."""
    where, arrays = "read_frames", Read(arena, ids)
    held = check(where, arrays).words
    words = held - offset if words is None else words
    check_words(where, arena, offset, words)
    return run(where, implementation, READ, arrays, offset=offset, words=words)


def write_frames(
    arena: jax.Array,
    ids: jax.Array,
    values: jax.Array,
    *,
    offset: int = 0,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Writes values uint32[..., words] into frames ids int32[...] from word `offset`; returns the arena.

    No id but the sink's may come twice, for nothing says which write stays.
    """
    where, arrays = "write_frames", Write(arena, ids, values)
    check_words(where, arena, offset, check(where, arrays).written)
    return run(where, implementation, WRITE, arrays, offset=offset)


def copy_frames(
    arena: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Copies whole frames sources int32[n] to targets int32[n]; returns the arena.

    All at the same time: no frame but the sink may be two targets, or a target and a source.
    """
    where, arrays = "copy_frames", Copy(arena, sources, targets)
    check(where, arrays)
    return run(where, implementation, COPY, arrays)


def move_words(
    arena: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
    *,
    words: int,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Copies `words` words from sources int32[B, n, 2] to targets int32[B, n, 2], each a frame and a word in it.

    Those of a row are copied one after another. No row may read or write what another one writes, but the sink.

    Returns:
        The arena.
    """
    where, arrays = "move_words", Move(arena, sources, targets)
    check(where, arrays)
    check_words(where, arena, 0, words)
    return run(where, implementation, MOVE, arrays, words=words)


def read_frames_reference(arrays: Read, offset: int, words: int):
    """See `read_frames`."""
    arena, ids = arrays
    return arena[ids, offset : offset + words]


def write_frames_reference(arrays: Write, offset: int):
    """Row by row."""
    arena, ids, values = arrays
    flat = values.reshape(-1, values.shape[-1])
    for index, frame in enumerate(ids.reshape(-1)):
        arena = arena.at[frame, offset : offset + flat.shape[1]].set(flat[index])
    return arena


def move_words_reference(arrays: Move, words: int):
    """See `move_words`: one after another."""
    arena, sources, targets = arrays
    for source, target in zip(sources.reshape(-1, 2), targets.reshape(-1, 2), strict=True):
        span = jnp.arange(words)
        arena = arena.at[target[0], target[1] + span].set(arena[source[0], source[1] + span])
    return arena


def copy_frames_reference(arrays: Copy):
    """See `copy_frames`: one after another."""
    arena, sources, targets = arrays
    for source, target in zip(sources, targets, strict=True):
        arena = arena.at[target].set(arena[source])
    return arena


def read_frames_xla(arrays: Read, offset: int, words: int):
    """See `read_frames`."""
    arena, ids = arrays
    flat = ids.reshape(-1)
    count = flat.shape[0]
    if count <= UNROLL_LIMIT:
        parts = [jax.lax.dynamic_slice(arena, (flat[i], offset), (1, words)) for i in range(count)]
        return jnp.concatenate(parts).reshape(*ids.shape, words)

    def copy(i: jax.Array, out: jax.Array):
        part = jax.lax.dynamic_slice(arena, (flat[i], offset), (1, words))
        return jax.lax.dynamic_update_slice(out, part, (i, 0))

    out = jax.lax.fori_loop(0, count, copy, jnp.zeros((count, words), arena.dtype))
    return out.reshape(*ids.shape, words)


def write_frames_xla(arrays: Write, offset: int):
    """See `write_frames`."""
    arena, ids, values = arrays
    flat = ids.reshape(-1)
    lines = values.reshape(flat.shape[0], values.shape[-1])

    def put(i: jax.Array, arena: jax.Array):
        line = jax.lax.dynamic_slice(lines, (i, 0), (1, lines.shape[1]))
        return jax.lax.dynamic_update_slice(arena, line, (flat[i], offset))

    return repeat(flat.shape[0], put, arena)


def move_words_xla(arrays: Move, words: int):
    """See `move_words`."""
    arena, sources, targets = arrays
    source, target = sources.reshape(-1, 2), targets.reshape(-1, 2)

    def move(i: jax.Array, arena: jax.Array):
        value = jax.lax.dynamic_slice(arena, (source[i, 0], source[i, 1]), (1, words))
        return jax.lax.dynamic_update_slice(arena, value, (target[i, 0], target[i, 1]))

    return jax.lax.fori_loop(0, len(source), move, arena)


def copy_frames_xla(arrays: Copy):
    """See `copy_frames`."""
    arena, sources, targets = arrays

    def copy(i: jax.Array, arena: jax.Array):
        line = jax.lax.dynamic_slice(arena, (sources[i], 0), (1, arena.shape[1]))
        return jax.lax.dynamic_update_slice(arena, line, (targets[i], 0))

    return repeat(sources.shape[0], copy, arena)


def repeat(count: int, body: Callable, arena: jax.Array):
    """body(i, arena) for i below `count`, one after another: written out where they are few, else in a loop."""
    if count <= UNROLL_LIMIT:
        for i in range(count):
            arena = body(i, arena)
        return arena
    return jax.lax.fori_loop(0, count, body, arena)


def _block(number: jax.Array, size: int, config: Config):
    """Words of a block of `size` words, and which of them exist."""
    words = number * config.words + iota(config.words)
    return words, words < size


def _read_kernel(arena_ref: Ref, ids_ref: Ref, out_ref: Ref, *, offset: int, config: Config):
    place = pl.program_id(0)
    words, inside = _block(pl.program_id(1), out_ref.shape[1], config)
    # Words, not floats: whatever the bits mean, NaN too, they pass unchanged.
    value = load(arena_ref, ids_ref[place], offset + words, mask=inside)
    store(out_ref, place, words, value=value, mask=inside)


def read_frames_pallas(arrays: Read, *, offset: int, words: int, config: Config = CONFIG):
    """See `read_frames`. A program copies one block of one frame."""
    arena, ids = arrays
    flat = ids.reshape(-1)
    (out,) = call(
        _read_kernel,
        *(arena, flat),
        grid=(flat.shape[0], cdiv(words, config.words)),
        outputs=[jax.ShapeDtypeStruct((flat.shape[0], words), arena.dtype)],
        name="read_frames",
        num_warps=config.num_warps,
        offset=offset,
        config=config,
    )
    return out.reshape(*ids.shape, words)


def _copy_kernel(sources_ref: Ref, targets_ref: Ref, arena_ref: Ref, *, config: Config):
    place = pl.program_id(0)
    words, inside = _block(pl.program_id(1), arena_ref.shape[1], config)
    # A frame is shared among programs, so that one copy of few frames still uses many multiprocessors.
    source, target = sources_ref[place], targets_ref[place]

    @pl.when(source != target)  # padding
    def _():
        value = load(arena_ref, source, words, mask=inside)
        store(arena_ref, target, words, value=value, mask=inside)


def _move_kernel(sources_ref: Ref, targets_ref: Ref, arena_ref: Ref, *, words: int, config: Config):
    row = pl.program_id(0)
    block, inside = _block(pl.program_id(1), words, config)
    # A thread has the same words of every copy of a row, so it need not wait for others between two of them.
    for i in range(sources_ref.shape[1]):
        source, target = sources_ref[row, i, 0], targets_ref[row, i, 0]

        @pl.when((source | target) != 0)  # padding
        def _(i=i, source=source, target=target):
            value = load(arena_ref, source, sources_ref[row, i, 1] + block, mask=inside)
            store(arena_ref, target, targets_ref[row, i, 1] + block, value=value, mask=inside)


def move_words_pallas(arrays: Move, *, words: int, config: Config = CONFIG):
    """See `move_words`. A program copies one block of all copies of a row."""
    arena, sources, _ = arrays
    (arena,) = call(
        _move_kernel,
        sources,
        arrays.targets,
        arena,
        grid=(sources.shape[0], cdiv(words, config.words)),
        outputs=[2],
        name="move_words",
        num_warps=config.num_warps,
        words=words,
        config=config,
    )
    return arena


def copy_frames_pallas(arrays: Copy, *, config: Config = CONFIG):
    """See `copy_frames`."""
    arena, sources, _ = arrays
    (arena,) = call(
        _copy_kernel,
        *arrays,
        grid=(sources.shape[0], cdiv(arena.shape[1], config.words)),
        outputs=[0],
        name="copy_frames",
        num_warps=config.num_warps,
        config=config,
    )
    return arena


READ = {
    "reference": read_frames_reference,
    "xla": read_frames_xla,
    "pallas": read_frames_pallas,
}
WRITE = {
    "reference": write_frames_reference,
    "xla": write_frames_xla,
}
COPY = {
    "reference": copy_frames_reference,
    "xla": copy_frames_xla,
    "pallas": copy_frames_pallas,
}
MOVE = {
    "reference": move_words_reference,
    "xla": move_words_xla,
    "pallas": move_words_pallas,
}

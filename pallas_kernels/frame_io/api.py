"""Public entries of frame_io.

The arena is uint32[U, W]: frame u is row u, and frame 0 is the sink, where padding writes and nothing
reads. Ids are trusted: a device would clip one that lies outside silently.
"""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import (
    INTS,
    WORDS,
    Implementation,
    check_array,
    check_dtypes,
    check_rank,
    check_shape,
    run,
)
from pallas_kernels.frame_io import kernel, reference, xla

READ = {
    "reference": reference.read_frames_reference,
    "xla": xla.read_frames_xla,
    "pallas": kernel.read_frames_pallas,
}
WRITE = {
    "reference": reference.write_frames_reference,
    "xla": xla.write_frames_xla,
}
COPY = {
    "reference": reference.copy_frames_reference,
    "xla": xla.copy_frames_xla,
    "pallas": kernel.copy_frames_pallas,
}


def read_frames(
    arena: jax.Array,
    ids: jax.Array,
    *,
    offset: int = 0,
    words: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Copies words [offset, offset + words) of frames ids int32[...] out of the arena: uint32[..., words]."""
    where = "read_frames"
    check_rank(where, "arena", arena, 2)
    words = arena.shape[-1] - offset if words is None else words
    check_arena(where, arena, offset, words)
    check_array(where, "ids", ids)
    check_dtypes(where, INTS, ids=ids)
    return run("read_frames", implementation, READ, arena, ids, offset=offset, words=words)


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
    where = "write_frames"
    check_array(where, "ids", ids)
    check_dtypes(where, INTS, ids=ids)
    check_dtypes(where, WORDS, values=values)
    check_rank(where, "values", values, ids.ndim + 1)
    check_arena(where, arena, offset, values.shape[-1])
    check_shape(where, "values", values, (*ids.shape, values.shape[-1]))
    return run("write_frames", implementation, WRITE, arena, ids, values, offset=offset)


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
    where = "copy_frames"
    check_rank(where, "arena", arena, 2)
    check_arena(where, arena, 0, arena.shape[1])
    check_rank(where, "sources", sources, 1)
    check_shape(where, "targets", targets, sources.shape)
    check_dtypes(where, INTS, sources=sources, targets=targets)
    return run("copy_frames", implementation, COPY, arena, sources, targets)


def check_arena(where: str, arena: jax.Array, offset: int, words: int) -> None:
    """Checks that this is an arena whose frames hold words [offset, offset + words)."""
    check_rank(where, "arena", arena, 2)
    check_dtypes(where, WORDS, arena=arena)
    if offset < 0 or words < 0 or offset + words > arena.shape[1]:
        raise ValueError(
            f"{where}: words [{offset}, {offset + words}) must lie within a frame of {arena.shape[1]}"
        )

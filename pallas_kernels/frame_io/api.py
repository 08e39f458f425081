"""Public entries of frame_io.

The arena is uint32[U, W]: frame u is row u, and frame 0 is the sink, where padding writes and nothing
reads. Ids are trusted: a device would clip one that lies outside silently.
"""

from __future__ import annotations

import jax

from pallas_kernels.arguments import check, check_words
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.frame_io import kernel, reference, xla
from pallas_kernels.frame_io.reference import Copy, Read, Write

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

"""The definitions, as plain indexing."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax

from pallas_kernels.arguments import INTS, WORDS


class Read(NamedTuple):
    """Arrays of `api.read_frames`."""

    arena: Annotated[jax.Array, WORDS, "frames words"]
    ids: Annotated[jax.Array, INTS, "..."]


class Write(NamedTuple):
    """Arrays of `api.write_frames`."""

    arena: Annotated[jax.Array, WORDS, "frames words"]
    ids: Annotated[jax.Array, INTS, "..."]
    values: Annotated[jax.Array, WORDS, "... written"]


class Copy(NamedTuple):
    """Arrays of `api.copy_frames`."""

    arena: Annotated[jax.Array, WORDS, "frames words"]
    sources: Annotated[jax.Array, INTS, "n"]
    targets: Annotated[jax.Array, INTS, "n"]


def read_frames_reference(arrays: Read, offset: int, words: int):
    """See `api.read_frames`."""
    arena, ids = arrays
    return arena[ids, offset : offset + words]


def write_frames_reference(arrays: Write, offset: int):
    """Row by row."""
    arena, ids, values = arrays
    flat = values.reshape(-1, values.shape[-1])
    for index, frame in enumerate(ids.reshape(-1)):
        arena = arena.at[frame, offset : offset + flat.shape[1]].set(flat[index])
    return arena


def copy_frames_reference(arrays: Copy):
    """See `api.copy_frames`: one after another."""
    arena, sources, targets = arrays
    for source, target in zip(sources, targets, strict=True):
        arena = arena.at[target].set(arena[source])
    return arena

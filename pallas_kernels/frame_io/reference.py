"""The definitions, as plain indexing."""

from __future__ import annotations

import jax


def read_frames_reference(arena: jax.Array, ids: jax.Array, offset: int, words: int):
    """See `api.read_frames`."""
    return arena[ids, offset : offset + words]


def write_frames_reference(arena: jax.Array, ids: jax.Array, values: jax.Array, offset: int):
    """Row by row."""
    flat = values.reshape(-1, values.shape[-1])
    for index, frame in enumerate(ids.reshape(-1)):
        arena = arena.at[frame, offset : offset + flat.shape[1]].set(flat[index])
    return arena


def copy_frames_reference(arena: jax.Array, sources: jax.Array, targets: jax.Array):
    """See `api.copy_frames`: one after another."""
    for source, target in zip(sources, targets, strict=True):
        arena = arena.at[target].set(arena[source])
    return arena

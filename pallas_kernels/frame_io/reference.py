"""The definitions, as plain indexing."""

from __future__ import annotations

import jax.numpy as jnp


def read_frames_reference(arena, ids, offset, words):
    return arena[ids, offset : offset + words]


def write_frames_reference(arena, ids, values, offset):
    """Row by row."""
    flat = values.reshape(-1, values.shape[-1])
    for index, frame in enumerate(ids.reshape(-1)):
        arena = arena.at[frame, offset : offset + flat.shape[1]].set(flat[index])
    return arena


def copy_frames_reference(arena, sources, targets):
    for source, target in zip(sources, targets, strict=True):
        arena = arena.at[target].set(arena[source])
    return arena


def update_tokens_reference(arena, values, table, base, begin, end, offset, page_tokens):
    rows, tokens, width = values.shape
    for row in range(rows):
        for index in range(tokens):
            position = base[row] + index
            frame = table[row, position // page_tokens]
            start = offset + (position % page_tokens) * width
            old = jnp.asarray(arena[frame])
            line = jnp.arange(arena.shape[1])
            inside = (line >= start) & (line < start + width)
            new = jnp.where(
                inside, jnp.roll(jnp.pad(values[row, index], (0, len(line) - width)), start), old
            )
            live = (position >= begin[row]) & (position < end[row])
            arena = arena.at[frame].set(jnp.where(live, new, old))
    return arena

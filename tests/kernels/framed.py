"""States that lie in frames of an arena."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def framed(state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """States [B, M, P, R] in an arena with a frame for each head: the arena, its table, and that all rows have one."""
    rows, heads = state.shape[:2]
    arena = jax.lax.bitcast_convert_type(state, jnp.uint32).reshape(rows * heads, -1)
    return arena, jnp.arange(rows * heads).reshape(rows, heads), jnp.ones(rows, bool)


def in_frames(state: jax.Array, per_frame: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """The states in shuffled frames of an arena whose other words are NaN, and the frames' table."""
    rows, heads, width, size = state.shape
    per_row, words = -(-heads // per_frame), width * size
    table = np.random.default_rng(seed).permutation(rows * per_row + 3)[: rows * per_row] + 1
    table = table.reshape(rows, per_row).astype(np.int32)
    arena = np.full((table.max() + 3, per_frame * words + 5), np.nan, np.float32)
    for row, ids in enumerate(table):
        flat = np.asarray(state[row]).reshape(heads, words)
        for place, frame in enumerate(ids):
            part = flat[place * per_frame : (place + 1) * per_frame].ravel()
            arena[frame, : part.size] = part
    return jnp.asarray(arena.view(np.uint32)), jnp.asarray(table)

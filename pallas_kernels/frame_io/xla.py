"""Dynamic slices, never gather or scatter: on a CPU those cost 20 to 50 times as much, and every write here
is one XLA can do in place. Indices stay two-dimensional, since a flat one passes 2^31 in a large arena."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.frame_io.reference import Copy, Read, Write

# Slices that are written out. More of them are a loop, which costs more per slice and less to compile.
UNROLL_LIMIT = 64


def read_frames_xla(arrays: Read, offset: int, words: int):
    """See `api.read_frames`."""
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
    """See `api.write_frames`."""
    arena, ids, values = arrays
    flat = ids.reshape(-1)
    lines = values.reshape(flat.shape[0], values.shape[-1])

    def put(i: jax.Array, arena: jax.Array):
        line = jax.lax.dynamic_slice(lines, (i, 0), (1, lines.shape[1]))
        return jax.lax.dynamic_update_slice(arena, line, (flat[i], offset))

    return repeat(flat.shape[0], put, arena)


def copy_frames_xla(arrays: Copy):
    """See `api.copy_frames`."""
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

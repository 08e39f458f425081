"""Dynamic slices, never gather or scatter: on a CPU those cost 20 to 50 times as much, and every write here
is one XLA can do in place. Indices stay two-dimensional, since a flat one passes 2^31 in a large arena."""

from __future__ import annotations

import jax
import jax.numpy as jnp

UNROLL_LIMIT = (
    64  # slices written out; above it a loop, which costs more per slice and less to compile
)


def read_frames_xla(arena, ids, offset, words):
    """See `api.read_frames`."""
    flat = ids.reshape(-1)
    count = flat.shape[0]
    if count <= UNROLL_LIMIT:
        parts = [jax.lax.dynamic_slice(arena, (flat[i], offset), (1, words)) for i in range(count)]
        return jnp.concatenate(parts).reshape(*ids.shape, words)

    def copy(i, out):
        part = jax.lax.dynamic_slice(arena, (flat[i], offset), (1, words))
        return jax.lax.dynamic_update_slice(out, part, (i, 0))

    out = jax.lax.fori_loop(0, count, copy, jnp.zeros((count, words), arena.dtype))
    return out.reshape(*ids.shape, words)


def write_frames_xla(arena, ids, values, offset):
    """See `api.write_frames`."""
    flat = ids.reshape(-1)
    lines = values.reshape(flat.shape[0], values.shape[-1])

    def put(i, arena):
        line = jax.lax.dynamic_slice(lines, (i, 0), (1, lines.shape[1]))
        return jax.lax.dynamic_update_slice(arena, line, (flat[i], offset))

    return _repeat(flat.shape[0], put, arena)


def copy_frames_xla(arena, sources, targets):
    """See `api.copy_frames`."""

    def copy(i, arena):
        line = jax.lax.dynamic_slice(arena, (sources[i], 0), (1, arena.shape[1]))
        return jax.lax.dynamic_update_slice(arena, line, (targets[i], 0))

    return _repeat(sources.shape[0], copy, arena)


def update_tokens_xla(arena, values, table, base, begin, end, offset, page_tokens):
    """See `api.update_tokens`: one token by its own slice, more by rewriting the pages they touch."""
    rows, tokens, width = values.shape
    if tokens == 1:
        live = (base >= begin) & (base < end)

        def put(row, arena):
            page, slot = base[row] // page_tokens, base[row] % page_tokens
            frame = jnp.where(live[row], table[row, jnp.minimum(page, table.shape[1] - 1)], 0)
            if isinstance(row, int):  # "slice": no name of XLA's own is like it (docs/design.md)
                line = jax.lax.slice_in_dim(values, row, row + 1)
            else:
                line = jax.lax.dynamic_slice(values, (row, 0, 0), (1, 1, width))
            return jax.lax.dynamic_update_slice(arena, line[0], (frame, offset + slot * width))

        return _repeat(rows, put, arena)

    segments = -(-tokens // page_tokens) + 1
    padded = jnp.pad(values, ((0, 0), (page_tokens, page_tokens), (0, 0)))

    def merge(i, arena):
        row, segment = i // segments, i % segments
        page = base[row] // page_tokens + segment
        position = page * page_tokens + jnp.arange(page_tokens)
        live = (position >= begin[row]) & (position < end[row])
        frame = jnp.where(live.any(), table[row, jnp.minimum(page, table.shape[1] - 1)], 0)
        shift = page * page_tokens - base[row] + page_tokens
        new = jax.lax.dynamic_slice(padded, (row, shift, 0), (1, page_tokens, width))[0]
        old = jax.lax.dynamic_slice(arena, (frame, offset), (1, page_tokens * width))
        merged = jnp.where(live[:, None], new, old.reshape(page_tokens, width))
        return jax.lax.dynamic_update_slice(arena, merged.reshape(1, -1), (frame, offset))

    return jax.lax.fori_loop(0, rows * segments, merge, arena)


def _repeat(count, body, arena):
    if count <= UNROLL_LIMIT:
        for i in range(count):
            arena = body(i, arena)
        return arena
    return jax.lax.fori_loop(0, count, body, arena)

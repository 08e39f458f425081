"""Queries, keys and values out of one projection, and keys and values to their pages, as XLA fuses them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.append_kv.reference import AppendArrays, AppendOptions
from pallas_kernels.frame_io import repeat
from pallas_kernels.operands import whole
from pallas_kernels.paged_attention.layout import pack
from pallas_kernels.rmsnorm.xla import rms_norm


def turns(positions: jax.Array, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32[B, T, F], of the angles positions int32[B, T] x frequencies float32[F] in radians."""
    angle = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first 2 F channels of x [B, T, N, H], in float32: channel j with channel j + F, by the angle of
    which cos and sin [B, T, F] are given (arXiv 2104.09864, halves in place of neighbours)."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    wide = x.astype(jnp.float32)
    low, high, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def split_heads(
    qkv: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    eps: float,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """qkv [B, T, >= (N + 2 K) H] to q [B, T, N, H] and k, v [B, T, K, H], q and k normed and rotated."""
    qkv = qkv.reshape(*qkv.shape[:2], -1, head_dim)
    ends = [num_heads, num_heads + num_kv_heads, num_heads + 2 * num_kv_heads]
    q, k, v, *_ = jnp.split(qkv, ends, axis=2)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    if cos is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, k, v


def append_kv_xla(arrays: AppendArrays, *, options: AppendOptions):
    """See `api.append_kv`."""
    qkv, *_, cos, sin, q_norm, k_norm = arrays
    layout, _, eps, dtype, _ = options
    qkv = whole(qkv, 3, dtype)
    q, k, v = split_heads(
        *(qkv, cos, sin, q_norm, k_norm, eps),
        num_heads=options.query_heads(qkv.shape[-1]),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
    )
    words, scales = pack(jnp.stack([k, v.astype(k.dtype)], axis=2), layout.dtype)
    records = words.reshape(*qkv.shape[:2], layout.token_words)
    arena = _updated(arrays, records, options, layout.offset)
    if scales is not None:
        records = scales.reshape(*qkv.shape[:2], layout.scale_words)
        arena = _updated(arrays._replace(arena=arena), records, options, layout.scale_offset)
    return q.astype(dtype), arena


def _updated(arrays: AppendArrays, values: jax.Array, options: AppendOptions, offset: int):
    """The arena with records uint32[B, T, w] at positions base + t, if in [begin, end), from a word of a frame on.

    One token goes by its own slice, more by rewriting the pages they touch: dynamic slices, as in `frame_io`.
    """
    _, arena, table, base, begin, end, *_ = arrays
    table = table[:, options.page_frame]
    page_tokens, (rows, tokens, width) = options.layout.page_tokens, values.shape
    if tokens == 1:
        live = (base >= begin) & (base < end)

        def put(row: jax.Array, arena: jax.Array):
            page, place = base[row] // page_tokens, base[row] % page_tokens
            frame = jnp.where(live[row], table[row, jnp.minimum(page, table.shape[1] - 1)], 0)
            if isinstance(row, int):  # "slice": no name of XLA's own is like it (docs/design.md)
                line = jax.lax.slice_in_dim(values, row, row + 1)
            else:
                line = jax.lax.dynamic_slice(values, (row, 0, 0), (1, 1, width))
            return jax.lax.dynamic_update_slice(arena, line[0], (frame, offset + place * width))

        return repeat(rows, put, arena)

    segments = -(-tokens // page_tokens) + 1
    padded = jnp.pad(values, ((0, 0), (page_tokens, page_tokens), (0, 0)))

    def merge(i: jax.Array, arena: jax.Array):
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

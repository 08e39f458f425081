"""Queries, keys and values out of one projection, and keys and values to their pages, as XLA fuses them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.append_kv.entries import append_entries
from pallas_kernels.append_kv.reference import AppendArrays, AppendOptions
from pallas_kernels.operands import summed
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
    *,
    cos: jax.Array | None,
    sin: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    eps: float,
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
    qkv = summed(qkv, 3, dtype)
    q, k, v = split_heads(
        qkv,
        cos=cos,
        sin=sin,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        num_heads=options.query_heads(qkv.shape[-1]),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
    )
    words, scales = pack(jnp.stack([k, v.astype(k.dtype)], axis=2), layout.dtype)
    table = arrays.table[:, options.page_frame]
    span = {"base": arrays.base, "begin": arrays.begin, "end": arrays.end}
    span["page_tokens"] = layout.page_tokens
    records = words.reshape(*qkv.shape[:2], layout.token_words)
    arena = append_entries(arrays.arena, records, table, offset=layout.offset, **span)
    if scales is not None:
        records = scales.reshape(*qkv.shape[:2], layout.scale_words)
        arena = append_entries(arena, records, table, offset=layout.scale_offset, **span)
    return q.astype(dtype), arena

"""The definition: rotations as products of complex numbers, tokens written one after another."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import FLOAT32, FLOATS, INTS, WORDS
from pallas_kernels.operands import as_parts
from pallas_kernels.paged_attention.layout import PageLayout, pack
from pallas_kernels.rmsnorm.reference import widest


class AppendArrays(NamedTuple):
    """Arrays of `api.append_kv`.

    Attributes:
        qkv: [B, T, >= (N + 2 K) H], heads of queries, keys, values; or parts float32[S, B, T, ...], whose sum is
            rounded to `AppendOptions.dtype` (`operands.summed`).
        arena: uint32[U, W]. table: int32[B, frames_per_page, pages] frames of each page, trusted.
        base: int32[B]; token t of row b lies at base[b] + t.
        begin, end: int32[B]; only positions in [begin, end) are written, all of them within [base, base + T) and
            within the table.
        cos, sin: float32[B, T, F] of the angles by which channels j and j + F of queries and keys are rotated
            (arXiv 2104.09864; `heads.turns` makes them), both or none.
        q_norm, k_norm: [H] weights of a norm of each head before that, both or none.
    """

    qkv: Annotated[jax.Array, FLOATS, "parts? B T columns"]
    arena: Annotated[jax.Array, WORDS, "frames words"]
    table: Annotated[jax.Array, INTS, "B frames_per_page pages"]
    base: Annotated[jax.Array, INTS, "B"]
    begin: Annotated[jax.Array, INTS, "B"]
    end: Annotated[jax.Array, INTS, "B"]
    cos: Annotated[jax.Array | None, FLOAT32, "None B T F"] = None
    sin: Annotated[jax.Array | None, FLOAT32, "None B T F"] = None
    q_norm: Annotated[jax.Array | None, FLOATS, "None H"] = None
    k_norm: Annotated[jax.Array | None, FLOATS, "None H"] = None


class AppendOptions(NamedTuple):
    """What a program of `api.append_kv` is made for, besides shapes.

    Attributes:
        layout: where the layer's keys and values lie. page_frame: in which frame of each page.
        eps: of the norm of heads.
        dtype: of the queries, and of what is rounded on the way.
        num_heads: N, where other columns stand after those of the values, or where there are no queries; None if
            queries, keys and values are all.
    """

    layout: PageLayout
    page_frame: int = 0
    eps: float = 0.0
    dtype: jnp.dtype = jnp.dtype("float32")
    num_heads: int | None = None

    def query_heads(self, columns: int) -> int:
        """N of a projection that has so many columns."""
        if self.num_heads is not None:
            return self.num_heads
        return columns // self.layout.head_dim - 2 * self.layout.num_kv_heads


def append_kv_reference(arrays: AppendArrays, *, options: AppendOptions):
    """See `api.append_kv`."""
    qkv, arena, table, base, begin, end, cos, sin, q_norm, k_norm = arrays
    layout, page_frame, eps, dtype, _ = options
    parts = as_parts(qkv, 3).astype(jnp.float32)
    rows, tokens, columns = parts.shape[1:]
    heads = sum(parts[1:], parts[0]).astype(dtype).reshape(rows, tokens, -1, layout.head_dim)
    first_k = options.query_heads(columns)
    first_v = first_k + layout.num_kv_heads
    q, k = heads[:, :, :first_k], heads[:, :, first_k:first_v]
    v = heads[:, :, first_v : first_v + layout.num_kv_heads]
    q, k = _normed(q, q_norm, eps), _normed(k, k_norm, eps)
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    words, scales = pack(jnp.stack([k, v.astype(k.dtype)], axis=2), layout.dtype)
    places = [(layout.offset, words.reshape(rows, tokens, layout.token_words))]
    if scales is not None:
        places.append((layout.scale_offset, scales.reshape(rows, tokens, layout.scale_words)))
    table = table[:, page_frame]

    def put(i: jax.Array, arena: jax.Array):
        row, index = i // tokens, i % tokens
        position = base[row] + index
        frame = table[row, position // layout.page_tokens]
        new = arena[frame]
        for offset, records in places:
            start = offset + position % layout.page_tokens * records.shape[2]
            new = jax.lax.dynamic_update_slice(new, records[row, index], (start,))
        live = (position >= begin[row]) & (position < end[row])
        return arena.at[frame].set(jnp.where(live, new, arena[frame]))

    return q.astype(dtype), jax.lax.fori_loop(0, rows * tokens, put, arena)


def _normed(x: jax.Array, weight: jax.Array | None, eps: float):
    if weight is None:
        return x
    wide = x.astype(jnp.float32)
    square = jnp.sum(wide * wide, axis=-1, keepdims=True) / x.shape[-1]
    dtype = widest(x.dtype, weight.dtype)
    return (wide / jnp.sqrt(square + eps)).astype(dtype) * weight.astype(dtype)


def _rotated(x: jax.Array, cos: jax.Array | None, sin: jax.Array | None):
    if cos is None:
        return x
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    turn = jax.lax.complex(cos, sin)[:, :, None]
    turned = jax.lax.complex(wide[..., :half], wide[..., half : 2 * half]) * turn
    turned = jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)

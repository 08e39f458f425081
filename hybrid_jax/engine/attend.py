"""Attention over pages, which is the same for every step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import Attention
from hybrid_jax.geometry import Geometry, KVPlace
from hybrid_jax.layers import attention
from hybrid_jax.layers.cut import CutInput, MixerInput, dtype_of, own_input, size_of
from hybrid_jax.state import Model
from pallas_kernels.append_kv import AppendArrays, AppendOptions, append_kv
from pallas_kernels.paged_attention import AttentionArrays, AttentionOptions, paged_attention
from pallas_kernels.paged_attention.layout import PageLayout
from pallas_kernels.paged_attention.reference import depths


def page_layout(spec: Attention, place: KVPlace, geometry: Geometry) -> PageLayout:
    """Where an attention layer has its keys and values in its frame of a page."""
    return PageLayout(
        offset=place.offset,
        page_tokens=geometry.page_tokens,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=geometry.kv_dtype,
    )


def attend_pages(
    params: dict,
    h: MixerInput,
    arena: jax.Array,
    table: jax.Array,
    base: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    place: KVPlace,
    spec: Attention,
    model: Model,
    ancestors: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One attention layer: writes the new tokens' K and V to their pages, then reads everything from pages.

    Args:
        h: [B, T, D] normed inputs; token t of row b lies at base[b] + t. A layer without an input of its own only
            writes, and one that reads the keys and values of its group writes none.
        table: int32[B, frames_per_page, pages]. begin, end: int32[B] positions [begin, end) are new and real.
        place: where this layer has its K and V. ancestors: as in `WindowRows`.

    Returns:
        out [B, T, D], or parts of it for a kernel to sum, and the arena.
        Where a layer only writes, out means nothing.
    """
    layout = page_layout(spec, place, model.geometry)
    offsets, dtype = jnp.arange(size_of(h)[1]), dtype_of(h)
    positions = base[:, None] + (offsets if ancestors is None else depths(ancestors, offsets))
    if isinstance(h, CutInput) and spec.source == "group":
        q, qkv = attention.queries(params, h, positions, spec)
    else:
        reads = own_input(h) is not None
        qkv = attention.joined(params, h, spec)
        new = AppendArrays(
            *(qkv, arena, table, base, begin, end),
            **attention.norms_and_rotation(params, positions, spec),
        )
        options = AppendOptions(
            layout,
            page_frame=place.frame,
            eps=spec.qk_norm_eps,
            dtype=dtype,
            num_heads=spec.num_heads if reads else 0,
        )
        q, arena = append_kv(new, options=options, implementation=model.backend.kernels)
        if not reads:
            return jnp.zeros((), dtype), arena
    y = paged_attention(
        AttentionArrays(q, arena, table, base, end, ancestors),
        options=AttentionOptions(
            layout=layout,
            scale=spec.softmax_scale,
            page_frame=place.frame,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            dtype=dtype,
        ),
        implementation=model.backend.kernels,
    )
    return attention.output(params, y, qkv, spec), arena

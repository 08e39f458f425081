"""Attention over pages of keys and values, the same on either backend: the kernels are chosen one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import Attention
from hybrid_jax.engine.mixers.mixer import PagedSteps, Span
from hybrid_jax.geometry import Geometry, KVPlace
from hybrid_jax.layers import attention
from hybrid_jax.layers.cut import CutInput, MixerInput, dtype_of, own_input, size_of
from hybrid_jax.state import Model, State
from pallas_kernels.append_kv import AppendArrays, AppendOptions, append_kv
from pallas_kernels.paged_attention import AttentionArrays, AttentionOptions, paged_attention
from pallas_kernels.paged_attention.layout import PageLayout
from pallas_kernels.paged_attention.reference import depths


class AttentionSteps(PagedSteps[Attention]):
    """Keys and values, on kernels for both.

    A layer that shares those of its group has the group's place, and writes none.
    """

    def attend(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: KVPlace,
        span: Span,
        spec: Attention,
        model: Model,
    ) -> tuple[jax.Array, State]:
        layout, arena = _page_layout(spec, at.offset, model.geometry), state.arena
        table, base, begin, end, ancestors = span
        offsets, dtype = jnp.arange(size_of(h)[1]), dtype_of(h)
        positions = base[:, None] + (offsets if ancestors is None else depths(ancestors, offsets))
        if isinstance(h, CutInput) and spec.source == "group":
            q, qkv = attention.queries(params, h, positions, spec)
        else:
            reads = own_input(h) is not None
            qkv = attention.joined(params, h, spec)
            new = AppendArrays(
                qkv=qkv,
                arena=arena,
                table=table,
                base=base,
                begin=begin,
                end=end,
                **attention.norms_and_rotation(params, positions, spec),
            )
            options = AppendOptions(
                layout,
                page_frame=at.frame,
                eps=spec.qk_norm_eps,
                dtype=dtype,
                num_heads=spec.num_heads if reads else 0,
            )
            q, arena = append_kv(new, options=options, implementation=model.backend.kernels)
            if not reads:
                return jnp.zeros((), dtype), state.replace(arena=arena)
        y = paged_attention(
            AttentionArrays(q, arena, table, base, end, ancestors),
            options=AttentionOptions(
                layout=layout,
                scale=spec.softmax_scale,
                page_frame=at.frame,
                sliding_window=spec.sliding_window,
                soft_cap=spec.soft_cap,
                dtype=dtype,
            ),
            chip=model.backend.chip,
            implementation=model.backend.runs("attention"),
        )
        return attention.output(params, y, qkv, spec), state.replace(arena=arena)


def _page_layout(spec: Attention, offset: int, geometry: Geometry) -> PageLayout:
    return PageLayout(
        offset=offset,
        page_tokens=geometry.page_tokens,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=geometry.kv_dtype,
    )

"""Attention over pages of keys and values, the same on either backend: the kernels are chosen one by one."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import Attention, EngineConfig
from hybrid_jax.engine.mixers.mixer import (
    Chunked,
    ChunkPlan,
    Entry,
    LayerSteps,
    Windowed,
    WindowPlan,
)
from hybrid_jax.geometry import Geometry, KVPlace
from hybrid_jax.layers import attention
from hybrid_jax.layers.cut import CutInput, MixerInput, dtype_of, own_input, size_of
from hybrid_jax.state import Model, State
from pallas_kernels.append_kv import AppendArrays, AppendOptions, append_kv
from pallas_kernels.paged_attention import AttentionArrays, AttentionOptions, paged_attention
from pallas_kernels.paged_attention.kernel import why_unsupported
from pallas_kernels.paged_attention.layout import PageLayout
from pallas_kernels.paged_attention.reference import depths


class Span(NamedTuple):
    """Where T tokens of B rows lie: token t of row b at position base[b] + t.

    Attributes:
        table: int32[B, frames_per_page, pages]. base: int32[B].
        begin, end: int32[B] positions [begin, end) are new and real.
        ancestors: as in `WindowRows`.
    """

    table: jax.Array
    base: jax.Array
    begin: jax.Array
    end: jax.Array
    ancestors: jax.Array | None = None


class AttentionSteps(LayerSteps[Attention, KVPlace]):
    """A layer writes the keys and values of new tokens to their pages, then reads all from pages.

    A layer that shares those of its group has the group's place, and writes none.
    """

    def window(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: KVPlace,
        plan: WindowPlan,
        spec: Attention,
    ) -> Windowed:
        rows = plan.rows
        span = Span(rows.table, rows.base, rows.begin, rows.end, rows.ancestors)
        out, state = _attend(params, h, state, at, span, spec, plan.model)
        # In exact mode its table waited for reads of the rings, and XLA may make it again when it is used.
        return Windowed(out, state, awaited=plan.aligned)

    def reread(
        self,
        params: dict,
        h: CutInput,
        state: State,
        at: KVPlace,
        plan: WindowPlan,
        entries: dict[str, Entry],
        spec: Attention,
    ) -> Windowed:
        return self.window(params, h, state, at, plan, spec)

    def chunk(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: KVPlace,
        plan: ChunkPlan,
        spec: Attention,
    ) -> Chunked:
        rows = plan.rows
        span = Span(rows.table, rows.start, rows.start, rows.start + rows.length)
        out, state = _attend(params, h, state, at, span, spec, plan.model)
        return Chunked(out, state, awaited=True)

    def rescan(
        self,
        params: dict,
        h: CutInput,
        state: State,
        at: KVPlace,
        plan: ChunkPlan,
        stream: None,
        spec: Attention,
    ) -> jax.Array:
        return self.chunk(params, h, state, at, plan, spec).out

    def why_unsupported(
        self, spec: Attention, geometry: Geometry, engine: EngineConfig
    ) -> str | None:
        return why_unsupported(_page_layout(spec, 0, geometry))


def _page_layout(spec: Attention, offset: int, geometry: Geometry) -> PageLayout:
    return PageLayout(
        offset=offset,
        page_tokens=geometry.page_tokens,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=geometry.kv_dtype,
    )


def _attend(
    params: dict,
    h: MixerInput,
    state: State,
    at: KVPlace,
    span: Span,
    spec: Attention,
    model: Model,
) -> tuple[jax.Array, State]:
    """What a layer makes of tokens h [B, T, D]: out [B, T, D], or parts of it for a kernel to sum, and the state.

    Where a layer only writes, out means nothing.
    """
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
        num_sms=model.backend.num_sms,
        implementation=model.backend.kernels,
    )
    return attention.output(params, y, qkv, spec), state.replace(arena=arena)

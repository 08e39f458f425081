"""Gated short convolutions for XLA: there is no state beside the columns, which are kept as for every kind."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hybrid_jax.config import ShortConv
from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.columns import Convolution, WithColumns, convolve_window, fold_layers
from hybrid_jax.engine.mixers.mixer import (
    Chunked,
    ChunkPlan,
    Entry,
    FoldRows,
    Tail,
    Windowed,
    WindowPlan,
)
from hybrid_jax.engine.rings import ring_bits, slice_tokens
from hybrid_jax.geometry import StatePlace
from hybrid_jax.layers import short_conv
from hybrid_jax.state import Model, State, from_bits


class ShortConvSteps(WithColumns[ShortConv], Convolution[ShortConv]):
    """`StateSteps` of this kind."""

    def project(self, params: dict, h: jax.Array, spec: ShortConv) -> tuple[jax.Array, jax.Array]:
        return short_conv.project(params, h, spec)

    def convolve(self, params: dict, columns: jax.Array, spec: ShortConv) -> jax.Array:
        return short_conv.convolve(params, columns, spec)

    def prepare(self, params: Sequence[dict]) -> None:
        """Nothing, because a fold needs no weights."""

    def window(
        self,
        params: dict,
        h: jax.Array,
        state: State,
        at: StatePlace,
        plan: WindowPlan,
        spec: ShortConv,
    ) -> Windowed:
        conv = state.rings[at.group]["conv"][at.layer][: h.shape[0]]
        y, C, moved = convolve_window(self, params, h, conv, at.of(plan.model.geometry), plan)
        return Windowed(short_conv.output(params, y, C), state, moved)

    def chunk(
        self,
        params: dict,
        h: jax.Array,
        state: State,
        at: StatePlace,
        plan: ChunkPlan,
        spec: ShortConv,
    ) -> Chunked:
        rows, model = plan
        group, exists = at.of(model.geometry), rows.start > 0
        before = frames.read_columns(state.arena, rows.read, exists, at.layer, group, model)
        raw, C = self.project(params, h, spec)
        valid = jnp.arange(h.shape[1]) < rows.length[:, None]
        raw = jnp.where(valid[..., None], raw, 0)
        columns = jnp.concatenate([from_bits(before).astype(raw.dtype), raw], axis=1)
        y = self.convolve(params, columns, spec)
        last, end = (
            ring_bits(slice_tokens(columns, count, group.layout.columns), model)
            for count in (rows.length, rows.state_len)
        )
        tail = Tail({"conv": Entry(last)}, end, None)
        return Chunked(short_conv.output(params, y, C), state, tail)

    def fold(self, state: State, group: int, rows: FoldRows, shared: None, model: Model) -> State:
        return fold_layers(state, group, rows, None, model)

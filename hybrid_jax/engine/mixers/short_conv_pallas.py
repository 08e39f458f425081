"""Gated short convolutions on Pallas kernels, which read and write rings and checkpoints where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from hybrid_jax.config import EngineConfig, ShortConv
from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.columns_pallas import WithPallasColumns, fold_columns
from hybrid_jax.engine.mixers.mixer import Chunked, ChunkPlan, FoldRows, Windowed, WindowPlan
from hybrid_jax.geometry import Geometry, StatePlace
from hybrid_jax.products.matrix import product
from hybrid_jax.state import Model, State
from pallas_kernels.short_conv import (
    ShortTail,
    ShortWindow,
    short_conv,
    short_conv_window,
    store_short_tail,
)
from pallas_kernels.short_conv.kernel import window_unsupported


class ShortConvPallas(WithPallasColumns[ShortConv]):
    """See `StateSteps`."""

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
        rows = plan.rows
        projected = product(h, params["in_proj"], params.get("in_bias"), out="parts")
        arrays = ShortWindow(
            *(projected, params["conv"], params.get("conv_bias"), state.rings[at.group]["conv"]),
            first=rows.num_known,
            num_valid=rows.num_valid,
            ancestors=rows.ancestors,
        )
        conv, y = short_conv_window(
            arrays, layer=at.layer, moves=plan.commits, implementation="pallas"
        )
        out = product(y, params["out_proj"], params.get("out_bias"), out="parts")
        return Windowed(out, state.with_ring(at.group, conv=conv))

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
        projected = product(h, params["in_proj"], params.get("in_bias"))
        history = frames.read_columns(state.arena, rows.read, exists, at.layer, group, model)
        given = (projected, history, params["conv"], params.get("conv_bias"), rows.length)
        y = short_conv(*given, implementation="pallas")
        tail = ShortTail(
            *(state.arena, state.rings[at.group]["conv"], projected, history),
            *(rows.write[:, group.columns], rows.row, rows.length, rows.state_len),
        )
        arena, conv = store_short_tail(tail, layer=at.layer, implementation="pallas")
        state = state.replace(arena=arena).with_ring(at.group, conv=conv)
        return Chunked(product(y, params["out_proj"], params.get("out_bias"), out="parts"), state)

    def fold(self, state: State, group: int, rows: FoldRows, shared: None, model: Model) -> State:
        folds = rows.lengths(model.geometry.grain)
        return fold_columns(state, group, rows, folds, model)

    def why_unsupported(
        self, spec: ShortConv, geometry: Geometry, engine: EngineConfig
    ) -> str | None:
        return window_unsupported(engine.window_tokens)

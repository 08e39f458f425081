"""Gated short convolutions on Pallas kernels, which read and write rings and checkpoints where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from hybrid_jax.config import EngineConfig, ShortConv
from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.columns_pallas import WithPallasColumns, fold_columns
from hybrid_jax.engine.mixers.mixer import (
    Chunked,
    ChunkPlan,
    FoldRows,
    Windowed,
    WindowPlan,
    WindowRows,
)
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


def new_tokens(rows: WindowRows) -> dict[str, jax.Array | None]:
    """Which tokens of a window are new, and how they branch, as kernels take it."""
    return {
        "first": rows.num_known,
        "num_valid": rows.num_valid,
        "ancestors": rows.ancestors,
    }


def short_window(
    params: dict,
    projected: jax.Array,
    state: State,
    at: StatePlace,
    plan: WindowPlan,
    new: dict[str, jax.Array | None],
    *,
    gated: bool = True,
) -> tuple[jax.Array, State]:
    """Convolves the new tokens of a window, as in_proj gave them, and puts their columns into the ring.

    `new` says which tokens these are.
    """
    arrays = ShortWindow(
        projected=projected,
        weight=params["conv"],
        bias=params.get("conv_bias"),
        conv=state.rings[at.group]["conv"],
        **new,
    )
    conv, y = short_conv_window(
        arrays, layer=at.layer, moves=plan.commits, gated=gated, implementation="pallas"
    )
    return y, state.with_ring(at.group, conv=conv)


def short_tail(
    projected: jax.Array,
    history: jax.Array,
    state: State,
    at: StatePlace,
    plan: ChunkPlan,
    *,
    gated: bool = True,
) -> State:
    """Leaves the last columns of a chunk in its ring row, and those before its checkpoint in the arena."""
    rows, model = plan
    tail = ShortTail(
        arena=state.arena,
        conv=state.rings[at.group]["conv"],
        projected=projected,
        history=history,
        frames=rows.write[:, at.of(model.geometry).columns],
        rows=rows.row,
        lengths=rows.length,
        state_lengths=rows.state_len,
    )
    arena, conv = store_short_tail(tail, layer=at.layer, gated=gated, implementation="pallas")
    return state.replace(arena=arena).with_ring(at.group, conv=conv)


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
        projected = product(h, params["in_proj"], params.get("in_bias"), out="parts")
        y, state = short_window(params, projected, state, at, plan, new_tokens(plan.rows))
        out = product(y, params["out_proj"], params.get("out_bias"), out="parts")
        return Windowed(out, state)

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
        state = short_tail(projected, history, state, at, plan)
        return Chunked(product(y, params["out_proj"], params.get("out_bias"), out="parts"), state)

    def fold(self, state: State, group: int, rows: FoldRows, shared: None, model: Model) -> State:
        folds = rows.lengths(model.geometry.grain)
        return fold_columns(state, group, rows, folds, model)

    def why_unsupported(
        self, spec: ShortConv, geometry: Geometry, engine: EngineConfig
    ) -> str | None:
        return window_unsupported(engine.window_tokens)

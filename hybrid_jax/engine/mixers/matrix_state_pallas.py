"""Mixers whose state is a matrix for each head (`layers.matrix_state`), on Pallas kernels.

They read and write arena and rings where they lie. A layer updates its ring where it computes, so nothing is left for
the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.columns_pallas import WithPallasColumns, fold_columns
from hybrid_jax.engine.mixers.mixer import (
    Chunked,
    ChunkPlan,
    CommitRows,
    FoldRows,
    Spec,
    Windowed,
    WindowPlan,
    WindowRows,
)
from hybrid_jax.engine.mixers.replay import Scanned
from hybrid_jax.engine.rings import move_records
from hybrid_jax.geometry import Geometry, StatePlace, ring_specs
from hybrid_jax.layers.cut import CutInput, MixerInput, dtype_of, within_cut
from hybrid_jax.layers.matrix_state import MatrixState
from hybrid_jax.products.matrix import Out, product
from hybrid_jax.state import Model, State
from pallas_kernels.causal_conv import ConvWindow, causal_conv, causal_conv_window
from pallas_kernels.causal_conv.kernel import why_unsupported as conv_unsupported
from pallas_kernels.records import ProjectionLayout
from pallas_kernels.ssd_scan import ScanTail, store_tail
from pallas_kernels.ssd_window import FoldFrames, fold_frames


class ChunkInputs(NamedTuple):
    """A chunk in front of the scan.

    Attributes:
        made: [R, T, E] what is convolved and activated: v, k, q. dt: float32[R, T, M] step sizes.
        projected: [R, T, columns] what in_proj gives, or the cut's projection. layout: of all these.
        reads: whether outputs are asked for.
    """

    made: jax.Array
    dt: jax.Array
    projected: jax.Array
    layout: ProjectionLayout
    reads: bool


class Made(NamedTuple):
    """What a scan makes of a chunk.

    Attributes:
        y: [R, T, M P], if it reads. records: [R, T, >= M P + G R] with u and k in front.
        arena: with the checkpoints after the chunk. stream: as in `Chunked`.
    """

    y: jax.Array | None
    records: jax.Array
    arena: jax.Array
    stream: Scanned | None = None


class MatrixPallas(WithPallasColumns[Spec]):
    """A kind calls its kernels in `read` and `scan`. All else is the same."""

    equations: MatrixState[Any]

    def read(
        self,
        params: dict,
        made: Sequence[jax.Array],
        state: State,
        at: StatePlace,
        plan: WindowPlan,
    ) -> tuple[jax.Array, State]:
        """What the tokens of a window read: y [B, T, M, P]. A record that follows from the state goes into its ring.

        Args:
            made: what `causal_conv_window` makes beside the rings, which are in `state` already.
        """
        raise NotImplementedError

    def scan(
        self, params: dict, chunk: ChunkInputs, state: State, at: StatePlace, plan: ChunkPlan
    ) -> Made:
        """Scans a chunk from the checkpoints before it, and writes those after it."""
        raise NotImplementedError

    def reasons(
        self, spec: Spec, layout: ProjectionLayout, slots: int, geometry: Geometry
    ) -> Sequence[str | None]:
        """Why its kernels cannot run, of each one, with rings of so many slots."""
        raise NotImplementedError

    def prepare(self, params: Sequence[dict]) -> Any:
        return self.equations.prepare(params)

    def window(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: StatePlace,
        plan: WindowPlan,
        spec: Spec,
    ) -> Windowed:
        ring = state.rings[at.group]
        layout = within_cut(self.equations.layout(spec), h)
        gates, projected = projected_of(params, h, out="parts")
        arrays = ConvWindow(
            projected=projected,
            weight=params["conv"],
            bias=params.get("conv_bias"),
            dt_bias=params["dt_bias"],
            xB=ring["uk"],
            dt=ring["dt"],
            conv=ring["conv"],
            first=plan.rows.num_known,
            **places(plan.rows),
        )
        conv, uk, dt, *made = causal_conv_window(
            arrays, layer=at.layer, layout=layout, moves=plan.commits, implementation="pallas"
        )
        state = state.with_ring(at.group, conv=conv, uk=uk, dt=dt)
        y, state = self.read(params, made, state, at, plan)
        assert gates is not None, "every mixer of a window reads"
        return Windowed(self.output(params, y, gates, spec), state)

    def chunk(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: StatePlace,
        plan: ChunkPlan,
        spec: Spec,
    ) -> Chunked:
        # The scan and the chunk's end take no columns of others.
        h = h.alone() if isinstance(h, CutInput) else h
        rows, model = plan
        group, ring, exists = at.of(model.geometry), state.rings[at.group], rows.start > 0
        layout = within_cut(self.equations.layout(spec), h)
        gates, projected = projected_of(params, h)
        history = frames.read_columns(state.arena, rows.read, exists, at.layer, group, model)
        made, dt = causal_conv(
            projected=projected,
            history=history,
            weight=params["conv"],
            bias=params.get("conv_bias"),
            dt_bias=params["dt_bias"],
            lengths=rows.length,
            layout=layout,
            implementation="pallas",
        )
        chunk = ChunkInputs(made, dt, projected, layout, gates is not None)
        y, records, arena, stream = self.scan(params, chunk, state, at, plan)
        tail = ScanTail(
            arena=arena,
            conv=ring["conv"],
            xB=ring["uk"],
            dt=ring["dt"],
            projected=projected,
            history=history,
            xBC=records,
            steps=dt,
            frames=rows.write[:, group.columns],
            rows=rows.row,
            lengths=rows.length,
            state_lengths=rows.state_len,
        )
        arena, conv, uk, dt = store_tail(
            tail, layer=at.layer, layout=layout, implementation="pallas"
        )
        state = state.with_ring(at.group, conv=conv, uk=uk, dt=dt)
        if gates is None:
            return Chunked(jnp.zeros((), dtype_of(h)), state.replace(arena=arena))
        # The tail first: the projection and the records are then free before the next block.
        y, arena = jax.lax.optimization_barrier((y, arena))
        out = self.output(params, y, gates, spec)
        return Chunked(out, state.replace(arena=arena), stream=stream)

    def output(self, params: dict, y: jax.Array, projected: jax.Array, spec: Spec) -> jax.Array:
        """Norm of y [B, T, ...], the gates in front of `projected`, and out_proj. Both products may come in parts."""
        y = y.reshape(*y.shape[:2], -1)
        y = self.equations.gate(params, y, projected, spec, "pallas")
        return product(y, params["out_proj"], params.get("out_bias"), out="parts")

    def commit(self, state: State, group: int, rows: CommitRows, model: Model) -> State:
        """Moves the records of a path together, too."""
        return move_records(super().commit(state, group, rows, model), group, rows)

    def fold(
        self, state: State, group: int, rows: FoldRows, shared: jax.Array, model: Model
    ) -> State:
        """Folds with two launches for all rows and layers."""
        own, ring = model.geometry.groups[group], state.rings[group]
        layout = self.equations.layout(own.layout.spec)
        folds = rows.lengths(model.geometry.grain)
        read, write = (
            frames.slot_frames(state, slot)[:, own.first_frame :]
            for slot in (rows.read_slot, rows.write_slot)
        )
        exists = (rows.checkpoint > 0).astype(jnp.int32)
        arrays = FoldFrames(folds, ring["uk"], ring["dt"], shared, state.arena, read, write, exists)
        arena = fold_frames(
            arrays,
            records=layout,
            per_layer=own.frames_per_layer,
            scaled=not layout.delta,
            implementation="pallas",
        )
        return fold_columns(state.replace(arena=arena), group, rows, folds, model)

    def why_unsupported(self, spec: Spec, geometry: Geometry, engine: EngineConfig) -> str | None:
        layout = self.equations.layout(spec)
        rings = ring_specs(geometry, num_rows=1, window=engine.decode_tokens, aligned=engine.exact)
        slots = max(ring["uk"].shape[2] for ring in rings if "uk" in ring)
        reasons = self.reasons(spec, layout, slots, geometry)
        reasons = (conv_unsupported(layout, engine.window_tokens), *reasons)
        return next((reason for reason in reasons if reason is not None), None)


def places(rows: WindowRows) -> dict[str, jax.Array | None]:
    """Where a window's tokens stand, as kernels take it."""
    return {"starts": rows.starts, "num_valid": rows.num_valid, "ancestors": rows.ancestors}


def projected_of(
    params: dict, h: MixerInput, *, out: Out = "whole"
) -> tuple[jax.Array | None, jax.Array]:
    """What has the gates in front, if they are needed, and what has the columns of all else; `out` as of `product`."""
    weights, bias = params["in_proj"], params.get("in_bias")
    if not isinstance(h, CutInput):
        projected = product(h, weights, bias, out=out)
        return projected, projected
    gates = None if h.own is None else product(h.own, weights, bias, out=out)
    return gates, h.projected

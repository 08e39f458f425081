"""Gated delta nets on Pallas kernels, which read and write arena and rings where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hybrid_jax.config import EngineConfig, GatedDelta
from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.mixer import Chunked, ChunkPlan, FoldRows, Windowed, WindowPlan
from hybrid_jax.engine.mixers.replay_pallas import ReplayPallas, fold_records, projected_of
from hybrid_jax.geometry import Geometry, StatePlace, ring_specs
from hybrid_jax.layers import gated_delta
from hybrid_jax.layers.cut import CutInput, MixerInput, dtype_of, within_cut
from hybrid_jax.products.matrix import product
from hybrid_jax.state import Model, State
from pallas_kernels.causal_conv import ConvWindow, causal_conv, causal_conv_window
from pallas_kernels.causal_conv.kernel import why_unsupported as conv_unsupported
from pallas_kernels.gated_delta import (
    DeltaRings,
    DeltaScanFrames,
    gated_delta_scan_frames,
    gated_delta_window_rings,
)
from pallas_kernels.gated_delta.scan_kernel import why_unsupported as scan_unsupported
from pallas_kernels.gated_delta.window_kernel import why_unsupported as window_unsupported
from pallas_kernels.rmsnorm.kernel import gated_unsupported
from pallas_kernels.ssd_scan import Tail, store_tail
from pallas_kernels.ssd_window.kernel import why_unsupported as fold_unsupported


class GatedDeltaPallas(ReplayPallas[GatedDelta]):
    """See `StateSteps`."""

    def prepare(self, params: Sequence[dict]) -> jax.Array:
        """Decay rates float32[L, M]."""
        return jnp.stack([gated_delta.decay_rates(weights) for weights in params])

    def window(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: StatePlace,
        plan: WindowPlan,
        spec: GatedDelta,
    ) -> Windowed:
        rows, ring, group = plan.rows, state.rings[at.group], at.of(plan.model.geometry)
        layout = within_cut(gated_delta.layout_of(spec), h)
        gates, projected = projected_of(params, h, out="parts")
        first = jnp.maximum(rows.begin - rows.base, 0)
        here = {
            "starts": rows.base - rows.checkpoint,
            "num_valid": jnp.maximum(rows.end - rows.base, 0),
            "ancestors": rows.ancestors,
        }
        arrays = ConvWindow(
            *(projected, params["conv"], params.get("conv_bias"), params["dt_bias"]),
            *(ring["uk"], ring["dt"], ring["conv"]),
            first=first,
            **here,
        )
        conv, uk, dt, q, scores, v, beta = causal_conv_window(
            arrays, layer=at.layer, layout=layout, moves=plan.commits, implementation="pallas"
        )
        y, uk = gated_delta_window_rings(
            DeltaRings(
                *(q, v, beta, scores, uk, dt, plan.shared[at.group]),
                *(state.arena, plan.frames, plan.exists.astype(jnp.int32)),
                num_known=first,
                **here,
            ),
            layer=at.layer,
            first_frame=group.state_frame(at.layer),
            records=layout,
            dtype=dtype_of(h),
            implementation="pallas",
        )
        state = state.with_ring(at.group, conv=conv, uk=uk, dt=dt)
        assert gates is not None, "every mixer of a window reads"
        return Windowed(_output(params, y, gates, spec), state)

    def chunk(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: StatePlace,
        plan: ChunkPlan,
        spec: GatedDelta,
    ) -> Chunked:
        # The scan and the chunk's end take no columns of others.
        h = h.alone() if isinstance(h, CutInput) else h
        rows, model = plan
        group, ring, exists = at.of(model.geometry), state.rings[at.group], rows.start > 0
        layout = within_cut(gated_delta.layout_of(spec), h)
        gates, projected = projected_of(params, h)
        history = frames.read_columns(state.arena, rows.read, exists, at.layer, group, model)
        vkq, dt = causal_conv(
            *(projected, history, params["conv"], params.get("conv_bias"), params["dt_bias"]),
            rows.length,
            layout=layout,
            implementation="pallas",
        )
        chunk = DeltaScanFrames(
            *(vkq, dt, gated_delta.decay_rates(params), projected, state.arena),
            *(rows.read, rows.write, exists.astype(jnp.int32), rows.length, rows.state_len),
        )
        y, ukq, arena = gated_delta_scan_frames(
            chunk, records=layout, first_frame=group.state_frame(at.layer), implementation="pallas"
        )
        tail = Tail(
            *(arena, ring["conv"], ring["uk"], ring["dt"], projected, history, ukq, dt),
            *(rows.write[:, group.columns], rows.row, rows.length, rows.state_len),
        )
        arena, conv, uk, dt = store_tail(
            tail, layer=at.layer, layout=layout, implementation="pallas"
        )
        state = state.with_ring(at.group, conv=conv, uk=uk, dt=dt)
        if gates is None:
            return Chunked(jnp.zeros((), dtype_of(h)), state.replace(arena=arena))
        # The tail first: the projection and the records are then free before the next block.
        y, arena = jax.lax.optimization_barrier((y, arena))
        return Chunked(_output(params, y, gates, spec), state.replace(arena=arena))

    def fold(
        self, state: State, group: int, rows: FoldRows, shared: jax.Array, model: Model
    ) -> State:
        layout = gated_delta.layout_of(model.geometry.groups[group].layout.spec)
        return fold_records(
            *(state, group, rows, shared, model), field="uk", records=layout, scaled=False
        )

    def why_unsupported(
        self, spec: GatedDelta, geometry: Geometry, engine: EngineConfig
    ) -> str | None:
        layout, window = gated_delta.layout_of(spec), engine.window_tokens
        fed = engine.decode_tokens
        rings = ring_specs(geometry, num_rows=1, window=fed, aligned=engine.exact)
        slots = max(ring["uk"].shape[2] for ring in rings if "uk" in ring)
        reasons = (
            conv_unsupported(layout, window),
            scan_unsupported(layout, geometry.dtype),
            window_unsupported(layout, slots),
            fold_unsupported(layout, slots),
            gated_unsupported(spec.value_dim),
        )
        return next((reason for reason in reasons if reason is not None), None)


def _output(params: dict, y: jax.Array, projected: jax.Array, spec: GatedDelta) -> jax.Array:
    """Norms y [B, T, ...] by heads, gates it by the gates in front of `projected`; then out_proj. Both products may
    come in parts."""
    y = gated_delta.gate(params, y.reshape(*y.shape[:2], -1), projected, spec, "pallas")
    return product(y, params["out_proj"], out="parts")

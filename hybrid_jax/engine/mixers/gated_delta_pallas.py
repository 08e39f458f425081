"""The kernels of gated delta nets."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hybrid_jax.config import GatedDelta
from hybrid_jax.engine.mixers.matrix_state_pallas import ChunkInputs, Made, MatrixPallas, places
from hybrid_jax.engine.mixers.mixer import ChunkPlan, WindowPlan
from hybrid_jax.geometry import Geometry, StatePlace
from hybrid_jax.layers.gated_delta import GATED_DELTA
from hybrid_jax.state import State
from pallas_kernels.gated_delta import (
    DeltaRings,
    DeltaScanFrames,
    gated_delta_scan_frames,
    gated_delta_window_rings,
)
from pallas_kernels.gated_delta.scan_kernel import why_unsupported as scan_unsupported
from pallas_kernels.gated_delta.window_kernel import why_unsupported as window_unsupported
from pallas_kernels.records import ProjectionLayout
from pallas_kernels.rmsnorm.kernel import gated_unsupported
from pallas_kernels.ssd_window.kernel import why_unsupported as fold_unsupported


class GatedDeltaPallas(MatrixPallas[GatedDelta]):
    """See `MatrixPallas`."""

    equations = GATED_DELTA

    def read(
        self,
        params: dict,
        made: Sequence[jax.Array],
        state: State,
        at: StatePlace,
        plan: WindowPlan,
    ) -> tuple[jax.Array, State]:
        group, ring = at.of(plan.model.geometry), state.rings[at.group]
        q, scores, v, beta = made
        y, uk = gated_delta_window_rings(
            DeltaRings(
                q=q,
                v=v,
                beta=beta,
                scores=scores,
                uk=ring["uk"],
                dt=ring["dt"],
                A=plan.shared[at.group],
                arena=state.arena,
                frames=plan.frames,
                exists=plan.exists.astype(jnp.int32),
                num_known=plan.rows.num_known,
                **places(plan.rows),
            ),
            layer=at.layer,
            first_frame=group.state_frame(at.layer),
            records=GATED_DELTA.layout(group.layout.spec),
            dtype=plan.model.activation_dtype,
            implementation="pallas",
        )
        return y, state.with_ring(at.group, uk=uk)

    def scan(
        self, params: dict, chunk: ChunkInputs, state: State, at: StatePlace, plan: ChunkPlan
    ) -> Made:
        rows, model = plan
        y, ukq, arena = gated_delta_scan_frames(
            DeltaScanFrames(
                vkq=chunk.made,
                dt=chunk.dt,
                A=GATED_DELTA.decay_rates(params),
                projected=chunk.projected,
                arena=state.arena,
                read=rows.read,
                write=rows.write,
                exists=(rows.start > 0).astype(jnp.int32),
                lengths=rows.length,
                state_lengths=rows.state_len,
            ),
            records=chunk.layout,
            first_frame=at.of(model.geometry).state_frame(at.layer),
            chip=model.backend.chip,
            implementation="pallas",
        )
        return Made(y, ukq, arena)

    def reasons(
        self, spec: GatedDelta, layout: ProjectionLayout, slots: int, geometry: Geometry
    ) -> Sequence[str | None]:
        return (
            scan_unsupported(layout, geometry.dtype),
            window_unsupported(layout, slots),
            fold_unsupported(layout, slots),
            gated_unsupported(spec.value_dim),
        )

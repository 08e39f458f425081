"""The kernels of Mamba-2, and a trial of those for Hopper."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import Mamba2
from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.mamba2_xla import rescan
from hybrid_jax.engine.mixers.matrix_state_pallas import ChunkInputs, Made, MatrixPallas, places
from hybrid_jax.engine.mixers.mixer import ChunkPlan, Entry, Windowed, WindowPlan
from hybrid_jax.engine.mixers.replay import Scanned
from hybrid_jax.geometry import Geometry, StateGroup, StatePlace
from hybrid_jax.layers.cut import CutInput
from hybrid_jax.layers.mamba2 import MAMBA2, gates_and_readout
from hybrid_jax.state import State
from pallas_kernels.dispatch import Implementation
from pallas_kernels.records import ProjectionLayout
from pallas_kernels.rmsnorm.kernel import gated_unsupported
from pallas_kernels.ssd_scan import ScanFrames, ssd_scan_frames, ssd_states_frames
from pallas_kernels.ssd_scan.kernel import why_unsupported as scan_unsupported
from pallas_kernels.ssd_scan.triton_scan import segment_tokens
from pallas_kernels.ssd_scan.triton_scan import why_unsupported as triton_unsupported
from pallas_kernels.ssd_window import (
    WindowRings,
    WindowScores,
    ssd_window_rings,
    ssd_window_scores,
)
from pallas_kernels.ssd_window.kernel import why_unsupported as window_unsupported

# As a share of the norm, in the trial of the scan. The kernels are off by 0.003, or by 1 with a wrong operand.
LARGEST_ERROR = 0.02


class Mamba2Pallas(MatrixPallas[Mamba2]):
    """See `MatrixPallas`. What is read includes D x."""

    equations = MAMBA2

    def read(
        self,
        params: dict,
        made: Sequence[jax.Array],
        state: State,
        at: StatePlace,
        plan: WindowPlan,
    ) -> tuple[jax.Array, State]:
        C, scores = made
        group, ring = at.of(plan.model.geometry), state.rings[at.group]
        y = ssd_window_rings(
            WindowRings(
                C=C,
                xB=ring["uk"],
                dt=ring["dt"],
                A=plan.shared[at.group],
                D=params["D"],
                scores=scores,
                arena=state.arena,
                frames=plan.frames,
                exists=plan.exists.astype(jnp.int32),
                **places(plan.rows),
            ),
            layer=at.layer,
            first_frame=group.state_frame(at.layer),
            records=MAMBA2.layout(group.layout.spec),
            dtype=C.dtype,
            implementation="pallas",
        )
        return y, state

    def scan(
        self, params: dict, chunk: ChunkInputs, state: State, at: StatePlace, plan: ChunkPlan
    ) -> Made:
        rows, model = plan
        group, exists = at.of(model.geometry), rows.start > 0
        xBC, dt, _, layout, reads = chunk
        given = ScanFrames(
            xBC=xBC,
            dt=dt,
            A=MAMBA2.decay_rates(params),
            D=params["D"],
            arena=state.arena,
            read=rows.read,
            write=rows.write,
            exists=exists.astype(jnp.int32),
            lengths=rows.length,
            state_lengths=rows.state_len,
        )
        fixed: dict[str, Any] = {
            "records": layout,
            "first_frame": group.state_frame(at.layer),
            "chip": model.backend.chip,
        }
        if not reads:
            arena = ssd_states_frames(given, **fixed, implementation="pallas")
            return Made(None, xBC, arena)
        stream = None
        if group.layout.spec.source == "cut" and model.config.state_group > 1:
            # What other layers of the group read, before the scan writes: the state as it was, and the records.
            old = frames.layer_frames(rows.read, at.layer, group)
            old = frames.read_state(state.arena, old, exists, group, model)
            stream = Scanned(params, old, {"uk": xBC[..., : layout.record_size], "dt": dt})
            given = given._replace(read=rows.read + frames.zero_after(state, old))
        y, arena = ssd_scan_frames(given, **fixed, implementation=model.backend.scan)
        return Made(y, xBC, arena, stream)

    def reread(
        self,
        params: dict,
        h: CutInput,
        state: State,
        at: StatePlace,
        plan: WindowPlan,
        entries: dict[str, Entry],
        spec: Mamba2,
    ) -> Windowed:
        z, C = gates_and_readout(params, h, spec)
        C = jnp.where(plan.valid[..., None, None], C, 0).reshape(*C.shape[:2], -1)
        uk, rows = state.rings[at.group]["uk"], plan.rows
        scores = ssd_window_scores(
            WindowScores(C, uk, rows.starts, rows.num_valid),
            layer=at.layer,
            records=MAMBA2.layout(spec),
            implementation="pallas",
        )
        y, state = self.read(params, (C, scores), state, at, plan)
        return Windowed(self.output(params, y, z, spec), state)

    def rescan(
        self,
        params: dict,
        h: CutInput,
        state: State,
        at: StatePlace,
        plan: ChunkPlan,
        stream: Scanned,
        spec: Mamba2,
    ) -> jax.Array:
        return rescan(params, h, stream, plan.rows, spec, "pallas")

    def reasons(
        self, spec: Mamba2, layout: ProjectionLayout, slots: int, geometry: Geometry
    ) -> Sequence[str | None]:
        return (
            scan_unsupported(layout, geometry.dtype),
            window_unsupported(layout, slots),
            gated_unsupported(spec.inner_size // spec.norm_groups),
        )

    def triton_unsupported(self, spec: Mamba2, geometry: Geometry) -> str | None:
        return triton_unsupported(MAMBA2.layout(spec), geometry.dtype)

    def try_triton(self, group: StateGroup, geometry: Geometry) -> str | None:
        return try_scan(group, geometry)


# --- a trial of the Triton scan -------------------------------------------------------------------


def try_scan(group: StateGroup, geometry: Geometry) -> str | None:
    """Scans rows of one segment and of two, from a checkpoint and from nothing. Says what is far from XLA's numbers."""
    spec = group.layout.spec
    sizes, dtype = MAMBA2.layout(spec), jnp.dtype(geometry.dtype)
    keys = jax.random.split(jax.random.key(0), 4)
    # The table is as wide as that of the steps, so they can use what is compiled for it. The second layer's frames are
    # used.
    layer = group.frames_per_layer
    first = group.state_frame(min(1, group.num_layers - 1))
    table = jnp.zeros((2, geometry.state_frames), jnp.int32)
    places: np.ndarray = 1 + np.arange(4 * layer, dtype=np.int32).reshape(2, 2, layer)
    read, write = places
    shape = (1 + 4 * layer, geometry.frame_words)
    for tokens in (segment_tokens(spec.num_heads) + 65, 65):
        lengths = jnp.array([tokens, tokens - 37], jnp.int32)
        given = ScanFrames(
            arena=jax.lax.bitcast_convert_type(jax.random.normal(keys[0], shape), jnp.uint32),
            read=table.at[:, first : first + layer].set(read),
            write=table.at[:, first : first + layer].set(write),
            exists=jnp.array([1, 0], jnp.int32),
            xBC=jax.random.normal(keys[1], (2, tokens, sizes.conv_size), dtype),
            dt=jax.random.uniform(keys[2], (2, tokens, spec.num_heads), maxval=0.1),
            A=-jnp.linspace(1, 16, spec.num_heads),
            D=jax.random.normal(keys[3], (spec.num_heads,)),
            lengths=lengths,
            state_lengths=lengths - 1,
        )

        def made(
            implementation: Implementation, given: ScanFrames = given
        ) -> tuple[np.ndarray, np.ndarray]:
            """Outputs and states, in float32."""
            scan = functools.partial(
                ssd_scan_frames, records=sizes, first_frame=first, implementation=implementation
            )
            y, arena = jax.jit(scan)(given)
            return np.asarray(y, np.float32), np.asarray(arena)[write].view(np.float32)

        for name, a, b in zip(("outputs", "states"), made("triton"), made("xla"), strict=True):
            off = float(np.linalg.norm(a - b) / np.linalg.norm(b))
            if not off < LARGEST_ERROR:
                return f"{name} of {tokens} tokens are off by {off:.2g} of their norm"
    return None

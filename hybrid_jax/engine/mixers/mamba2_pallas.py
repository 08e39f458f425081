"""Mamba-2 on Pallas kernels, which read and write arena and rings where they lie.

A layer updates its ring where it computes, so nothing is left for the end of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import EngineConfig, Mamba2
from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.mamba2_xla import rescan
from hybrid_jax.engine.mixers.mixer import Chunked, ChunkPlan, Entry, FoldRows, Windowed, WindowPlan
from hybrid_jax.engine.mixers.replay import Scanned
from hybrid_jax.engine.mixers.replay_pallas import ReplayPallas, fold_records, projected_of
from hybrid_jax.geometry import Geometry, StateGroup, StatePlace, ring_specs
from hybrid_jax.layers import mamba2
from hybrid_jax.layers.cut import CutInput, MixerInput, dtype_of, within_cut
from hybrid_jax.products.matrix import product
from hybrid_jax.state import Model, State
from pallas_kernels.causal_conv import ConvWindow, causal_conv, causal_conv_window
from pallas_kernels.causal_conv.kernel import why_unsupported as conv_unsupported
from pallas_kernels.dispatch import Implementation
from pallas_kernels.rmsnorm.kernel import gated_unsupported
from pallas_kernels.ssd_scan import (
    ScanFrames,
    Tail,
    ssd_scan_frames,
    ssd_states_frames,
    store_tail,
)
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


class Mamba2Pallas(ReplayPallas[Mamba2]):
    """See `StateSteps`."""

    def prepare(self, params: Sequence[dict]) -> jax.Array:
        """Decay rates float32[L, M]."""
        return jnp.stack([mamba2.decay_rates(weights) for weights in params])

    def window(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: StatePlace,
        plan: WindowPlan,
        spec: Mamba2,
    ) -> Windowed:
        rows, ring = plan.rows, state.rings[at.group]
        sizes = within_cut(mamba2.layout_of(spec), h)
        gates, projected = projected_of(params, h, out="parts")
        arrays = ConvWindow(
            *(projected, params["conv"], params.get("conv_bias"), params["dt_bias"]),
            *(ring["xB"], ring["dt"], ring["conv"]),
            first=jnp.maximum(rows.begin - rows.base, 0),
            **_here(plan),
        )
        conv, xB, dt, C, scores = causal_conv_window(
            arrays, layer=at.layer, layout=sizes, moves=plan.commits, implementation="pallas"
        )
        state = state.with_ring(at.group, conv=conv, xB=xB, dt=dt)
        y = _read(params, C, scores, state, at, plan)
        assert gates is not None, "every mixer of a window reads"
        return Windowed(_output(params, y, gates, spec), state)

    def chunk(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: StatePlace,
        plan: ChunkPlan,
        spec: Mamba2,
    ) -> Chunked:
        # The scan and the chunk's end take no columns of others.
        h = h.alone() if isinstance(h, CutInput) else h
        rows, model = plan
        group, ring, exists = at.of(model.geometry), state.rings[at.group], rows.start > 0
        sizes = within_cut(mamba2.layout_of(spec), h)
        gates, projected = projected_of(params, h)
        history = frames.read_columns(state.arena, rows.read, exists, at.layer, group, model)
        xBC, dt = causal_conv(
            *(projected, history, params["conv"], params.get("conv_bias"), params["dt_bias"]),
            rows.length,
            layout=sizes,
            implementation="pallas",
        )
        flags, first = exists.astype(jnp.int32), group.state_frame(at.layer)
        chunk = ScanFrames(
            *(xBC, dt, mamba2.decay_rates(params), params["D"]),
            *(state.arena, rows.read, rows.write, flags, rows.length, rows.state_len),
        )
        y, stream = None, None
        if gates is not None and spec.source == "cut" and model.config.state_group > 1:
            # What other layers of the group read, before the scan writes: the state as it was, and the records.
            old = frames.layer_frames(rows.read, at.layer, group)
            old = frames.read_state(state.arena, old, exists, group, model)
            stream = Scanned(params, old, {"xB": xBC[..., : spec.record_size], "dt": dt})
            chunk = chunk._replace(read=rows.read + frames.zero_after(state, old))
        fixed: dict[str, Any] = {
            "records": sizes,
            "first_frame": first,
            "num_sms": model.backend.num_sms,
        }
        if gates is None:
            arena = ssd_states_frames(chunk, **fixed, implementation="pallas")
        else:
            y, arena = ssd_scan_frames(chunk, **fixed, implementation=model.backend.scan)
        tail = Tail(
            *(arena, ring["conv"], ring["xB"], ring["dt"], projected, history, xBC, dt),
            *(rows.write[:, group.columns], rows.row, rows.length, rows.state_len),
        )
        arena, conv, xB, dt = store_tail(
            tail, layer=at.layer, layout=sizes, implementation="pallas"
        )
        state = state.with_ring(at.group, conv=conv, xB=xB, dt=dt)
        if gates is None:
            return Chunked(jnp.zeros((), dtype_of(h)), state.replace(arena=arena))
        # The tail first: the projection and the records are then free before the next block.
        y, arena = jax.lax.optimization_barrier((y, arena))
        out = _output(params, y, gates, spec)
        return Chunked(out, state.replace(arena=arena), stream=stream)

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
        z, C = mamba2.gates_and_readout(params, h, spec)
        C = jnp.where(plan.valid[..., None, None], C, 0).reshape(*C.shape[:2], -1)
        here = _here(plan)
        asked = WindowScores(C, state.rings[at.group]["xB"], here["starts"], here["num_valid"])
        sizes = mamba2.layout_of(spec)
        scores = ssd_window_scores(asked, layer=at.layer, records=sizes, implementation="pallas")
        return Windowed(_output(params, _read(params, C, scores, state, at, plan), z, spec), state)

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

    def fold(
        self, state: State, group: int, rows: FoldRows, shared: jax.Array, model: Model
    ) -> State:
        layout = mamba2.layout_of(model.geometry.groups[group].layout.spec)
        return fold_records(
            *(state, group, rows, shared, model), field="xB", records=layout, scaled=True
        )

    def why_unsupported(self, spec: Mamba2, geometry: Geometry, engine: EngineConfig) -> str | None:
        sizes, window = mamba2.layout_of(spec), engine.window_tokens
        fed = engine.decode_tokens
        rings = ring_specs(geometry, num_rows=1, window=fed, aligned=engine.exact)
        reasons = (
            conv_unsupported(sizes, window),
            scan_unsupported(sizes, geometry.dtype),
            window_unsupported(sizes, max(ring["xB"].shape[2] for ring in rings if "xB" in ring)),
            gated_unsupported(spec.inner_size // spec.norm_groups),
        )
        return next((reason for reason in reasons if reason is not None), None)

    def triton_unsupported(self, spec: Mamba2, geometry: Geometry) -> str | None:
        return triton_unsupported(mamba2.layout_of(spec), geometry.dtype)

    def try_triton(self, group: StateGroup, geometry: Geometry) -> str | None:
        return try_scan(group, geometry)


def _here(plan: WindowPlan) -> dict[str, jax.Array | None]:
    """Where a window's tokens stand, as kernels take it."""
    rows = plan.rows
    return {
        "starts": rows.base - rows.checkpoint,
        "num_valid": jnp.maximum(rows.end - rows.base, 0),
        "ancestors": rows.ancestors,
    }


def _read(
    params: dict,
    C: jax.Array,
    scores: jax.Array,
    state: State,
    at: StatePlace,
    plan: WindowPlan,
) -> jax.Array:
    """What a window's tokens read with C [B, T, G R] of the state and the records at a place: y [B, T, M, P]."""
    group, ring = at.of(plan.model.geometry), state.rings[at.group]
    return ssd_window_rings(
        WindowRings(
            *(C, ring["xB"], ring["dt"], plan.shared[at.group], params["D"], scores),
            *(state.arena, plan.frames, plan.exists.astype(jnp.int32)),
            **_here(plan),
        ),
        layer=at.layer,
        first_frame=group.state_frame(at.layer),
        records=mamba2.layout_of(group.layout.spec),
        dtype=C.dtype,
        implementation="pallas",
    )


def _output(params: dict, y: jax.Array, projected: jax.Array, spec: Mamba2) -> jax.Array:
    """Gates and norms y [B, T, ...], which includes the D skip, by the gates in front of `projected`; then out_proj.

    Both products may come in parts.
    """
    y = mamba2.gate(params, y.reshape(*y.shape[:2], -1), projected, spec, "pallas")
    return product(y, params["out_proj"], params.get("out_bias"), out="parts")


# --- a trial of the Triton scan -------------------------------------------------------------------


def try_scan(group: StateGroup, geometry: Geometry) -> str | None:
    """Scans rows of one segment and of two, from a checkpoint and from nothing. Says what is far from XLA's numbers."""
    spec = group.layout.spec
    sizes, dtype = mamba2.layout_of(spec), jnp.dtype(geometry.dtype)
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

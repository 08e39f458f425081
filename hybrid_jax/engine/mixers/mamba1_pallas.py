"""Mamba on Pallas kernels, which read and write arena and rings where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hybrid_jax.config import EngineConfig, Mamba1
from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.carry import copies_of_path
from hybrid_jax.engine.mixers.columns_pallas import WithPallasColumns, fold_columns
from hybrid_jax.engine.mixers.mixer import (
    Chunked,
    ChunkPlan,
    CommitRows,
    FoldRows,
    Windowed,
    WindowPlan,
)
from hybrid_jax.engine.mixers.short_conv_pallas import new_tokens, short_tail, short_window
from hybrid_jax.geometry import Geometry, StatePlace
from hybrid_jax.products.matrix import Out, product
from hybrid_jax.state import Model, State
from pallas_kernels.checkpoint import States, store_states
from pallas_kernels.selective_scan import (
    ScanInputs,
    SelectiveChunk,
    SelectiveWindow,
    scan_inputs,
    selective_chunk,
    selective_window,
)
from pallas_kernels.selective_scan.kernel import why_unsupported as scan_unsupported
from pallas_kernels.short_conv import short_conv
from pallas_kernels.short_conv.kernel import window_unsupported


class Mamba1Pallas(WithPallasColumns[Mamba1]):
    """See `StateSteps`. Rings and windows are as `carry.Carry` has them."""

    def prepare(self, params: Sequence[dict]) -> None:
        """Nothing, because a fold needs no weights."""

    def window(
        self,
        params: dict,
        h: jax.Array,
        state: State,
        at: StatePlace,
        plan: WindowPlan,
        spec: Mamba1,
    ) -> Windowed:
        rows, group, ring = plan.rows, at.of(plan.model.geometry), state.rings[at.group]
        projected = product(h, params["in_proj"], params.get("in_bias"), out="parts")
        new = new_tokens(rows)  # once for both kernels
        x, state = short_window(params, projected, state, at, plan, new, gated=False)
        dt, BC = _inputs(params, x, spec, "parts")
        arrays = SelectiveWindow(
            x=x,
            dt=dt,
            BC=BC,
            projected=projected,
            **_weights(params),
            state=ring["state"],
            arena=state.arena,
            frames=plan.frames,
            exists=plan.exists.astype(jnp.int32),
            base=rows.base,
            # A prompt's chunk begins at the checkpoint.
            loads=(rows.begin == rows.checkpoint).astype(jnp.int32) if plan.aligned else None,
            **new,
        )
        y, carried = selective_window(
            arrays,
            layer=at.layer,
            first_frame=group.state_frame(at.layer),
            keeps=not plan.commits,
            implementation="pallas",
        )
        state = state.with_ring(at.group, state=carried)
        return Windowed(product(y, params["out_proj"], params.get("out_bias"), out="parts"), state)

    def commit(self, state: State, group: int, rows: CommitRows, model: Model) -> State:
        """Copies the state after the last token of a path to where the row's length expects it, too."""
        state = super().commit(state, group, rows, model)
        if rows.path is None:
            return state
        ring, own = state.rings[group]["state"], jnp.arange(len(rows.count))
        sources, targets = copies_of_path(rows, ring.shape[2])
        ring = ring.at[:, own, targets].set(ring[:, own, sources])
        return state.with_ring(group, state=ring)

    def chunk(
        self,
        params: dict,
        h: jax.Array,
        state: State,
        at: StatePlace,
        plan: ChunkPlan,
        spec: Mamba1,
    ) -> Chunked:
        rows, model = plan
        group, exists = at.of(model.geometry), rows.start > 0
        projected = product(h, params["in_proj"], params.get("in_bias"))
        history = frames.read_columns(state.arena, rows.read, exists, at.layer, group, model)
        given = (projected, history, params["conv"], params.get("conv_bias"), rows.length)
        x = short_conv(*given, gated=False, implementation="pallas")
        ring = state.rings[at.group]
        dt, BC = _inputs(params, x, spec, "whole")
        arrays = SelectiveChunk(
            x=x,
            dt=dt,
            BC=BC,
            projected=projected,
            **_weights(params),
            arena=state.arena,
            read=rows.read,
            write=rows.write,
            exists=exists.astype(jnp.int32),
            state=ring["state"],
            rows=rows.row,
            copies=(rows.start + rows.length) % ring["state"].shape[2],
            lengths=rows.length,
            state_lengths=rows.state_len,
        )
        y, arena, carried = selective_chunk(
            arrays, layer=at.layer, first_frame=group.state_frame(at.layer), implementation="pallas"
        )
        state = state.replace(arena=arena).with_ring(at.group, state=carried)
        state = short_tail(projected, history, state, at, plan, gated=False)
        # The tail first: the projection is then free before the next block.
        y, arena = jax.lax.optimization_barrier((y, state.arena))
        state = state.replace(arena=arena)
        return Chunked(product(y, params["out_proj"], params.get("out_bias"), out="parts"), state)

    def fold(self, state: State, group: int, rows: FoldRows, shared: None, model: Model) -> State:
        own, ring = model.geometry.groups[group], state.rings[group]["state"]
        folds = rows.lengths(model.geometry.grain)
        write = frames.slot_frames(state, rows.write_slot)[:, own.first_frame :]
        copies = (rows.checkpoint + model.geometry.grain) % ring.shape[2]
        arrays = States(state.arena, write, folds, copies, ring)
        arena = store_states(arrays, unit_words=own.layout.unit_words, implementation="pallas")
        # Before a window writes the ring: XLA might put the fold after that, and would copy the ring for it.
        arena, ring = jax.lax.optimization_barrier((arena, ring))
        state = state.replace(arena=arena).with_ring(group, state=ring)
        return fold_columns(state, group, rows, folds, model)

    def why_unsupported(self, spec: Mamba1, geometry: Geometry, engine: EngineConfig) -> str | None:
        if engine.exact and engine.decode_tokens > 1:
            return (
                "exact mode with speculation keeps no states of Mamba-1 for 'pallas', got "
                f"num_tokens {engine.decode_tokens - 1}; use 'xla'"
            )
        reasons = (scan_unsupported(spec.state_size), window_unsupported(engine.window_tokens))
        return next((reason for reason in reasons if reason is not None), None)


def _inputs(params: dict, x: jax.Array, spec: Mamba1, out: Out) -> tuple[jax.Array, jax.Array]:
    """dt [B, T, E] before bias and softplus, `out` as of `product`, and B | C [B, T, 2 R], from x [B, T, E]."""
    projected = product(x, params["x_proj"], out="parts")
    sizes = {"dt_norm": spec.dt_rank, "B_norm": spec.state_size, "C_norm": spec.state_size}
    weights = [params.get(name, jnp.ones(size, x.dtype)) for name, size in sizes.items()]
    eps = None if spec.norms == "none" else spec.norm_eps
    dt, BC = scan_inputs(ScanInputs(projected, *weights), eps=eps, implementation="pallas")
    return product(dt, params["dt_proj"], out=out), BC


def _weights(params: dict) -> dict[str, jax.Array]:
    return {name: params[name] for name in ("A_log", "D", "dt_bias")}

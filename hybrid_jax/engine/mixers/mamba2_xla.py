"""Mamba-2 for XLA."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hybrid_jax.config import Mamba2
from hybrid_jax.engine.mixers.mixer import ChunkRows, Entry
from hybrid_jax.engine.mixers.replay import Fields, Past, ReplayRecurrence, Scanned
from hybrid_jax.layers import mamba2
from hybrid_jax.layers.cut import CutInput, MixerInput
from pallas_kernels.dispatch import Implementation
from pallas_kernels.records import split_records


class Mamba2Recurrence(ReplayRecurrence[Mamba2]):
    """Records are x and B in one array, and the step sizes in float32."""

    def prepare(self, params: Sequence[dict]) -> jax.Array:
        """Decay rates float32[L, M]."""
        return jnp.stack([mamba2.decay_rates(weights) for weights in params])

    def project(self, params: dict, h: MixerInput, spec: Mamba2) -> tuple[jax.Array, mamba2.Inputs]:
        inputs = mamba2.project(params, h, spec)
        return inputs.xBC, inputs

    def convolve(self, params: dict, columns: jax.Array, spec: Mamba2) -> jax.Array:
        return mamba2.convolve(params, columns)

    def window(
        self,
        params: dict,
        convolved: jax.Array,
        rest: mamba2.Inputs,
        past: Past,
        spec: Mamba2,
    ) -> tuple[jax.Array, jax.Array, dict[str, Entry]]:
        plan, rows = past.plan, past.plan.rows
        xBC = mamba2.activate(convolved, rest.xBC.dtype)
        xB, C = jnp.split(xBC, [spec.record_size], axis=-1)
        x = xBC[..., : spec.inner_size]
        ring, entries = past.join({"xB": xB, "dt": rest.dt})
        out, arena = mamba2.window_frames(
            *(params, rest.z, jnp.where(plan.valid[..., None], C, 0), x),
            *(past.arena, past.frames(), plan.exists),
            mamba2.Records(ring["xB"], ring["dt"]),
            mamba2.decay_rates(params),
            rows.base - rows.checkpoint,
            jnp.maximum(rows.end - rows.base, 0),
            spec,
            rows.ancestors,
        )
        return out, arena, entries

    def reread(
        self, params: dict, h: CutInput, past: Past, shared: jax.Array, spec: Mamba2
    ) -> tuple[jax.Array, jax.Array]:
        plan, rows = past.plan, past.plan.rows
        z, C = mamba2.gates_and_readout(params, h, spec)
        C = jnp.where(plan.valid[..., None, None], C, 0)
        ring, starts = mamba2.Records(**past.records()), rows.base - rows.checkpoint
        # The records of the window's own tokens.
        places = (starts[:, None] + jnp.arange(C.shape[1]))[..., None]
        own = jnp.take_along_axis(ring.xB, places, axis=1, mode="clip")
        return mamba2.window_frames(
            *(params, z, C, own[..., : spec.inner_size]),
            *(past.arena, past.frames(), plan.exists, ring, shared[past.place.layer]),
            *(starts, jnp.maximum(rows.end - rows.base, 0), spec, rows.ancestors),
        )

    def rescan(
        self, params: dict, h: CutInput, scanned: Scanned, rows: ChunkRows, spec: Mamba2
    ) -> jax.Array:
        return rescan(params, h, scanned, rows, spec, "xla")

    def scan(
        self,
        params: dict,
        h: MixerInput,
        state: jax.Array,
        history: jax.Array,
        rows: ChunkRows,
        spec: Mamba2,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Fields]:
        heads = _heads(state, spec)
        out, new, columns, records = mamba2.scan(
            params, h, heads, history, rows.length, rows.state_len, spec, "xla"
        )
        return out, new.reshape(state.shape), columns, records._asdict()

    def fold(
        self, shared: jax.Array, state: jax.Array, ring: Fields, count: jax.Array, spec: Mamba2
    ) -> jax.Array:
        records = mamba2.Records(ring["xB"], ring["dt"])
        new = mamba2.fold(shared, _heads(state, spec), records, count, spec)
        return new.reshape(state.shape)


def rescan(
    params: dict,
    h: CutInput,
    scanned: Scanned,
    rows: ChunkRows,
    spec: Mamba2,
    implementation: Implementation,
) -> jax.Array:
    """See `ReplayRecurrence.rescan`."""
    x, B = split_records(scanned.records["xB"], mamba2.layout_of(spec))
    A, dt = mamba2.decay_rates(scanned.params), scanned.records["dt"]
    z, C = mamba2.gates_and_readout(params, h, spec)
    shared, state = mamba2.SharedInputs(x, B, dt, A, C), _heads(scanned.state, spec)
    return mamba2.read(params, z, shared, state, rows.length, spec, implementation)


def _heads(state: jax.Array, spec: Mamba2) -> jax.Array:
    """[B, M, P R] as [B, M, P, R]."""
    return state.reshape(*state.shape[:2], spec.head_dim, spec.state_size)

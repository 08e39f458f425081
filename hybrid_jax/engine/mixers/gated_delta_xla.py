"""Gated delta nets for XLA."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hybrid_jax.config import GatedDelta
from hybrid_jax.engine.mixers.mixer import ChunkRows, Entry
from hybrid_jax.engine.mixers.replay import Fields, Past, ReplayRecurrence
from hybrid_jax.layers import gated_delta
from hybrid_jax.layers.cut import MixerInput
from hybrid_jax.layers.gated_delta import Inputs, Records
from pallas_kernels.gated_delta import DeltaWindow, gated_delta_window_frames


class GatedDeltaRecurrence(ReplayRecurrence[GatedDelta]):
    """Records are u and k in one array, and the step sizes in float32."""

    def prepare(self, params: Sequence[dict]) -> jax.Array:
        """Decay rates float32[L, M]."""
        return jnp.stack([gated_delta.decay_rates(weights) for weights in params])

    def project(self, params: dict, h: MixerInput, spec: GatedDelta) -> tuple[jax.Array, Inputs]:
        inputs = gated_delta.project(params, h, spec)
        return inputs.vkq, inputs

    def convolve(self, params: dict, columns: jax.Array, spec: GatedDelta) -> jax.Array:
        return gated_delta.convolve(params, columns)

    def window(
        self, params: dict, convolved: jax.Array, rest: Inputs, past: Past, spec: GatedDelta
    ) -> tuple[jax.Array, jax.Array, dict[str, Entry]]:
        rows = past.plan.rows
        v, k, q = gated_delta.activate(convolved, rest.vkq.dtype, spec)
        # The ring gets the new keys and decays first: what the tokens write follows from these.
        new = gated_delta.join_records(jnp.zeros_like(v), k, rest.dt)
        ring, _ = past.join(new._asdict())
        ring_u, ring_k = gated_delta.split_records(Records(**ring), spec)
        y, u, arena = gated_delta_window_frames(
            DeltaWindow(
                *(q, v, rest.beta, ring_u, ring_k),
                ring["dt"] * gated_delta.decay_rates(params),
                *(past.arena, past.frames(), past.plan.exists),
                starts=rows.base - rows.checkpoint,
                num_known=jnp.maximum(rows.begin - rows.base, 0),
                num_valid=jnp.maximum(rows.end - rows.base, 0),
                ancestors=rows.ancestors,
            ),
            implementation="xla",
        )
        new = gated_delta.join_records(u, k, rest.dt)
        _, entries = past.join(new._asdict())
        return gated_delta.output(params, y, rest.z, spec), arena, entries

    def scan(
        self,
        params: dict,
        h: MixerInput,
        state: jax.Array,
        history: jax.Array,
        rows: ChunkRows,
        spec: GatedDelta,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Fields]:
        heads = _heads(state, spec)
        out, new, columns, records = gated_delta.scan(
            params, h, heads, history, rows.length, rows.state_len, spec, "xla"
        )
        return out, new.reshape(state.shape), columns, records._asdict()

    def fold(
        self, shared: jax.Array, state: jax.Array, ring: Fields, count: jax.Array, spec: GatedDelta
    ) -> jax.Array:
        new = gated_delta.fold(shared, _heads(state, spec), Records(**ring), count, spec)
        return new.reshape(state.shape)


def _heads(state: jax.Array, spec: GatedDelta) -> jax.Array:
    """[B, M, P R] as [B, M, P, R]."""
    return state.reshape(*state.shape[:2], spec.value_dim, spec.key_dim)

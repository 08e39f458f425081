"""Mamba-2 for XLA."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hybrid_jax.config import Mamba2
from hybrid_jax.engine.kinds.kind import ChunkRows, Entry
from hybrid_jax.engine.kinds.replay import Fields, Past, ReplayRecurrence
from hybrid_jax.layers import mamba2


class Mamba2Recurrence(ReplayRecurrence):
    """Records are x and B in one array, and the step sizes in float32."""

    def prepare(self, params: Sequence[dict]) -> jax.Array:
        """Decay rates float32[L, M]."""
        return jnp.stack([mamba2.decay_rates(weights) for weights in params])

    def project(
        self, params: dict, h: jax.Array, spec: Mamba2
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        z, raw, dt = mamba2.project(params, h, spec)
        return raw, (z, dt)

    def convolve(self, params: dict, columns: jax.Array, spec: Mamba2) -> jax.Array:
        return mamba2.convolve(params, columns, spec)

    def window(
        self, params: dict, xBC: jax.Array, rest: tuple, past: Past, spec: Mamba2
    ) -> tuple[jax.Array, jax.Array, dict[str, Entry]]:
        (z, dt), plan, rows = rest, past.plan, past.plan.rows
        xB, C = jnp.split(xBC, [spec.record_size], axis=-1)
        x = xBC[..., : spec.inner_size]
        ring, entries = past.join({"xB": xB, "dt": dt})
        out, arena = mamba2.window_frames(
            *(params, z, jnp.where(plan.valid[..., None], C, 0), x),
            *(past.arena, past.frames(), plan.exists),
            mamba2.Records(ring["xB"], ring["dt"]),
            rows.base - rows.checkpoint,
            jnp.maximum(rows.end - rows.base, 0),
            spec,
            rows.ancestors,
        )
        return out, arena, entries

    def scan(
        self,
        params: dict,
        h: jax.Array,
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


def _heads(state: jax.Array, spec: Mamba2) -> jax.Array:
    """[B, M, P R] as [B, M, P, R]."""
    return state.reshape(*state.shape[:2], spec.head_dim, spec.state_size)

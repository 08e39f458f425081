"""Mamba-2 for XLA."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hybrid_jax.config import Mamba2
from hybrid_jax.engine.kinds.kind import ChunkRows, WindowPlan
from hybrid_jax.engine.kinds.replay import Checkpoint, Fields, Recurrence
from hybrid_jax.layers import mamba2


class Mamba2Recurrence(Recurrence):
    """Records are x and B in one array, and the step sizes in float32."""

    def share(self, params: Sequence[dict]) -> jax.Array:
        """Decay rates float32[L, M]."""
        return jnp.stack([mamba2.decay_rates(weights) for weights in params])

    def project(
        self, params: dict, h: jax.Array, spec: Mamba2
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        z, raw, dt = mamba2.project(params, h, spec)
        return raw, (z, dt)

    def records(
        self, params: dict, columns: jax.Array, rest: tuple, spec: Mamba2
    ) -> tuple[Fields, tuple]:
        z, dt = rest
        xBC = mamba2.convolve(params, columns, spec)
        xB, C = jnp.split(xBC, [spec.record_size], axis=-1)
        return {"xB": xB, "dt": dt}, (z, C, xBC[..., : spec.inner_size])

    def read(
        self,
        params: dict,
        rest: tuple,
        checkpoint: Checkpoint,
        plan: WindowPlan,
        ring: Fields,
        spec: Mamba2,
    ) -> tuple[jax.Array, jax.Array]:
        z, C, x = rest
        rows = plan.rows
        return mamba2.window_frames(
            *(params, z, jnp.where(plan.valid[..., None], C, 0), x),
            *(checkpoint.arena, checkpoint.own, plan.exists),
            mamba2.Records(ring["xB"], ring["dt"]),
            rows.base - rows.checkpoint,
            jnp.maximum(rows.end - rows.base, 0),
            spec,
            "xla",
        )

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
        new = mamba2.fold(shared, _heads(state, spec), records, count, spec, "xla")
        return new.reshape(state.shape)


def _heads(state: jax.Array, spec: Mamba2) -> jax.Array:
    """[B, M, P R] as [B, M, P, R]."""
    return state.reshape(*state.shape[:2], spec.head_dim, spec.state_size)

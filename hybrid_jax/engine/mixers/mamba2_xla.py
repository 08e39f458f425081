"""How windows of Mamba-2 read checkpoints and rings, for XLA, and mixers that read the state of their group."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import Mamba2
from hybrid_jax.engine.mixers.matrix_state import MatrixRecurrence, Read, by_heads
from hybrid_jax.engine.mixers.mixer import ChunkRows
from hybrid_jax.engine.mixers.replay import Fields, Past, Scanned
from hybrid_jax.layers import mamba2
from hybrid_jax.layers.cut import CutInput
from hybrid_jax.layers.mamba2 import MAMBA2
from hybrid_jax.layers.matrix_state import Tokens
from pallas_kernels import WindowFrames, ssd_window_frames
from pallas_kernels.dispatch import Implementation
from pallas_kernels.records import split_records


class Mamba2Recurrence(MatrixRecurrence[Mamba2]):
    """A record follows from a token's inputs alone."""

    equations = MAMBA2

    def read(self, params: dict, tokens: Tokens, ring: Fields, past: Past, spec: Mamba2) -> Read:
        C = jnp.where(past.plan.valid[..., None], tokens.q, 0)
        return Read(*_read(params, C, tokens.rest, ring, MAMBA2.decay_rates(params), past, spec))

    def reread(
        self, params: dict, h: CutInput, past: Past, shared: jax.Array, spec: Mamba2
    ) -> tuple[jax.Array, jax.Array]:
        rows = past.plan.rows
        z, C = mamba2.gates_and_readout(params, h, spec)
        C = jnp.where(past.plan.valid[..., None, None], C, 0)
        ring = past.records()
        # The records of the window's own tokens.
        places = (rows.starts[:, None] + jnp.arange(C.shape[1]))[..., None]
        own = jnp.take_along_axis(ring["uk"], places, axis=1, mode="clip")
        x, A = own[..., : spec.inner_size], shared[past.place.layer]
        y, arena = _read(params, C, x, ring, A, past, spec)
        return MAMBA2.output(params, y, z, spec), arena

    def rescan(
        self, params: dict, h: CutInput, scanned: Scanned, rows: ChunkRows, spec: Mamba2
    ) -> jax.Array:
        return rescan(params, h, scanned, rows, spec, "xla")


def rescan(
    params: dict,
    h: CutInput,
    scanned: Scanned,
    rows: ChunkRows,
    spec: Mamba2,
    implementation: Implementation,
) -> jax.Array:
    """See `ReplayRecurrence.rescan`."""
    z, C = mamba2.gates_and_readout(params, h, spec)
    shared = MAMBA2.shared(scanned.params, Tokens(z, C, scanned.records), spec)
    state = by_heads(scanned.state, MAMBA2.layout(spec))
    return mamba2.read(params, z, shared, state, rows.length, spec, implementation)


def _read(
    params: dict,
    C: jax.Array,
    x: jax.Array,
    ring: Fields,
    A: jax.Array,
    past: Past,
    spec: Mamba2,
) -> tuple[jax.Array, jax.Array]:
    """What a window's tokens with inputs x [B, T, M P] read with C [B, T, G R]: y [B, T, M, P] with D x; the arena."""
    layout, rows = MAMBA2.layout(spec), past.plan.rows
    ring_x, ring_B = split_records(ring["uk"], layout)
    C = C.reshape(*C.shape[:2], layout.num_groups, layout.state_size)
    arrays = WindowFrames(
        x=ring_x,
        dt=ring["dt"],
        A=A,
        B=ring_B,
        C=C,
        arena=past.arena,
        frames=past.frames(),
        exists=past.plan.exists,
        starts=rows.starts,
        num_valid=rows.num_valid,
        ancestors=rows.ancestors,
    )
    y, arena = ssd_window_frames(arrays, implementation="xla")
    return mamba2.skip(params, y, x.reshape(y.shape)), arena

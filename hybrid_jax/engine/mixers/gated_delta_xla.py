"""How windows of gated delta nets read checkpoints and rings, for XLA."""

from __future__ import annotations

from hybrid_jax.config import GatedDelta
from hybrid_jax.engine.mixers.matrix_state import MatrixRecurrence, Read
from hybrid_jax.engine.mixers.replay import Fields, Past
from hybrid_jax.layers.gated_delta import GATED_DELTA, join_records
from hybrid_jax.layers.matrix_state import Tokens
from pallas_kernels.gated_delta import DeltaWindow, gated_delta_window_frames
from pallas_kernels.records import split_records


class GatedDeltaRecurrence(MatrixRecurrence[GatedDelta]):
    """What a token writes follows from the keys and decays before it, which the ring has by then."""

    equations = GATED_DELTA

    def read(
        self, params: dict, tokens: Tokens, ring: Fields, past: Past, spec: GatedDelta
    ) -> Read:
        rows, (v, k, beta) = past.plan.rows, tokens.rest
        ring_u, ring_k = split_records(ring["uk"], GATED_DELTA.layout(spec))
        y, u, arena = gated_delta_window_frames(
            DeltaWindow(
                q=tokens.q,
                v=v,
                beta=beta,
                u=ring_u,
                k=ring_k,
                log_decay=ring["dt"] * GATED_DELTA.decay_rates(params),
                arena=past.arena,
                frames=past.frames(),
                exists=past.plan.exists,
                starts=rows.starts,
                num_known=rows.num_known,
                num_valid=rows.num_valid,
                ancestors=rows.ancestors,
            ),
            implementation="xla",
        )
        return Read(y, arena, join_records(u, k, tokens.records["dt"]))

"""Gated delta net (arXiv 2412.06464): a matrix of P x R for each value head, and a record u, k, dt of each token."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import GatedDelta
from hybrid_jax.config.engine import MAX_GRAIN
from hybrid_jax.kinds.kind import FLOAT32_BYTES, StepSize, Weight, Weights, divided, shared
from hybrid_jax.kinds.matrix_state import MatrixSize, MatrixStateKind


class GatedDeltaKind(MatrixStateKind):
    """See `config.GatedDelta`. Heads are value heads."""

    name = "gated_delta"
    names = "z", "v", "k", "q", "a", "b"
    state_flops = 8  # it also reads a prediction
    write_state_flops = 6

    def size(self, spec: GatedDelta) -> MatrixSize:
        return MatrixSize(spec.num_value_heads, spec.value_dim, spec.num_key_heads, spec.key_dim)

    def shard(self, spec: GatedDelta, count: int) -> GatedDelta:
        heads = divided(spec, "num_value_heads", count)
        keys = shared(spec, "num_key_heads", count)
        return replace(spec, num_value_heads=heads, num_key_heads=keys)

    def weights(self, spec: GatedDelta, width: int) -> Weights:
        norm = Weight(shape=(spec.value_dim,), draw="ones")
        return super().weights(spec, width) | {"norm": norm}

    def chunk_bytes(self, spec: GatedDelta, step: StepSize) -> int:
        """Also v, k and q after the triangle is solved, inverses and weights of tiles, and three more factors of each
        head. After a cut the projection has no z, and is put together from parts, so it is there twice."""
        heads = spec.num_value_heads
        beside = (spec.conv_size + 2 * MAX_GRAIN * heads) * step.item + 3 * FLOAT32_BYTES * heads
        if spec.source != "own":
            beside += (spec.proj_size - spec.value_size) * step.item
        return super().chunk_bytes(spec, step) + beside

    def xla_elements(self, spec: GatedDelta, width: int) -> int:
        """Also what is solved: the projection's arrays once more, and matrices of a tile."""
        solved = spec.proj_size + 3 * MAX_GRAIN * spec.num_value_heads
        return super().xla_elements(spec, width) + solved

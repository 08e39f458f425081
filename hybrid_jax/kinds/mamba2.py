"""Mamba-2 (SSD, arXiv 2405.21060): a matrix of P x R for each head, and a record x, B, dt of each token."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import Mamba2
from hybrid_jax.kinds.kind import (
    FLOAT32_BYTES,
    StepSize,
    Weight,
    Weights,
    divided,
    shared,
    without_state,
)
from hybrid_jax.kinds.matrix_state import MatrixSize, MatrixStateKind
from pallas_kernels.ssd_scan.plan import why_not_triton


class Mamba2Kind(MatrixStateKind):
    """See `config.Mamba2`."""

    name = "mamba2"
    names = "z", "x", "B", "C", "dt"
    state_flops = 6
    write_state_flops = 2  # the state decays once a tile

    def size(self, spec: Mamba2) -> MatrixSize:
        return MatrixSize(spec.num_heads, spec.head_dim, spec.num_groups, spec.state_size)

    def shard(self, spec: Mamba2, count: int) -> Mamba2:
        norms = 1 if spec.gated_norm == "none" else shared(spec, "norm_groups", count)
        return replace(
            spec,
            num_heads=divided(spec, "num_heads", count),
            num_groups=shared(spec, "num_groups", count),
            norm_groups=norms,
            norm_shards=1 if spec.gated_norm == "none" else max(count // spec.norm_groups, 1),
        )

    def triton_unsupported(self, spec: Mamba2, dtype: str) -> str | None:
        return why_not_triton(spec.head_dim, spec.state_size, dtype)

    def weights(self, spec: Mamba2, width: int) -> Weights:
        tree = super().weights(spec, width)
        tree["D"] = Weight(shape=(spec.num_heads,), draw="ones", float32=True)
        if spec.gated_norm != "none":
            tree["norm"] = Weight(shape=(spec.inner_size,), draw="ones")
        if spec.proj_bias:
            inputs = tree["in_proj"]
            tree["in_bias"] = Weight(shape=inputs.shape[1:], draw="zeros", fused=inputs.fused)
            tree["out_bias"] = Weight(shape=(width,), draw="zeros", on_devices="first")
        return without_state(tree) if spec.source == "group" else tree

    def chunk_bytes(self, spec: Mamba2, step: StepSize) -> int:
        """After a cut what is convolved is put together from parts. A mixer that reads the state of its group makes
        float32 outputs, before and after the gate. tests/aot compares the sum with XLA's count."""
        found = super().chunk_bytes(spec, step)
        if spec.source != "own":
            found += spec.conv_size * step.item
        if spec.source == "group":
            found += 2 * FLOAT32_BYTES * spec.inner_size
        return found

    def window_bytes(self, spec: Mamba2, step: StepSize) -> int:
        """Its projection, its output before and after the norm, its input and result, and C with its scores."""
        scores = spec.num_groups * (spec.state_size * step.item + FLOAT32_BYTES * step.tokens)
        return (spec.proj_size + 2 * spec.inner_size + 2 * step.width) * step.item + scores

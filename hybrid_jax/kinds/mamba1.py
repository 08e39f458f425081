"""Mamba (S6, arXiv 2312.00752): one decay rate for each channel and element of the state, which is carried."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import Mamba1
from hybrid_jax.kinds.kind import (
    FLOAT32_BYTES,
    RecurrentKind,
    StateLayout,
    StepSize,
    Weight,
    Weights,
    divided,
)

TILE = 8  # tokens whose states XLA holds at once (`pallas_kernels.selective_scan.xla`)


class Mamba1Kind(RecurrentKind):
    """See `config.Mamba1`. A state's units are channels."""

    name = "mamba1"
    state_flops = 6

    def layout(self, spec: Mamba1) -> StateLayout:
        return StateLayout(
            units=spec.inner_size,
            unit_words=spec.state_size,
            columns=spec.conv_width - 1,
            channels=spec.conv_size,
            records=(),
            carries=True,
            scales=1,
        )

    def shard(self, spec: Mamba1, count: int) -> Mamba1:
        return replace(spec, inner_size=divided(spec, "inner_size", count), shards=count)

    def weights(self, spec: Mamba1, width: int) -> Weights:
        inner, rank, size = spec.inner_size, spec.dt_rank, spec.state_size
        tree = {
            "in_proj": Weight(shape=(width, 2 * inner), draw="matrix", fused=(inner, inner)),
            "conv": Weight(shape=(spec.conv_width, inner), draw="conv"),
            "x_proj": Weight(
                shape=(inner, rank + 2 * size),
                draw="matrix",
                fused=(rank, size, size),
                stays=rank + 2 * size,
            ),
            "dt_proj": Weight(shape=(rank, inner), draw="matrix", stays=inner),
            "dt_bias": Weight(shape=(inner,), draw="step_bias", float32=True),
            "A_log": Weight(shape=(inner, size), draw="log_decay", float32=True),
            "D": Weight(shape=(inner,), draw="ones", float32=True),
            "out_proj": Weight(shape=(inner, width), draw="output"),
        }
        if spec.conv_bias:
            tree["conv_bias"] = Weight(shape=(inner,), draw="zeros")
        if spec.proj_bias:
            tree["in_bias"] = Weight(shape=(2 * inner,), draw="zeros", fused=(inner, inner))
            tree["out_bias"] = Weight(shape=(width,), draw="zeros", on_devices="first")
        if spec.norms == "weighted":
            for name, channels in (("dt_norm", rank), ("B_norm", size), ("C_norm", size)):
                tree[name] = Weight(shape=(channels,), draw="ones")
        return tree

    def row_bytes(self, spec: Mamba1, step: StepSize) -> int:
        """Also step sizes."""
        return super().row_bytes(spec, step) + FLOAT32_BYTES * spec.inner_size

    def chunk_bytes(self, spec: Mamba1, step: StepSize) -> int:
        """Also step sizes."""
        return super().chunk_bytes(spec, step) + FLOAT32_BYTES * spec.inner_size

    def xla_row_elements(self, spec: Mamba1, tokens: int) -> int:
        # Of every token in a tile its decays, what it adds, and the state after it.
        return 3 * min(TILE, tokens) * self.layout(spec).state_words

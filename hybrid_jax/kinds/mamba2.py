"""Mamba-2 (SSD, arXiv 2405.21060): a matrix of P x R for each head, and a record x, B, dt of each token."""

from __future__ import annotations

from hybrid_jax.config import Mamba2
from hybrid_jax.config.engine import MAX_GRAIN
from hybrid_jax.kinds.kind import (
    FLOAT32_BYTES,
    Parts,
    RecurrentKind,
    StateLayout,
    StepSize,
    Weight,
    Weights,
    split_parts,
    without_state,
)


class Mamba2Kind(RecurrentKind):
    """See `config.Mamba2`. A state's units are heads."""

    name = "mamba2"
    triton = True
    state_flops = 6
    write_state_flops = 2  # the state decays once a tile

    def layout(self, spec: Mamba2) -> StateLayout:
        return StateLayout(
            units=spec.num_heads,
            unit_words=spec.head_dim * spec.state_size,
            columns=spec.conv_width - 1,
            channels=spec.conv_size,
            records=(("xB", spec.record_size, None), ("dt", spec.num_heads, "float32")),
        )

    def weights(self, spec: Mamba2, width: int) -> Weights:
        heads, sizes = (spec.num_heads,), tuple(self.parts(spec).own.values())
        tree = {
            "dt_bias": Weight(shape=heads, draw="step_bias", float32=True),
            "in_proj": Weight(shape=(width, sum(sizes)), draw="matrix", fused=sizes),
            "conv": Weight(shape=(spec.conv_width, spec.conv_size), draw="conv"),
            "A_log": Weight(shape=heads, draw="log_decay", float32=True),
            "D": Weight(shape=heads, draw="ones", float32=True),
            "out_proj": Weight(shape=(spec.inner_size, width), draw="output"),
        }
        if spec.gated_norm != "none":
            tree["norm"] = Weight(shape=(spec.inner_size,), draw="ones")
        if spec.conv_bias:
            tree["conv_bias"] = Weight(shape=(spec.conv_size,), draw="zeros")
        if spec.proj_bias:
            tree["in_bias"] = Weight(shape=(sum(sizes),), draw="zeros", fused=sizes)
            tree["out_bias"] = Weight(shape=(width,), draw="zeros")
        return without_state(tree) if spec.source == "group" else tree

    def parts(self, spec: Mamba2) -> Parts:
        whole = dict(zip(("z", "x", "B", "C", "dt"), spec.proj_sizes, strict=True))
        return split_parts(whole, "C", spec)

    def row_bytes(self, spec: Mamba2, step: StepSize) -> int:
        return step.product(spec.proj_size) + 2 * spec.inner_size * step.item

    def chunk_bytes(self, spec: Mamba2, step: StepSize) -> int:
        """Beside the projection: what is convolved, outputs and step sizes. After a cut what is convolved is put
        together from parts. A mixer that reads the state of its group makes float32 outputs, before and after the gate.
        tests/aot compares the sum with XLA's count."""
        beside = (spec.conv_size + spec.inner_size) * step.item + FLOAT32_BYTES * spec.num_heads
        if spec.source != "own":
            beside += spec.conv_size * step.item
        if spec.source == "group":
            beside += 2 * FLOAT32_BYTES * spec.inner_size
        return step.product(spec.proj_size) + beside

    def window_bytes(self, spec: Mamba2, step: StepSize) -> int:
        """Its projection, its output before and after the norm, its input and result, and C with its scores."""
        scores = spec.num_groups * (spec.state_size * step.item + FLOAT32_BYTES * step.tokens)
        return (spec.proj_size + 2 * spec.inner_size + 2 * step.width) * step.item + scores

    def xla_elements(self, spec: Mamba2, width: int) -> int:
        """The projection and the arrays made from it, and the decay matrices of a tile."""
        return 5 * spec.proj_size + 3 * MAX_GRAIN * spec.num_heads

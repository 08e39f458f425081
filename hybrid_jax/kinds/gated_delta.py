"""Gated delta net (arXiv 2412.06464): a matrix of P x R for each value head, and a record u, k, dt of each token."""

from __future__ import annotations

from hybrid_jax.config import GatedDelta
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
)


class GatedDeltaKind(RecurrentKind):
    """See `config.GatedDelta`. A state's units are value heads."""

    name = "gated_delta"
    state_flops = 8  # it also reads a prediction
    write_state_flops = 6

    def layout(self, spec: GatedDelta) -> StateLayout:
        return StateLayout(
            units=spec.num_value_heads,
            unit_words=spec.value_dim * spec.key_dim,
            columns=spec.conv_width - 1,
            channels=spec.conv_size,
            records=(
                ("uk", spec.record_size, None),
                ("dt", spec.num_value_heads, "float32"),
            ),
        )

    def weights(self, spec: GatedDelta, width: int) -> Weights:
        heads, values, keys = spec.num_value_heads, spec.value_size, spec.key_size
        convolved, own = (values, keys, keys), tuple(self.parts(spec).own.values())
        tree = {
            "dt_bias": Weight(shape=(heads,), draw="step_bias", float32=True),
            "in_proj": Weight(shape=(width, sum(own)), draw="matrix", fused=own),
            "conv": Weight(shape=(spec.conv_width, spec.conv_size), draw="conv", fused=convolved),
            "A_log": Weight(shape=(heads,), draw="log_decay", float32=True),
            "norm": Weight(shape=(spec.value_dim,), draw="ones"),
            "out_proj": Weight(shape=(values, width), draw="output"),
        }
        if spec.conv_bias:
            tree["conv_bias"] = Weight(shape=(spec.conv_size,), draw="zeros", fused=convolved)
        return tree

    def parts(self, spec: GatedDelta) -> Parts:
        heads, values, keys = spec.num_value_heads, spec.value_size, spec.key_size
        whole = {"z": values, "v": values, "k": keys, "q": keys, "a": heads, "b": heads}
        return split_parts(whole, "q", spec)

    def row_bytes(self, spec: GatedDelta, step: StepSize) -> int:
        return step.product(spec.proj_size) + 2 * spec.value_size * step.item

    def chunk_bytes(self, spec: GatedDelta, step: StepSize) -> int:
        """Beside the projection: v, k and q before and after the triangle is solved, outputs, inverses and weights of
        tiles, and four factors of each head. After a cut the projection has no z, and is put together from parts, so
        it is there twice."""
        squares = 2 * MAX_GRAIN * spec.num_value_heads
        beside = (2 * spec.conv_size + spec.value_size + squares) * step.item
        if spec.source != "own":
            beside += (spec.proj_size - spec.value_size) * step.item
        return step.product(spec.proj_size) + beside + 4 * FLOAT32_BYTES * spec.num_value_heads

    def xla_elements(self, spec: GatedDelta, width: int) -> int:
        """The projection and the arrays made from it, and the decay matrices of a tile."""
        return 6 * spec.proj_size + 6 * MAX_GRAIN * spec.num_value_heads

"""Gated delta net (arXiv 2412.06464): a matrix of key by value channels for each head. Only sizes, for studies."""

from __future__ import annotations

from hybrid_jax.config import GatedDelta
from hybrid_jax.kinds.kind import RecurrentKind, StateLayout, Weight, Weights


class GatedDeltaKind(RecurrentKind):
    """See `config.GatedDelta`. A state's units are value heads."""

    name = "gated_delta"
    state_flops = 8  # it also reads a prediction

    def layout(self, spec: GatedDelta) -> StateLayout:
        keys, values = spec.num_key_heads * spec.key_dim, spec.num_value_heads * spec.value_dim
        return StateLayout(
            units=spec.num_value_heads,
            unit_words=spec.key_dim * spec.value_dim,
            columns=spec.conv_width - 1,
            channels=spec.conv_size,
            records=(
                ("k", keys, None),
                ("u", values, None),
                ("decay", spec.num_value_heads, "float32"),
            ),
        )

    def weights(self, spec: GatedDelta, width: int) -> Weights:
        heads, value = spec.num_value_heads, spec.num_value_heads * spec.value_dim
        tree = {
            "in_proj": Weight(shape=(width, spec.conv_size + value + 2 * heads), draw="matrix"),
            "conv": Weight(shape=(spec.conv_width, spec.conv_size), draw="conv"),
            "dt_bias": Weight(shape=(heads,), draw="step_bias", float32=True),
            "A_log": Weight(shape=(heads,), draw="log_decay", float32=True),
            "norm": Weight(shape=(spec.value_dim,), draw="ones"),
            "out_proj": Weight(shape=(value, width), draw="output"),
        }
        if spec.conv_bias:
            tree["conv_bias"] = Weight(shape=(spec.conv_size,), draw="zeros")
        return tree

"""Mamba (S6, arXiv 2312.00752): one decay rate for each channel and element of the state. Only sizes, for studies."""

from __future__ import annotations

from hybrid_jax.config import Mamba1
from hybrid_jax.kinds.kind import RecurrentKind, StateLayout, Weight, Weights


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
        )

    def weights(self, spec: Mamba1, width: int) -> Weights:
        inner, rank = spec.inner_size, spec.dt_rank
        tree = {
            "in_proj": Weight(shape=(width, 2 * inner), draw="matrix"),
            "conv": Weight(shape=(spec.conv_width, inner), draw="conv"),
            "x_proj": Weight(shape=(inner, rank + 2 * spec.state_size), draw="matrix"),
            "dt_proj": Weight(shape=(rank, inner), draw="matrix"),
            "dt_bias": Weight(shape=(inner,), draw="step_bias", float32=True),
            "A_log": Weight(shape=(inner, spec.state_size), draw="log_decay", float32=True),
            "D": Weight(shape=(inner,), draw="ones", float32=True),
            "out_proj": Weight(shape=(inner, width), draw="output"),
        }
        if spec.conv_bias:
            tree["conv_bias"] = Weight(shape=(inner,), draw="zeros")
        return tree

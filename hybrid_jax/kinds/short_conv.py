"""Gated short convolution (LFM2): what it caches of a sequence are its last inputs alone."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import ShortConv
from hybrid_jax.kinds.kind import RecurrentKind, StateLayout, Weight, Weights, divided


class ShortConvKind(RecurrentKind):
    """See `config.ShortConv`."""

    name = "short_conv"
    state_flops = 0

    def layout(self, spec: ShortConv) -> StateLayout:
        columns = spec.conv_width - 1
        return StateLayout(units=0, unit_words=0, columns=columns, channels=spec.size, records=())

    def shard(self, spec: ShortConv, count: int) -> ShortConv:
        return replace(spec, size=divided(spec, "size", count))

    def weights(self, spec: ShortConv, width: int) -> Weights:
        tree = {
            "in_proj": Weight(shape=(width, 3 * spec.size), draw="matrix", fused=(spec.size,) * 3),
            "conv": Weight(shape=(spec.conv_width, spec.size), draw="conv"),
            "out_proj": Weight(shape=(spec.size, width), draw="output"),
        }
        if spec.bias:
            tree["in_bias"] = Weight(shape=(3 * spec.size,), draw="zeros", fused=(spec.size,) * 3)
            tree["conv_bias"] = Weight(shape=(spec.size,), draw="zeros")
            tree["out_bias"] = Weight(shape=(width,), draw="zeros", on_devices="first")
        return tree

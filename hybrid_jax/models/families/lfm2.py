"""LFM2: gated short convolutions or attention with norms of heads, and a gated MLP in every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybrid_jax.config import (
    MLP,
    Attention,
    FeedForward,
    Mixer,
    ModelConfig,
    ShortConv,
    residual_layer,
)
from hybrid_jax.kinds.kind import Names
from hybrid_jax.kinds.tensors import ATTENTION, under
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig

NORM_EPS = 1e-5  # where the file says nothing, as for those below
THETA = 1e6
KV_HEADS = 8
CONV_WIDTH = 3
CONV, FULL = "conv", "full_attention"  # mixers in lists of layers


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "lfm2" to `ModelConfig`."""
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return config_of(fields, [MLP(width=_width(fields))] * num_layers)


def _width(fields: HFConfig) -> int:
    """Hidden width of an MLP: two thirds of the one that the file names, rounded up, unless it says otherwise."""
    width = fields.integer("block_ff_dim", "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    factor = fields.number("block_ffn_dim_multiplier", default=1.0, positive=True)
    step = fields.integer("block_multiple_of", default=256)
    return -(-int(factor * width) // step) * step


def config_of(fields: HFConfig, feed_forward: Sequence[FeedForward]) -> ModelConfig:
    """The model whose layers have these feed-forward blocks."""
    num_layers = len(feed_forward)
    kinds = fields.names("layer_types")
    if kinds is None:
        full = fields.layers("full_attn_idxs", num_layers, default=range(num_layers))
        kinds = [FULL if index in full else CONV for index in range(num_layers)]
    fields.layer_kinds("layer_types", kinds, (CONV, FULL), num_layers)
    makers: dict[str, Callable[[HFConfig], Mixer]] = {CONV: _short_conv, FULL: _attention}
    mixers: dict[str, Mixer] = {kind: makers[kind](fields) for kind in dict.fromkeys(kinds)}
    pairs = zip(kinds, feed_forward, strict=True)
    return ModelConfig(
        layers=tuple(residual_layer(mixers=(mixers[kind],), mlp=block) for kind, block in pairs),
        **fields.common(
            "norm_eps", NORM_EPS, tied=(("tie_embedding", "tie_word_embeddings"), True)
        ),
    )


def _attention(fields: HFConfig) -> Attention:
    eps = fields.number("norm_eps", default=NORM_EPS, positive=True)
    return fields.attention(
        rope=True, theta=THETA, kv_heads=KV_HEADS, biases=False, qk_norm=True, qk_norm_eps=eps
    )


def _short_conv(fields: HFConfig) -> ShortConv:
    return ShortConv(
        size=fields.integer("hidden_size"),
        conv_width=fields.integer("conv_L_cache", default=CONV_WIDTH, minimum=2),
        bias=fields.flag("conv_bias"),
    )


GATED_MLP: Names = {"up": ("w1.weight", "w3.weight"), "down": "w2.weight"}
MIXERS = {
    Attention: under(
        "self_attn",
        ATTENTION
        | {
            "out": "out_proj.weight",
            "q_norm": "q_layernorm.weight",
            "k_norm": "k_layernorm.weight",
        },
    ),
    ShortConv: under(
        "conv",
        {
            "in_proj": "in_proj.weight",
            "in_bias": "in_proj.bias",
            "conv": "conv.weight",
            "conv_bias": "conv.bias",
            "out_proj": "out_proj.weight",
            "out_bias": "out_proj.bias",
        },
    ),
}
FAMILY = Family(
    read_config=read_config,
    norm="model.embedding_norm.weight",
    mixer_norm="operator_norm.weight",
    mlp_norm="ffn_norm.weight",
    tensors=MIXERS | {MLP: under("feed_forward", GATED_MLP)},
)

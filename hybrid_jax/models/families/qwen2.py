"""Qwen2 and Qwen2.5: attention with biases on queries, keys and values, and a gated MLP in every layer."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import MLP, Attention, ModelConfig, residual_layer
from hybrid_jax.kinds.tensors import ATTENTION, GATED_MLP, under
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig

MAX_POSITION = 32_768  # where the file names none
WINDOW, FIRST_WITH_WINDOW, KV_HEADS = 4096, 28, 32  # likewise
KINDS = ("full_attention", "sliding_attention")


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "qwen2" to `ModelConfig`."""
    fields.silu("hidden_act")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    attention = fields.attention(rope=True, kv_heads=KV_HEADS, biases=False)
    mixer = replace(attention, qkv_bias=True)
    size, slides = fields.integer("sliding_window", default=WINDOW), False
    if fields.flag("use_sliding_window"):
        slides = not fields.null("sliding_window")
    first = fields.integer("max_window_layers", default=FIRST_WITH_WINDOW, minimum=0)
    usual = [KINDS[slides and index >= first] for index in range(num_layers)]
    kinds = fields.names("layer_types") or usual
    # Without a window no layer can have one.
    fields.layer_kinds("layer_types", kinds, KINDS if slides else KINDS[:1], num_layers)
    made = {KINDS[0]: mixer, KINDS[1]: replace(mixer, sliding_window=size)}
    mlp = MLP(width=fields.integer("intermediate_size"))
    return ModelConfig(
        layers=tuple(residual_layer(mixers=(made[kind],), mlp=mlp) for kind in kinds),
        **fields.common("rms_norm_eps", 1e-6, MAX_POSITION),
    )


FAMILY = Family(
    read_config=read_config,
    tensors={Attention: under("self_attn", ATTENTION), MLP: under("mlp", GATED_MLP)},
)

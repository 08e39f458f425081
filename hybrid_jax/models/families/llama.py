"""Llama: attention with rotary positions and a gated MLP in every layer."""

from __future__ import annotations

from hybrid_jax.config import MLP, Attention, ModelConfig, residual_layer
from hybrid_jax.kinds.tensors import ATTENTION, GATED_MLP, under
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig

FULL = "full_attention"


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "llama" to `ModelConfig`."""
    fields.silu("hidden_act")
    full_attention(fields)
    layer = residual_layer(
        mixers=(fields.attention(rope=True),),
        mlp=MLP(width=fields.integer("intermediate_size"), bias=fields.flag("mlp_bias")),
    )
    return ModelConfig(
        layers=(layer,) * fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        **fields.common("rms_norm_eps", 1e-6),
    )


def full_attention(fields: HFConfig) -> None:
    """Refuses what would make transformers forget keys while it generates, but not in whole sequences."""
    kinds = fields.names("layer_types")
    if kinds is not None:
        num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
        fields.layer_kinds("layer_types", kinds, (FULL,), num_layers)
        return
    longest = fields.integer("max_position_embeddings")
    for name in ("sliding_window", "attention_chunk_size"):
        if fields.integer(name, default=longest) < longest:
            fields.only(name, (None,), None)


FAMILY = Family(
    read_config=read_config,
    tensors={Attention: under("self_attn", ATTENTION), MLP: under("mlp", GATED_MLP)},
    harmless=frozenset({"pretraining_tp"}),
)

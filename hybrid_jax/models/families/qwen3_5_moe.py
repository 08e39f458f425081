"""Qwen3.5 and 3.6 with experts in every layer, the text part."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import Attention, GatedDelta, ModelConfig, MoE
from hybrid_jax.models.families import qwen3_5, qwen3_next
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "qwen3_5_moe" to `ModelConfig`."""
    fields = fields.text()
    experts = qwen3_next.experts(fields, normalize=True)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return qwen3_next.config_of(fields, [experts] * num_layers, kv_heads=2)


FAMILY = replace(
    qwen3_5.FAMILY,
    read_config=read_config,
    tensors={
        Attention: qwen3_next.attention_names,
        GatedDelta: qwen3_5.delta_names,
        MoE: qwen3_next.EXPERTS,
    },
    also=("qwen3_5_moe_text",),
)

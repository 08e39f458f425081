"""Llama: attention with rotary positions and a gated MLP in every layer."""

from __future__ import annotations

from hybrid_jax.config import MLP, Attention, LayerSpec, ModelConfig
from hybrid_jax.kinds.tensors import ATTENTION, GATED_MLP, under
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "llama" to `ModelConfig`."""
    fields.silu("hidden_act")
    layer = LayerSpec(
        mixers=(fields.attention(rope=True),),
        mlp=MLP(width=fields.integer("intermediate_size"), bias=fields.flag("mlp_bias")),
    )
    return ModelConfig(
        layers=(layer,) * fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        **fields.common("rms_norm_eps", 1e-6),
    )


FAMILY = Family(
    read_config=read_config,
    tensors={Attention: under("self_attn", ATTENTION), MLP: under("mlp", GATED_MLP)},
)

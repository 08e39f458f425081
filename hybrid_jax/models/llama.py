"""Llama: attention with rotary positions and a gated MLP in every layer."""

from __future__ import annotations

from hybrid_jax.config import MLP, LayerSpec, ModelConfig
from hybrid_jax.kinds import tensors
from hybrid_jax.kinds.table import kind_of
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig

RENAMES = ()


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "llama" to `ModelConfig`."""
    fields.silu("hidden_act")
    attention_bias = fields.flag("attention_bias")
    layer = LayerSpec(
        mixers=(fields.attention(rope=True, qkv_bias=attention_bias, out_bias=attention_bias),),
        mlp=MLP(width=fields.integer("intermediate_size"), bias=fields.flag("mlp_bias")),
    )
    return ModelConfig(
        layers=(layer,) * fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        **fields.common("rms_norm_eps", 1e-6),
    )


def stored(config: ModelConfig) -> dict:
    """Our parameter tree in terms of the checkpoint's tensors."""

    def layer(index: int, spec: LayerSpec) -> dict:
        prefix = f"model.layers.{index}"
        return {
            "norm": tensors.vector(f"{prefix}.input_layernorm.weight", config.width),
            "mixers": [
                kind_of(spec.mixers[0]).stored(f"{prefix}.self_attn", config.width, spec.mixers[0])
            ],
            "mlp_norm": tensors.vector(f"{prefix}.post_attention_layernorm.weight", config.width),
            "mlp": tensors.gated_mlp(f"{prefix}.mlp", config.width, spec.mlp),
        }

    return tensors.model(config, "model.embed_tokens.weight", "model.norm.weight", layer)

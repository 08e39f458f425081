"""Jamba: Mamba mixers, every few layers attention without positions, and a gated MLP or experts."""

from __future__ import annotations

from hybrid_jax.config import (
    MLP,
    Attention,
    FeedForward,
    Mamba1,
    Mixer,
    ModelConfig,
    MoE,
    residual_layer,
)
from hybrid_jax.kinds.tensors import ATTENTION, GATED_EXPERTS, GATED_MLP, MAMBA1, under
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import MAX_LAYERS, ROTATION, HFConfig

NORM_EPS = 1e-6
LENGTH = 262_144
KV_HEADS = 8  # where the file says nothing


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "jamba" to `ModelConfig`."""
    fields.silu("hidden_act")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    attends = _every(fields, "attn_layer", num_layers, period=8, offset=4)
    num_experts = fields.integer("num_local_experts", "num_experts", default=16)
    sparse = [num_experts > 1 and yes for yes in _every(fields, "expert_layer", num_layers, 2, 1)]
    mixers: dict[bool, Mixer] = {}
    if True in attends:
        mixers[True] = fields.attention(rope=False, kv_heads=KV_HEADS, biases=False)
    if False in attends:
        mixers[False] = _recurrent_mixer(fields)
    width = fields.integer("intermediate_size")
    blocks: dict[bool, FeedForward] = {False: MLP(width=width)}
    if True in sparse:
        blocks[True] = MoE(
            num_experts=num_experts,
            top_k=fields.integer("num_experts_per_tok", default=2, maximum=num_experts),
            width=width,
            routing="softmax_topk",
            normalize=False,
        )
    return ModelConfig(
        layers=tuple(
            residual_layer(mixers=(mixers[attention],), mlp=blocks[experts])
            for attention, experts in zip(attends, sparse, strict=True)
        ),
        **fields.common("rms_norm_eps", NORM_EPS, LENGTH),
    )


def _every(fields: HFConfig, what: str, num_layers: int, period: int, offset: int) -> list[bool]:
    """Which layers are of a kind that comes once in a period."""
    period = fields.integer(f"{what}_period", default=period)
    offset = fields.integer(f"{what}_offset", default=offset, minimum=0, maximum=period - 1)
    return [index % period == offset for index in range(num_layers)]


def _recurrent_mixer(fields: HFConfig) -> Mamba1:
    width = fields.integer("hidden_size")
    return Mamba1(
        inner_size=fields.integer("mamba_expand", default=2) * width,
        state_size=fields.integer("mamba_d_state", default=16),
        dt_rank=fields.dt_rank("mamba_dt_rank", width),
        conv_width=fields.integer("mamba_d_conv", default=4, minimum=2),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        proj_bias=fields.flag("mamba_proj_bias"),
        norms="weighted",
        norm_eps=fields.number("rms_norm_eps", default=NORM_EPS, positive=True),
    )


EXPERTS = {"router": "router.weight"} | GATED_EXPERTS
FAMILY = Family(
    read_config=read_config,
    norm="model.final_layernorm.weight",
    mlp_norm="pre_ff_layernorm.weight",
    tensors={
        Attention: under("self_attn", ATTENTION),
        Mamba1: under("mamba", MAMBA1),
        MLP: under("feed_forward", GATED_MLP),
        MoE: under("feed_forward", EXPERTS),
    },
    harmless=ROTATION
    | {"use_associative_scan", "use_mamba_kernels", "use_mambapy"}
    | {"layer_types", "layers_block_type", "layers_num_experts"},  # follow from others
)

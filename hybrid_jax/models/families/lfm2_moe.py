"""LFM2 with experts in all layers but the first few."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import MLP, ModelConfig, MoE
from hybrid_jax.kinds.kind import Names
from hybrid_jax.kinds.tensors import Either, under
from hybrid_jax.models.families import lfm2
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "lfm2_moe" to `ModelConfig`."""
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    dense = min(fields.integer("num_dense_layers", default=2, minimum=0), num_layers)
    mlp = [MLP(width=fields.integer("intermediate_size"))] * dense
    experts = [_experts(fields)] * (num_layers - dense) if num_layers > dense else []
    return lfm2.config_of(fields, [*mlp, *experts])


def _experts(fields: HFConfig) -> MoE:
    num_experts = fields.integer("num_experts")
    return MoE(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", maximum=num_experts),
        width=fields.integer("moe_intermediate_size"),
        routing="sigmoid",
        normalize=fields.flag("norm_topk_prob", default=True),
        sum_eps=1e-6,
        scale=fields.number("routed_scaling_factor", default=1.0),
    )


def of_config(fields: HFConfig) -> Family:
    """The family of one config.json: with `use_expert_bias` false no bias counts, whether a file has one or not."""
    biased = fields.flag("use_expert_bias", default=True)
    return replace(
        FAMILY,
        tensors={**FAMILY.tensors, MoE: _experts_names("expert_bias" if biased else NO_BIAS)},
        zeros="^$" if biased else rf"\.{NO_BIAS}$",
        ignored="^$" if biased else r"\.feed_forward\.expert_bias$",
    )


NO_BIAS = "no_expert_bias"  # the name of no tensor


def _experts_names(bias: str) -> Names:
    names: Names = {
        "router": "gate.weight",
        "router_bias": bias,
        "up": Either(("experts.{}.w1.weight", "experts.{}.w3.weight"), "experts.gate_up_proj"),
        "down": Either("experts.{}.w2.weight", "experts.down_proj"),
    }
    return under("feed_forward", names)


FAMILY = replace(
    lfm2.FAMILY,
    read_config=read_config,
    tensors={**lfm2.FAMILY.tensors, MoE: _experts_names("expert_bias")},
    of_config=of_config,
)

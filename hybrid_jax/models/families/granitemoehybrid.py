"""Granite 4: recurrent layers or attention, then a gated MLP, with experts beside it where there are any.

Four multipliers: on the embeddings, on every residual update, on q·k (in place of head_dim ** -0.5), and
`logits_scaling`, by which logits are divided.

No released Granite has a head for multi-token prediction. Heads trained here have the layout of Qwen3-Next's, but for
their norms, which are stored as they are.
"""

from __future__ import annotations

from hybrid_jax.config import MLP, Attention, Layer, Mamba2, Mixer, ModelConfig, MoE, residual_layer
from hybrid_jax.kinds.tensors import ATTENTION, MAMBA2, under
from hybrid_jax.models.families.bamba import recurrent_mixer
from hybrid_jax.models.family import MTP_NAMES, Family, last_layer_with
from hybrid_jax.models.hf_config import MAX_LAYERS, MIXER_KINDS, HFConfig

NORM_EPS = 1e-6  # of layers and mixers, where the file says nothing
NUM_EXPERTS = 8  # likewise; null means that there are none


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "granitemoehybrid" to `ModelConfig`."""
    fields.silu("hidden_act")
    fields.only("normalization_function", ("rmsnorm",), "rmsnorm")
    rope = fields.only("position_embedding_type", ("nope", "rope"), "nope") == "rope"
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = fields.names("layers_block_type", "layer_types") or ["mamba"] * num_layers
    fields.layer_kinds("layer_types", kinds, MIXER_KINDS, num_layers)
    kinds = [MIXER_KINDS[kind] for kind in kinds]
    mixers: dict[str, Mixer] = {}
    if "attention" in kinds:
        scale = fields.number("attention_multiplier", default=1.0)
        mixers["attention"] = fields.attention(rope=rope, scale=scale)
    if "mamba" in kinds:
        mixers["mamba"] = recurrent_mixer(fields, NORM_EPS)
    mlp = _feed_forward(fields)
    gain = fields.number("residual_multiplier", default=1.0)
    return ModelConfig(
        layers=tuple(residual_layer(mixers=(mixers[kind],), mlp=mlp, gain=gain) for kind in kinds),
        embedding_multiplier=fields.number("embedding_multiplier", default=1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", default=1.0, positive=True),
        **fields.common("rms_norm_eps", NORM_EPS),
    )


def _feed_forward(fields: HFConfig) -> MLP | MoE:
    shared = fields.integer("shared_intermediate_size", minimum=0)
    num_experts = fields.integer("num_local_experts", default=None, minimum=0)
    if num_experts is None:
        num_experts = 0 if fields.null("num_local_experts") else NUM_EXPERTS
    if num_experts == 0:
        return MLP(width=shared)
    return MoE(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", maximum=num_experts),
        width=fields.integer("intermediate_size"),
        routing="topk_softmax",
        shared_width=shared,
    )


def mtp_layers(config: ModelConfig) -> tuple[Layer, ...]:
    """One layer, like the model's last one with attention."""
    return (last_layer_with(config, Attention),)


SHARED_MLP = under("shared_mlp", {"up": "input_linear.weight", "down": "output_linear.weight"})
EXPERTS = under(
    "block_sparse_moe",
    {
        "router": "router.layer.weight",
        "up": "input_linear.weight",
        "down": "output_linear.weight",
    },
)
FAMILY = Family(
    read_config=read_config,
    tensors={
        Attention: under("self_attn", ATTENTION),
        Mamba2: under("mamba", MAMBA2),
        MLP: SHARED_MLP,
        MoE: EXPERTS | {"shared": SHARED_MLP},
    },
    renames=(
        (r"\.block_sparse_moe\.experts\.gate_up_proj$", ".block_sparse_moe.input_linear.weight"),
        (r"\.block_sparse_moe\.experts\.down_proj$", ".block_sparse_moe.output_linear.weight"),
        (r"\.block_sparse_moe\.router\.weight$", ".block_sparse_moe.router.layer.weight"),
    ),
    mtp=mtp_layers,
    mtp_names=MTP_NAMES,
    harmless=frozenset({"mamba_chunk_size"}),
)

"""Granite 4: recurrent layers or attention, then a gated MLP, with experts beside it where there are any.

Four multipliers: on the embeddings, on every residual update, on q·k (in place of head_dim ** -0.5), and
`logits_scaling`, by which logits are divided.
"""

from __future__ import annotations

from hybrid_jax.config import MLP, Attention, LayerSpec, ModelConfig, MoE
from hybrid_jax.kinds import tensors
from hybrid_jax.kinds.table import kind_of
from hybrid_jax.models.bamba import recurrent_mixer
from hybrid_jax.models.hf_config import MAX_LAYERS, MIXER_KINDS, HFConfig

RENAMES = (
    (r"\.block_sparse_moe\.experts\.gate_up_proj$", ".block_sparse_moe.input_linear.weight"),
    (r"\.block_sparse_moe\.experts\.down_proj$", ".block_sparse_moe.output_linear.weight"),
    (r"\.block_sparse_moe\.router\.weight$", ".block_sparse_moe.router.layer.weight"),
)
NORM_EPS = 1e-6  # of layers and mixers, where the file says nothing


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "granitemoehybrid" to `ModelConfig`."""
    fields.silu("hidden_act")
    fields.only("normalization_function", ("rmsnorm",), "rmsnorm")
    rope = fields.only("position_embedding_type", ("nope", "rope"), "nope") == "rope"
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = fields.names("layer_types", "layers_block_type") or ["mamba"] * num_layers
    unknown = [kind for kind in kinds if kind not in MIXER_KINDS]
    if unknown or len(kinds) != num_layers:
        raise ValueError(
            f"granitemoehybrid: layer_types in config.json must name {num_layers} layers, each one of "
            f"{', '.join(MIXER_KINDS)}, got {len(kinds)}, unknown among them: {unknown}"
        )
    kinds = [MIXER_KINDS[kind] for kind in kinds]
    mixers = {}
    if "attention" in kinds:
        bias = fields.flag("attention_bias")
        scale = fields.number("attention_multiplier", default=1.0)
        mixers["attention"] = fields.attention(rope=rope, scale=scale, qkv_bias=bias, out_bias=bias)
    if "mamba" in kinds:
        mixers["mamba"] = recurrent_mixer(fields, NORM_EPS)
    mlp = _feed_forward(fields)
    return ModelConfig(
        layers=tuple(LayerSpec(mixers=(mixers[kind],), mlp=mlp) for kind in kinds),
        embedding_multiplier=fields.number("embedding_multiplier", default=1.0),
        residual_multiplier=fields.number("residual_multiplier", default=1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", default=1.0, positive=True),
        **fields.common("rms_norm_eps", NORM_EPS),
    )


def _feed_forward(fields: HFConfig) -> MLP | MoE:
    shared = fields.integer("shared_intermediate_size", minimum=0)
    num_experts = fields.integer("num_local_experts", default=0, minimum=0)
    if num_experts == 0:
        return MLP(width=shared)
    return MoE(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", maximum=num_experts),
        width=fields.integer("intermediate_size"),
        routing="topk_softmax",
        shared_width=shared,
    )


def stored(config: ModelConfig) -> dict:
    """Our parameter tree in terms of the checkpoint's tensors."""
    width = config.width

    def shared(prefix: str, hidden: int) -> dict:
        return {
            "up": tensors.matrix(width, (f"{prefix}.shared_mlp.input_linear.weight", 2 * hidden)),
            "down": tensors.matrix(hidden, (f"{prefix}.shared_mlp.output_linear.weight", width)),
        }

    def experts(prefix: str, spec: MoE) -> dict:
        prefix, count = f"{prefix}.block_sparse_moe", spec.num_experts
        up = (f"{prefix}.input_linear.weight", (count, 2 * spec.width, width))
        down = (f"{prefix}.output_linear.weight", (count, width, spec.width))
        return {
            "router": tensors.matrix(width, (f"{prefix}.router.layer.weight", count)),
            "up": tensors.Stored(parts=(up,), layout="linear"),
            "down": tensors.Stored(parts=(down,), layout="linear"),
        }

    def layer(index: int, spec: LayerSpec) -> dict:
        prefix, (mixer,) = f"model.layers.{index}", spec.mixers
        name = "self_attn" if isinstance(mixer, Attention) else "mamba"
        if isinstance(spec.mlp, MLP):
            mlp = shared(prefix, spec.mlp.width)
        else:
            mlp = experts(prefix, spec.mlp)
            if spec.mlp.shared_width:
                mlp["shared"] = shared(prefix, spec.mlp.shared_width)
        return {
            "norm": tensors.vector(f"{prefix}.input_layernorm.weight", width),
            "mixers": [kind_of(mixer).stored(f"{prefix}.{name}", width, mixer)],
            "mlp_norm": tensors.vector(f"{prefix}.post_attention_layernorm.weight", width),
            "mlp": mlp,
        }

    return tensors.model(config, "model.embed_tokens.weight", "model.norm.weight", layer)

"""Nemotron-H: one block per layer, a recurrent mixer, attention without positions, an MLP or experts.

The step size is bounded by `time_step_limit` alone; some implementations also raise it to
`time_step_min`, which the published one does not.
"""

from __future__ import annotations

from hybrid_jax.config import MLP, Attention, LayerSpec, ModelConfig, MoE, RecurrentMixer
from hybrid_jax.kinds import tensors
from hybrid_jax.kinds.table import kind_of
from hybrid_jax.models.hf_config import MIXER_KINDS, HFConfig

RENAMES = ((r"^model\.", "backbone."),)
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
KINDS = MIXER_KINDS | {"mlp": "mlp", "moe": "moe"}


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "nemotron_h" to `ModelConfig`."""
    kinds = _layer_kinds(fields)
    fields.only("sliding_window", (None,), None)
    makers = {"mamba": _recurrent_mixer, "attention": _attention, "mlp": _mlp, "moe": _moe}
    specs = {kind: makers[kind](fields) for kind in set(kinds)}
    return ModelConfig(
        layers=tuple(
            LayerSpec(mixers=(specs[kind],))
            if kind in ("mamba", "attention")
            else LayerSpec(mlp=specs[kind])
            for kind in kinds
        ),
        residual_in_fp32=fields.flag("residual_in_fp32"),
        **fields.common("layer_norm_epsilon", 1e-5),
    )


def _layer_kinds(fields: HFConfig) -> list[str]:
    """The kind of each layer, from the list or the pattern; `num_hidden_layers` follows from it."""
    field, known = "layers_block_type", ", ".join(KINDS)
    names = fields.names(field, "layer_types")
    if names is None:
        field, known = "hybrid_override_pattern", "".join(LETTERS)
        pattern = fields.get("hybrid_override_pattern")
        if not pattern or not isinstance(pattern, str):
            raise ValueError(
                f"nemotron_h: config.json needs {field} or layers_block_type, it has {pattern!r}"
            )
        names = [LETTERS.get(letter, letter) for letter in pattern]
    unknown = sorted({name for name in names if name not in KINDS})
    if unknown:
        raise ValueError(
            f"nemotron_h: {field} in config.json must name layers among {known}, got {unknown}"
        )
    return [KINDS[name] for name in names]


def _recurrent_mixer(fields: HFConfig) -> RecurrentMixer:
    fields.silu("mamba_hidden_act")
    return fields.ssd_mixer(
        heads="mamba_num_heads",
        head_dim=("mamba_head_dim",),
        state_size=("ssm_state_size", "mamba_d_state"),
        groups=("mamba_n_groups", "n_groups"),
        conv_width=("mamba_d_conv", "conv_kernel"),
        conv_bias=("mamba_conv_bias", "use_conv_bias"),
        proj_bias="use_bias",
        dt_limits=("mamba_dt_limit", "time_step_limit"),
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5, positive=True),
    )


def _attention(fields: HFConfig) -> Attention:
    bias = fields.flag("attention_bias")
    return fields.attention(rope=False, qkv_bias=bias, out_bias=bias)


def _mlp(fields: HFConfig) -> MLP:
    fields.only("mlp_hidden_act", ("relu2",), "relu2")
    width = fields.integer("intermediate_size")
    return MLP(width=width, kind="relu2", bias=fields.flag("mlp_bias"))


def _moe(fields: HFConfig) -> MoE:
    fields.only("mlp_hidden_act", ("relu2",), "relu2")
    num_experts = fields.integer("n_routed_experts", "num_local_experts")
    num_groups = fields.integer("n_group", default=1)
    fields.divides("n_group", num_groups, "n_routed_experts", num_experts)
    return MoE(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", maximum=num_experts),
        width=fields.integer("moe_intermediate_size"),
        kind="relu2",
        routing="sigmoid",
        num_groups=num_groups,
        top_groups=fields.integer("topk_group", default=1, maximum=num_groups),
        normalize=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=1.0),
        shared_width=fields.integer("moe_shared_expert_intermediate_size", minimum=0),
        latent_width=fields.integer("moe_latent_size", default=0),
        bias=fields.flag("mlp_bias"),
    )


def stored(config: ModelConfig) -> dict:
    """Our parameter tree in terms of the checkpoint's tensors."""

    def layer(index: int, spec: LayerSpec) -> dict:
        prefix = f"backbone.layers.{index}"
        norm = tensors.vector(f"{prefix}.norm.weight", config.width)
        prefix = f"{prefix}.mixer"
        if isinstance(spec.mlp, MLP):
            mlp = tensors.relu2_mlp(prefix, config.width, spec.mlp, spec.mlp.width)
            return {"mlp_norm": norm, "mlp": mlp}
        if isinstance(spec.mlp, MoE):
            return {"mlp_norm": norm, "mlp": _stored_moe(prefix, config.width, spec.mlp)}
        (mixer,) = spec.mixers
        # attention_bias is sometimes set in files whose attention has none
        absent = {"zeros_if_absent": True} if isinstance(mixer, Attention) else {}
        mixed = kind_of(mixer).stored(prefix, config.width, mixer, **absent)
        return {"norm": norm, "mixers": [mixed]}

    return tensors.model(config, "backbone.embeddings.weight", "backbone.norm_f.weight", layer)


def _stored_moe(prefix: str, width: int, spec: MoE) -> dict:
    inner = spec.latent_width or width

    def experts(name: str, shape: tuple[int, ...], layout: str) -> tensors.Stored:
        parts = tuple((f"{prefix}.experts.{x}.{name}", shape) for x in range(spec.num_experts))
        # with mlp_bias the routed experts of some files have biases, those of others none
        return tensors.Stored(
            parts=parts, layout=layout, join="stack", zeros_if_absent=name.endswith("bias")
        )

    correction = f"{prefix}.gate.e_score_correction_bias"
    tree = {
        "router": tensors.matrix(width, (f"{prefix}.gate.weight", spec.num_experts)),
        "router_bias": tensors.vector(correction, spec.num_experts, keep_dtype=True),
        "up": experts("up_proj.weight", (spec.width, inner), "linear"),
        "down": experts("down_proj.weight", (inner, spec.width), "linear"),
    }
    if spec.bias:
        tree["up_bias"] = experts("up_proj.bias", (spec.width,), "same")
        tree["down_bias"] = experts("down_proj.bias", (inner,), "same")
    if spec.shared_width:
        shared = f"{prefix}.shared_experts"
        tree["shared"] = tensors.relu2_mlp(shared, width, spec, spec.shared_width)
    if spec.latent_width:
        down, up = f"{prefix}.fc1_latent_proj", f"{prefix}.fc2_latent_proj"
        tree["latent_down"] = tensors.matrix(width, (f"{down}.weight", inner))
        tree["latent_up"] = tensors.matrix(inner, (f"{up}.weight", width))
        if spec.bias:
            tree["latent_down_bias"] = tensors.bias((f"{down}.bias", inner))
            tree["latent_up_bias"] = tensors.bias((f"{up}.bias", width))
    return tree

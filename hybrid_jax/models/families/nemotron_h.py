"""Nemotron-H: one block per layer, a recurrent mixer, attention without positions, an MLP or experts.

The step size is bounded by `time_step_limit` alone; some implementations also raise it to
`time_step_min`, which the published one does not.

The head for multi-token prediction is a list of such layers too. Its first layer also has what makes one stream of the
embedding and the hidden state, and its last one has the head's last norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hybrid_jax.config import (
    MLP,
    Attention,
    FeedForward,
    Layer,
    Mamba2,
    Mixer,
    ModelConfig,
    MoE,
    residual_layer,
)
from hybrid_jax.kinds.kind import Names
from hybrid_jax.kinds.tensors import ATTENTION, MAMBA2, PLAIN_MLP, Either, under
from hybrid_jax.models.family import MTP_LAYERS, NO_HEAD, Family, last_layer_with
from hybrid_jax.models.hf_config import MIXER_KINDS, ROTATION, HFConfig

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
LAYER_TYPES = MIXER_KINDS | {"mlp": "mlp", "moe": "moe"}
BLOCKS = {"mamba": Mamba2, "attention": Attention, "mlp": MLP, "moe": MoE}
MTP_KINDS = ("attention", "moe")  # layers of the head, where the file names none
STEP_MIN = 0.001
KV_HEADS, HEAD_SIZE = 8, 128  # where the file says nothing


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "nemotron_h" to `ModelConfig`."""
    # `num_hidden_layers` follows from these.
    kinds = _kinds(fields, ("layer_types", "layers_block_type"), "hybrid_override_pattern")
    fields.only("sliding_window", (None,), None)
    # Transformers raises step sizes to this, the published implementation does not. At 0.001, as all released files
    # have it, that is no difference; at more, nobody knows which is meant.
    for name in ("time_step_min", "mamba_dt_min"):
        if fields.number(name, default=STEP_MIN) > STEP_MIN:
            fields.only(name, (STEP_MIN,), STEP_MIN)
    mixers: dict[str, Callable[[HFConfig], Mixer]] = {
        "mamba": _recurrent_mixer,
        "attention": _attention,
    }
    blocks: dict[str, Callable[[HFConfig], FeedForward]] = {"mlp": _mlp, "moe": _moe}
    layers = {
        kind: residual_layer(mixers=(mixers[kind](fields),))
        if kind in mixers
        else residual_layer(mlp=blocks[kind](fields))
        for kind in set(kinds)
    }
    return ModelConfig(
        layers=tuple(layers[kind] for kind in kinds),
        residual_in_fp32=fields.flag("residual_in_fp32"),
        **fields.common("layer_norm_epsilon", 1e-5),
    )


def _kinds(fields: HFConfig, lists: tuple[str, ...], pattern: str) -> list[str]:
    """The kind of each layer, from a list under one of these names or from the pattern."""
    field, known = lists[-1], ", ".join(LAYER_TYPES)
    names = fields.names(*lists)
    if names is None:
        field, known = pattern, "".join(LETTERS)
        letters = fields.get(pattern)
        if not letters or not isinstance(letters, str):
            raise ValueError(
                f"nemotron_h: config.json needs {pattern} or {lists[-1]}, it has {letters!r}"
            )
        names = [LETTERS.get(letter, letter) for letter in letters]
    unknown = sorted({name for name in names if name not in LAYER_TYPES})
    if unknown:
        raise ValueError(
            f"nemotron_h: {field} in config.json must name layers among {known}, got {unknown}"
        )
    return [LAYER_TYPES[name] for name in names]


def mtp_layers(config: ModelConfig, kinds: Sequence[str] = MTP_KINDS) -> tuple[Layer, ...]:
    """Layers of these kinds, each like the model's last one of its kind."""
    return tuple(last_layer_with(config, BLOCKS[kind]) for kind in kinds)


def of_config(fields: HFConfig) -> Family:
    """The family with the head that one config.json names."""

    def own_layers(config: ModelConfig) -> tuple[Layer, ...]:
        name = "num_nextn_predict_layers"
        count = fields.integer(name, default=0, minimum=0)
        if count == 0:
            raise ValueError(
                "load_model: this checkpoint of family nemotron_h has no head for multi-token prediction: "
                f"{name} in its config.json is {fields.get(name)}; {NO_HEAD}"
            )
        if count > 1:
            raise NotImplementedError(
                f"nemotron_h: {name} {count} is not supported, only 1: one head, which is run again for each further "
                f"token; {NO_HEAD}"
            )
        names, pattern = "mtp_layers_block_type", "mtp_hybrid_override_pattern"
        if fields.get(names, pattern) is None:
            return mtp_layers(config)
        return mtp_layers(config, _kinds(fields, (names,), pattern))

    return replace(FAMILY, mtp=own_layers)


def _attention(fields: HFConfig) -> Attention:
    # The older name counts where the newer one is absent.
    size = fields.integer("attention_head_dim", default=HEAD_SIZE)
    return fields.attention(rope=False, kv_heads=KV_HEADS, head_size=size)


def _recurrent_mixer(fields: HFConfig) -> Mamba2:
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


def _mlp(fields: HFConfig) -> MLP:
    fields.only("mlp_hidden_act", ("relu2",), "relu2")
    width = fields.integer("intermediate_size")
    return MLP(width=width, kind="relu2", bias=fields.flag("mlp_bias"))


def _moe(fields: HFConfig) -> MoE:
    fields.only("mlp_hidden_act", ("relu2",), "relu2")
    num_experts = fields.integer("num_local_experts", "n_routed_experts")
    num_groups = fields.integer("n_group", default=1)
    fields.divides("n_group", num_groups, "n_routed_experts", num_experts)
    top_groups = fields.integer("topk_group", default=1, maximum=num_groups)
    top_k = fields.integer("num_experts_per_tok", maximum=num_experts)
    if top_k > (most := top_groups * num_experts // num_groups):
        raise ValueError(
            f"nemotron_h: num_experts_per_tok in config.json must be at most the {most} experts that topk_group "
            f"{top_groups} of n_group {num_groups} leaves, got {top_k}"
        )
    return MoE(
        num_experts=num_experts,
        top_k=top_k,
        width=fields.integer("moe_intermediate_size"),
        kind="relu2",
        routing="sigmoid",
        num_groups=num_groups,
        top_groups=top_groups,
        normalize=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=1.0),
        shared_width=fields.integer("moe_shared_expert_intermediate_size", minimum=0),
        latent_width=fields.integer("moe_latent_size", default=0),
        bias=fields.flag("mlp_bias"),
    )


MOE = {
    "router": "gate.weight",
    "router_bias": "gate.e_score_correction_bias",
    # One tensor for each expert, or those of all experts in one.
    "up": Either("experts.{}.up_proj.weight", "experts.up_proj"),
    "down": Either("experts.{}.down_proj.weight", "experts.down_proj"),
    "up_bias": "experts.{}.up_proj.bias",
    "down_bias": "experts.{}.down_proj.bias",
    "shared": under("shared_experts", PLAIN_MLP),
    "latent_down": "fc1_latent_proj.weight",
    "latent_down_bias": "fc1_latent_proj.bias",
    "latent_up": "fc2_latent_proj.weight",
    "latent_up_bias": "fc2_latent_proj.bias",
}


def mtp_names(num_layers: int) -> Names:
    """The head's own tensors, which lie with those of its first and last layer."""
    first, last = f"{MTP_LAYERS}.0", f"{MTP_LAYERS}.{num_layers - 1}"
    return {
        "embed_norm": f"{first}.enorm.weight",
        "hidden_norm": f"{first}.hnorm.weight",
        "in_proj": f"{first}.eh_proj.weight",  # the embedding's half of its columns comes first
        "norm": f"{last}.final_layernorm.weight",
    }


FAMILY = Family(
    read_config=read_config,
    embed="backbone.embeddings.weight",
    norm="backbone.norm_f.weight",
    layers="backbone.layers",
    mixer_norm="norm.weight",
    mlp_norm="norm.weight",
    tensors={
        Attention: under("mixer", ATTENTION),
        Mamba2: under("mixer", MAMBA2),
        MLP: under("mixer", PLAIN_MLP),
        MoE: under("mixer", MOE),
    },
    renames=((r"^model\.", "backbone."),),
    # attention_bias is sometimes set in files whose attention has none. With mlp_bias the experts of some files have
    # biases, those of others none.
    zeros=r"\.[qkvo]_proj\.bias$|\.experts\.\d+\.(up|down)_proj\.bias$",
    of_config=of_config,
    mtp=mtp_layers,
    mtp_names=mtp_names,
    harmless=ROTATION.union(
        (
            *("chunk_size", "expand", "mamba_chunk_size", "mamba_expand", "mamba_proj_bias"),
            *("mamba_dt_init_floor", "mamba_dt_max", "mamba_ssm_cache_dtype"),
            *("moe_shared_expert_overlap", "n_shared_experts", "num_hidden_layers"),
            *("rescale_prenorm_residual", "time_step_floor", "time_step_max", "use_mamba_kernels"),
            *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        )
    ),
)

"""Bamba: recurrent layers or attention with partly rotated heads, and a gated MLP in every layer."""

from __future__ import annotations

from hybrid_jax.config import MLP, Attention, Mamba2, Mixer, ModelConfig, residual_layer
from hybrid_jax.kinds.tensors import ATTENTION, GATED_MLP, MAMBA2, under
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig

NORM_EPS = 1e-5  # of layers and mixers, where the file says nothing
# Where the file says nothing: share of each head that is rotated, and KV heads.
ROTATED, KV_HEADS = 0.5, 8


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "bamba" to `ModelConfig`."""
    fields.silu("hidden_act")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    places = fields.layers("attn_layer_indices", num_layers)
    mixers: dict[bool, Mixer] = {}
    if places:
        mixers[True] = fields.attention(
            rope=True, rope_fraction=ROTATED, kv_heads=KV_HEADS, fraction_beside=False
        )
    if len(places) < num_layers:
        mixers[False] = recurrent_mixer(fields, NORM_EPS)
    mlp = MLP(width=fields.integer("intermediate_size"), bias=fields.flag("mlp_bias"))
    return ModelConfig(
        layers=tuple(
            residual_layer(mixers=(mixers[index in places],), mlp=mlp)
            for index in range(num_layers)
        ),
        **fields.common("rms_norm_eps", NORM_EPS),
    )


def recurrent_mixer(fields: HFConfig, default_eps: float) -> Mamba2:
    """The recurrent mixer under the field names that Granite has too.

    Args:
        default_eps: epsilon of its norm where the file has none: the family's, as for its layers.
    """
    width, heads = fields.integer("hidden_size"), fields.integer("mamba_n_heads")
    expand = fields.integer("mamba_expand", default=2)
    head_dim = fields.get("mamba_d_head", default="auto")
    if head_dim == "auto":
        fields.divides("mamba_n_heads", heads, "mamba_expand * hidden_size", expand * width)
        head_dim = expand * width // heads
    else:
        head_dim = fields.integer("mamba_d_head")
    fields.check_inner(heads * head_dim, expand * width, "mamba_n_heads * mamba_d_head")
    return fields.ssd_mixer(
        heads="mamba_n_heads",
        head_dim=head_dim,
        state_size=("mamba_d_state",),
        groups=("mamba_n_groups",),
        conv_width=("mamba_d_conv",),
        conv_bias=("mamba_conv_bias",),
        proj_bias="mamba_proj_bias",
        norm_eps=fields.number("rms_norm_eps", default=default_eps, positive=True),
    )


FAMILY = Family(
    read_config=read_config,
    norm="model.final_layernorm.weight",
    mlp_norm="pre_ff_layernorm.weight",
    tensors={
        Attention: under("self_attn", ATTENTION),
        Mamba2: under("mamba", MAMBA2),
        MLP: under("feed_forward", GATED_MLP),
    },
    harmless=frozenset(
        (
            *("mamba_chunk_size", "partial_rotary_factor", "z_loss_coefficient"),
            *("layer_types", "layers_block_type"),  # follow from others
        )
    ),
)

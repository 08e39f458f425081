"""Mamba-2: a stack of Mamba-2 mixers, no attention, no MLP (also Codestral Mamba).

`norm_before_gate` and `rms_norm`, which some files carry, are ignored, as the published weights want it:
the gated norm always multiplies by the gate first.
"""

from __future__ import annotations

from hybrid_jax.config import Mamba2, ModelConfig, residual_layer
from hybrid_jax.kinds.tensors import MAMBA2, under
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import MAX_LAYERS, ROTATION, HFConfig

MAX_POSITION = 262_144  # no position encoding bounds the length; files name none


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "mamba2" to `ModelConfig`."""
    fields.silu("hidden_act")
    # Meant for the first weights of a training; transformers repeats it each time it reads weights.
    fields.only("rescale_prenorm_residual", (False,), False)
    mixer = fields.ssd_mixer(
        heads="num_heads",
        head_dim=("head_dim",),
        state_size=("state_size",),
        groups=("n_groups",),
        conv_width=("conv_kernel",),
        conv_bias=("use_conv_bias",),
        proj_bias="use_bias",
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5, positive=True),
    )
    expanded = fields.integer("expand", default=2) * fields.integer("hidden_size")
    fields.check_inner(mixer.inner_size, expanded, "num_heads * head_dim")
    return ModelConfig(
        layers=(residual_layer(mixers=(mixer,)),)
        * fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        residual_in_fp32=fields.flag("residual_in_fp32", default=True),
        **fields.common("layer_norm_epsilon", 1e-5, MAX_POSITION),
    )


FAMILY = Family(
    read_config=read_config,
    embed="backbone.embeddings.weight",
    norm="backbone.norm_f.weight",
    layers="backbone.layers",
    mixer_norm="norm.weight",
    tensors={Mamba2: under("mixer", MAMBA2)},
    renames=((r"^backbone\.embedding\.", "backbone.embeddings."),),
    harmless=ROTATION.union(
        (
            "layer_types",  # follows from the number of layers
            *("chunk_size", "norm_before_gate", "rms_norm"),
            *("time_step_floor", "time_step_max", "time_step_min", "time_step_rank"),
        )
    ),
)

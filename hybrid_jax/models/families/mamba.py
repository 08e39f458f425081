"""Mamba: a stack of Mamba mixers, no attention, no MLP."""

from __future__ import annotations

from typing import Literal

from hybrid_jax.config import Mamba1, ModelConfig, residual_layer
from hybrid_jax.kinds.tensors import MAMBA1, under
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import MAX_LAYERS, ROTATION, HFConfig

MAX_POSITION = 262_144  # no position encoding bounds the length; files name none
NORM_EPS = 1e-5


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "mamba" to `ModelConfig`."""
    return stack(fields, "none", NORM_EPS)


def stack(fields: HFConfig, norms: Literal["none", "weightless"], norm_eps: float) -> ModelConfig:
    """A stack of mixers; `norm_eps` of the norms inside them."""
    fields.silu("hidden_act")
    # Meant for the first weights of a training; transformers repeats it each time it reads weights.
    fields.only("rescale_prenorm_residual", (False,), False)
    width = fields.integer("hidden_size")
    expanded = int(fields.number("expand", default=2, positive=True) * width)
    mixer = Mamba1(
        # Where a file has both they may disagree, as in Falcon-Mamba-7B, whose tensors have intermediate_size.
        inner_size=fields.integer("intermediate_size", default=expanded),
        state_size=fields.integer("state_size", default=16),
        dt_rank=fields.dt_rank("time_step_rank", width),
        conv_width=fields.integer("conv_kernel", default=4, minimum=2),
        conv_bias=fields.flag("use_conv_bias", default=True),
        proj_bias=fields.flag("use_bias"),
        norms=norms,
        norm_eps=norm_eps,
    )
    num_layers = fields.integer("num_hidden_layers", "n_layer", maximum=MAX_LAYERS)
    return ModelConfig(
        layers=(residual_layer(mixers=(mixer,)),) * num_layers,
        residual_in_fp32=fields.flag("residual_in_fp32", default=True),
        **fields.common(
            "layer_norm_epsilon", NORM_EPS, MAX_POSITION, tied=(("tie_word_embeddings",), True)
        ),
    )


FAMILY = Family(
    read_config=read_config,
    embed="backbone.embeddings.weight",
    norm="backbone.norm_f.weight",
    layers="backbone.layers",
    mixer_norm="norm.weight",
    tensors={Mamba1: under("mixer", MAMBA1)},
    renames=((r"^backbone\.embedding\.", "backbone.embeddings."),),
    harmless=ROTATION.union(
        (
            "layer_types",  # follows from the number of layers
            *("time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min"),
            *("time_step_scale", "use_associative_scan", "use_falcon_mambapy", "use_mambapy"),
        )
    ),
)

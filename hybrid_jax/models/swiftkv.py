"""Families with a cut (SwiftKV, arXiv 2410.03960), as released checkpoints have them.

Layers after the cut have queries of their own, `q_proj_swiftkv`. The first layer of each group makes keys and values
of the cut's output, which has a norm of its own. Files may also have the projections that these replace; nothing reads
them. Nothing reads the field `swiftkv` either, which says whether a training uses the cut: here the cut is always used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hybrid_jax.config import Attention, ModelConfig, source_of, with_cut
from hybrid_jax.kinds.kind import Names
from hybrid_jax.kinds.tensors import ATTENTION, under
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import HFConfig

AFTER_CUT: Names = ATTENTION | {
    "qkv": "q_proj_swiftkv.weight",
    "qkv_bias": "q_proj_swiftkv.bias",
}


def with_fields_of_cut(fields: HFConfig, config: ModelConfig) -> ModelConfig:
    """The model with the cut that the file names; the model itself if its prompts go through all layers."""
    num_layers = len(config.layers)
    # A form without keys and values of the cut's output.
    fields.only("kv_sharing_map", (None, {}), None)
    cut = fields.integer("num_key_value_layers", default=num_layers, maximum=num_layers)
    group = fields.integer("key_value_group_size", default=1)
    if (num_layers - cut) % group:
        raise ValueError(
            f"{fields.family}: key_value_group_size in config.json must divide num_hidden_layers - "
            f"num_key_value_layers, {num_layers} - {cut} = {num_layers - cut}, got {group}"
        )
    return with_cut(config, cut, kv_group=group if cut < num_layers else 1)


def family_with_cut(
    plain: Family, read_config: Callable[[HFConfig], ModelConfig], layers: str = "model.layers"
) -> Family:
    """The family of a plain family's models with a cut."""

    def attention(spec: Attention) -> Names:
        return under("self_attn", ATTENTION if source_of(spec) == "own" else AFTER_CUT)

    def written(config: ModelConfig) -> Names:
        first = [
            layer for layer in config.later if source_of(config.layers[layer].mixers[0]) == "cut"
        ]
        names = [f"{layers}.{layer}.self_attn.{x}_proj_swiftkv" for layer in first for x in "kv"]
        return {
            "norm": "model.norm_swiftkv.weight",
            "write": tuple(f"{name}.weight" for name in names),
            "write_bias": tuple(f"{name}.bias" for name in names),
        }

    return replace(
        plain,
        read_config=read_config,
        tensors={**plain.tensors, Attention: attention},
        cut=written,
        replaced=rf"^{layers}\.(\d+)\.self_attn\.[qkv]_proj\.",
        ignored=r"^model\.norm_swiftkv\.",  # where the cut is after the last layer
        harmless=plain.harmless | {"swiftkv"},
    )

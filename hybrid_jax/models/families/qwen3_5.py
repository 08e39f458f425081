"""Qwen3.5 and 3.6, the text part: Qwen3-Next with other names for the projections of its gated delta nets.

A file of the whole model has the text's fields in `text_config`, and a vision tower, which is left out. Text has the
same positions along all three axes of its rotation, which makes it the usual one.
"""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import MLP, Attention, GatedDelta, ModelConfig
from hybrid_jax.kinds.kind import Names
from hybrid_jax.kinds.tensors import GATED_MLP, under
from hybrid_jax.models.families import qwen3_next
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "qwen3_5" to `ModelConfig`."""
    fields = fields.text()
    mlp = MLP(width=fields.integer("intermediate_size"))
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return qwen3_next.config_of(fields, [mlp] * num_layers, kv_heads=4)


def delta_names(spec: GatedDelta) -> Names:
    """Each projection but that of q, k and v has a tensor of its own."""
    convolved = qwen3_next.convolved_names(spec, "in_proj_qkv.weight")
    z, b, a = (f"in_proj_{name}.weight" for name in "zba")
    return qwen3_next.delta_names(spec, (z, *convolved, a, b))


FAMILY = replace(
    qwen3_next.FAMILY,
    read_config=read_config,
    tensors={
        Attention: qwen3_next.attention_names,
        GatedDelta: delta_names,
        MLP: under("mlp", GATED_MLP),
    },
    renames=((r"^model\.language_model\.", "model."),),
    also=("qwen3_5_text",),
    # Of images, which are not read.
    harmless=frozenset(
        (
            *("image_token_id", "video_token_id", "vision_config", "vision_end_token_id"),
            "vision_start_token_id",
        )
    ),
)

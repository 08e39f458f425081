"""The families, one file each: what their config.json means and which tensors their checkpoints have. No arrays.

May import: config, kinds, models.family, models.hf_config, models.swiftkv, models.families.
"""

from __future__ import annotations

from hybrid_jax.models.families import (
    bamba,
    falcon_h1,
    falcon_mamba,
    granitemoehybrid,
    jamba,
    lfm2,
    lfm2_moe,
    llama,
    llama_swiftkv,
    mamba,
    mamba2,
    nemotron_h,
    qwen2,
    qwen2_swiftkv,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)

MODULES = (
    *(bamba, falcon_h1, falcon_mamba, granitemoehybrid, jamba, lfm2, lfm2_moe, llama),
    *(llama_swiftkv, mamba, mamba2, nemotron_h, qwen2, qwen2_swiftkv, qwen3_5, qwen3_5_moe),
    qwen3_next,
)
# By the name of its file, which is its model_type.
FAMILIES = {module.__name__.rpartition(".")[2]: module.FAMILY for module in MODULES}
MODEL_TYPES = {name: name for name in FAMILIES} | {
    other: name for name, family in FAMILIES.items() for other in family.also
}

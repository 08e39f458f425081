"""Llama with a cut (SwiftKV, arXiv 2410.03960), as released checkpoints have it."""

from __future__ import annotations

from hybrid_jax.config import ModelConfig
from hybrid_jax.models.families import llama
from hybrid_jax.models.hf_config import HFConfig
from hybrid_jax.models.swiftkv import family_with_cut, with_fields_of_cut


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "llama_swiftkv" to `ModelConfig`."""
    return with_fields_of_cut(fields, llama.read_config(fields))


FAMILY = family_with_cut(llama.FAMILY, read_config)

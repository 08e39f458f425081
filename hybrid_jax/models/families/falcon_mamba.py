"""Falcon-Mamba: Mamba with norms without weights on step sizes, B and C."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import ModelConfig
from hybrid_jax.models.families import mamba
from hybrid_jax.models.hf_config import HFConfig

MIXER_EPS = 1e-6


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "falcon_mamba" to `ModelConfig`."""
    eps = fields.number("mixer_rms_eps", default=MIXER_EPS, positive=True)
    return mamba.stack(fields, "weightless", eps)


FAMILY = replace(mamba.FAMILY, read_config=read_config)

"""What an engine tries out before it leaves the scan of prompts to the Triton kernels."""

from __future__ import annotations

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine import fused
from hybrid_jax.geometry import make_geometry
from tests.tiny_models import tiny_model


def test_the_trial_passes():
    config, _ = tiny_model("bamba")
    assert fused.trial(config, make_geometry(config, EngineConfig(dtype="bfloat16"))) is None

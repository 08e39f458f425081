"""What an engine tries out before it leaves work to Triton kernels, and an engine whose tokens they draw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.kernel_choice import Trials
from hybrid_jax.geometry import make_geometry
from tests.engine.test_kernel_paths import engine_on, requests
from tests.tiny_models import tiny_model


def test_the_trial_of_the_scan_passes():
    config, _ = tiny_model("bamba")
    geometry = make_geometry(config, EngineConfig(dtype="bfloat16"))
    (group,) = geometry.groups
    assert Trials().of_scan(group, geometry) is None


@pytest.mark.parametrize("vocab", [5000, 31])
def test_the_trial_of_sampling_passes(vocab):
    assert Trials().of_sampling(vocab) is None


def test_an_engine_draws_the_same_tokens_by_either_kernel():
    drawn = []
    for sampling in ("pallas", "triton"):
        engine = engine_on("pallas", "mamba2", steps_per_dispatch=2)
        engine.runner.model = replace(engine.runner.model, sampling=sampling)
        asked = [replace(request, max_tokens=3) for request in requests()[1:4:2]]
        for request in asked:
            engine.add(request)
        while engine.has_work:
            engine.step()
        drawn.append([request.output for request in asked])
    assert drawn[0] == drawn[1] and [len(tokens) for tokens in drawn[0]] == [3, 3]

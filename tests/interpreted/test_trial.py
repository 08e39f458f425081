"""What an engine tries out before it leaves work to Triton kernels, and an engine whose tokens they draw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.kernel_choice import Trials
from hybrid_jax.geometry import make_geometry
from tests.drawing import left_to_all
from tests.engine.on_kernels import SMALL, requests
from tests.tiny_models import redrawn, tiny_model


def test_the_trial_of_the_scan_passes():
    config, _ = tiny_model("bamba")
    geometry = make_geometry(config, EngineConfig(dtype="bfloat16"))
    (group,) = geometry.groups
    assert Trials().of_scan(group, geometry) is None


@pytest.mark.parametrize("vocab", [5000, 31])
def test_the_trial_of_sampling_passes(vocab):
    assert Trials().of_sampling(vocab) is None


@left_to_all
def test_an_engine_draws_the_same_tokens_by_either_kernel():
    config, _ = tiny_model("mamba2")
    config, drawn = replace(config, layers=config.layers[:1]), []
    settings = EngineConfig(kernels="pallas", **SMALL | {"steps_per_dispatch": 2})
    for sampling in ("pallas", "triton"):
        engine = Engine(config, redrawn(config, seed=2), settings)
        programs = engine.runner.programs
        backend = replace(programs.model.backend, sampling=sampling)
        programs.model = replace(programs.model, backend=backend)
        asked = [replace(request, max_tokens=3) for request in requests()[1:4:2]]
        for request in asked:
            engine.add(request)
        while engine.has_work:
            engine.step()
        drawn.append([request.output.token_ids for request in asked])
    assert drawn[0] == drawn[1] and [len(tokens) for tokens in drawn[0]] == [3, 3]

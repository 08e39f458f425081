"""Programs of several devices on disk."""

from __future__ import annotations

import pytest

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs.store import ProgramStore
from tests.exactness.jobs import generate
from tests.mesh.models import DIVIDED
from tests.tiny_models import redrawn


@pytest.mark.usefixtures("no_compile_cache")
def test_a_second_process_traces_nothing_and_says_the_same(tmp_path, devices):
    """Other devices, or one of them alone, have programs of their own."""
    config, _ = DIVIDED["two_kv"]
    settings = EngineConfig(max_rows=2, prefill_tokens=32, steps_per_dispatch=4, tp=2)

    def engine(first):
        used = devices[first : first + 2]
        store = ProgramStore(tmp_path, used[0], used)
        return Engine(config, redrawn(config, seed=0), settings, store, used)

    want, first = [], engine(0)
    for _ in range(2):
        want.append(generate(first, length=40, count=2))
    assert first.stats()["num_traces"] > 2
    for begin, traced in ((0, False), (2, True), (2, False)):
        again = engine(begin)
        assert [generate(again, length=40, count=2) for _ in range(2)] == want
        assert bool(again.stats()["num_traces"]) is traced

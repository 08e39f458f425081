"""What the benchmarks of the engine time: the compiled loop decodes, and the host's turns do all but the computing."""

from __future__ import annotations

import importlib
import json
from unittest import mock

import jax
import numpy as np
import pytest

from hybrid_jax.engine.programs.compiling import Program
from hybrid_jax.models import config_from_hf
from hybrid_jax.models.initialize import random_params
from tests.tiny_models import tiny_engine


@pytest.fixture
def benchmark(root, monkeypatch):
    """Imports a script, which imports its neighbours by their plain names."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    return importlib.import_module


def test_the_compiled_loop_takes_all_its_steps_and_gives_its_memory_back(benchmark, monkeypatch):
    script = benchmark("engine_core")
    monkeypatch.setattr(script, "NUM_STEPS", 40)  # past a fold
    engine = tiny_engine(max_rows=2)
    free = engine.scheduler.memory.frames.num_free
    once, release = script.compiled_loop(engine, 2)
    for _ in range(2):
        assert once() > 0  # it asserts that no row stopped
        assert engine.runner.state.lengths[:2].tolist() == [script.PROMPT_LEN + 40] * 2
    release()
    assert engine.scheduler.memory.frames.num_free == free
    engine.close()


def test_the_mixed_batch_is_what_its_script_writes_and_asks_for_all_it_says(benchmark, tmp_path):
    script = benchmark("mixed_batch")
    script.write_requests(tmp_path / "requests.jsonl")
    assert (tmp_path / "requests.jsonl").read_text() == script.REQUESTS.read_text()
    bodies = [line["body"] for line in script.make_lines()]
    assert len(bodies) == script.NUM_LINES == 60
    for asked in ("tools", "response_format", "logprobs", "n", "seed"):
        assert 5 <= sum(asked in body for body in bodies) <= 30
    fields = json.loads((script.FILES / "config.json").read_text())
    shapes = jax.eval_shape(lambda: random_params(config_from_hf(fields), 0))
    assert 1.15e6 < sum(leaf.size for leaf in jax.tree.leaves(shapes)) < 1.25e6


def test_host_time_leaves_the_device_out_and_nothing_else(benchmark):
    script = benchmark("host_time")
    calls, real = [], Program.__call__
    engine = tiny_engine(max_rows=2, steps_per_dispatch=1)

    def counted(program, *args):
        calls.append(program)
        return real(program, *args)

    with (
        mock.patch.object(script, "ALIVE", 7),
        mock.patch.object(Program, "__call__", script.answers(counted)),
    ):
        found = script.turns(engine, np.random.default_rng(0), 2)
    assert len(found) > script.NUM_TOKENS - 20 and min(found) > 0
    assert len(calls) == len(set(calls)) < 20
    engine.scheduler.check_invariants()
    assert engine.scheduler.memory.holds.page_frames == 0
    engine.close()

"""What the benchmarks of the engine time: the compiled loop decodes, and the host's turns do all but the computing."""

from __future__ import annotations

import importlib
from unittest import mock

import numpy as np
import pytest

from hybrid_jax.engine.programs.compiling import Program
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

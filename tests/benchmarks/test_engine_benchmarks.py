"""What the benchmarks of the engine time: the compiled loop decodes, and the host's turns do all but the computing."""

from __future__ import annotations

import json
from unittest import mock

import jax
import numpy as np

from benchmarks.batch import mixed
from benchmarks.engine import core
from benchmarks.host import turn_time
from hybrid_jax.engine.programs.compiling import Program
from hybrid_jax.models import config_from_hf
from hybrid_jax.models.initialize import random_params
from tests.tiny_models import tiny_engine


def test_the_compiled_loop_takes_all_its_steps_and_gives_its_memory_back(monkeypatch):
    monkeypatch.setattr(core, "NUM_STEPS", 40)  # past a fold
    engine = tiny_engine(max_rows=2)
    free = engine.scheduler.memory.frames.num_free
    once, release = core.compiled_loop(engine, 2)
    for _ in range(2):
        assert once() > 0  # it asserts that no row stopped
        assert engine.runner.state.lengths[:2].tolist() == [core.PROMPT_LEN + 40] * 2
    release()
    assert engine.scheduler.memory.frames.num_free == free
    engine.close()


def test_the_mixed_batch_is_what_its_script_writes_and_asks_for_all_it_says(tmp_path):
    mixed.write_requests(tmp_path / "requests.jsonl")
    assert (tmp_path / "requests.jsonl").read_text() == mixed.REQUESTS.read_text()
    bodies = [line["body"] for line in mixed.make_lines()]
    assert len(bodies) == mixed.NUM_LINES == 60
    for asked in ("tools", "response_format", "logprobs", "n", "seed"):
        assert 5 <= sum(asked in body for body in bodies) <= 30
    fields = json.loads((mixed.FILES / "config.json").read_text())
    shapes = jax.eval_shape(lambda: random_params(config_from_hf(fields), 0))
    assert 1.15e6 < sum(leaf.size for leaf in jax.tree.leaves(shapes)) < 1.25e6


def test_host_time_leaves_the_device_out_and_nothing_else():
    calls, real = [], Program.__call__
    engine = tiny_engine(max_rows=2, steps_per_dispatch=1)

    def counted(program, *args):
        calls.append(program)
        return real(program, *args)

    with (
        mock.patch.object(turn_time, "ALIVE", 7),
        mock.patch.object(Program, "__call__", turn_time.answers(counted)),
    ):
        found = turn_time.turns(engine, np.random.default_rng(0), 2)
    assert len(found) > turn_time.NUM_TOKENS - 20 and min(found) > 0
    assert len(calls) == len(set(calls)) < 20
    engine.scheduler.check_invariants()
    assert engine.scheduler.memory.holds.page_frames == 0
    engine.close()

"""What an engine measures to know whether prefixes are loaded or computed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_jax.config import CacheConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.costs import Costs
from hybrid_jax.engine.tiers import prompt_clock
from hybrid_jax.engine.tiers.prompt_clock import PromptClock
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.request import Request
from tests.tiny_models import tiny_engine

COSTS = Costs(flops_per_token=10, flops_per_key=2, kv_bytes=64, checkpoint_bytes=1000)


class Timed:
    """A clock under a test's own time, and what it tells."""

    def __init__(self, monkeypatch):
        self.now, self.told = 100.0, []
        monkeypatch.setattr(prompt_clock.time, "perf_counter", lambda: self.now)
        computed = lambda flops, seconds: self.told.append((flops, seconds))
        self.clock = PromptClock(SimpleNamespace(computed=computed), COSTS)

    def run(self, plan, seconds, *, compiles=False):
        self.clock.dispatches(plan, compiles=compiles)
        self.now += seconds
        self.clock.received(plan)


def plan_of(prefill=(), steps=0, **more):
    """A plan with chunks (start, length), and a row that decodes so many steps."""
    chunks = [SimpleNamespace(start=start, length=length) for start, length in prefill]
    decode = [SimpleNamespace(new_tokens=[1] * steps)] if steps else []
    return Plan(prefill=chunks, decode=decode, **more)


@pytest.fixture
def timed(monkeypatch):
    return Timed(monkeypatch)


def test_prompts_are_timed_with_the_flops_of_their_chunks(timed):
    timed.run(plan_of([(32, 64), (0, 5)]), 2.0)
    assert timed.told == [(COSTS.flops(96, 32) + COSTS.flops(5), 2.0)]


def test_a_plan_behind_another_is_timed_from_its_results(timed):
    one, two = plan_of([(0, 8)]), plan_of([(8, 8)])
    timed.clock.dispatches(one, compiles=False)
    timed.now += 1.0
    timed.clock.dispatches(two, compiles=False)
    timed.now += 2.0
    timed.clock.received(one)
    timed.now += 4.0
    timed.clock.received(two)
    assert timed.told == [(COSTS.flops(8), 3.0), (COSTS.flops(16, 8), 4.0)]


def test_decode_steps_are_taken_off_once_their_time_is_known(timed):
    mixed = plan_of([(0, 8)], steps=4)
    timed.run(mixed, 5.0)
    assert timed.told == []
    timed.run(plan_of(steps=8), 4.0)
    timed.run(mixed, 5.0)
    assert timed.told == [(COSTS.flops(8), 3.0)]
    timed.run(mixed, 2.4)  # most of it is steps, so what is left tells little
    timed.run(mixed, 1.0)
    assert len(timed.told) == 1


@pytest.mark.parametrize("other", ["saves", "loads", "to_disk", "from_disk"])
def test_what_a_plan_copies_counts_as_well(timed, other):
    timed.run(plan_of([(0, 8)], **{other: [object()]}), 1.0)
    assert timed.told == [(COSTS.flops(8), 1.0)]


def test_plans_that_are_compiled_or_fork_or_judge_drafts_tell_nothing(timed):
    timed.run(plan_of([(0, 8)]), 1.0, compiles=True)
    timed.run(plan_of([(0, 8)], forks=[object()]), 1.0)
    timed.run(plan_of([(0, 8)], steps=2, window=4), 1.0)
    assert timed.told == []
    timed.run(plan_of([(0, 8)], window=4), 1.0)  # no row decodes in it
    assert len(timed.told) == 1


def test_steps_of_rows_that_have_stopped_are_not_counted(timed):
    timed.run(plan_of(steps=8), 4.0)
    stopped = plan_of()
    stopped.decode = [SimpleNamespace(new_tokens=[])]
    timed.run(stopped, 100.0)
    timed.run(plan_of([(0, 8)], steps=4), 5.0)
    assert timed.told == [(COSTS.flops(8), 3.0)]


def test_after_a_failure_it_starts_over(timed):
    timed.clock.dispatches(plan_of([(0, 8)]), compiles=False)
    timed.clock.forget()
    timed.run(plan_of([(0, 8)]), 1.0)
    assert timed.told == [(COSTS.flops(8), 1.0)]


def test_without_tiers_or_a_rule_nothing_is_timed(tmp_path):
    for settings in ({}, {"host_memory": 1 << 20, "cache": CacheConfig(loads="always")}):
        engine = tiny_engine(memory=850_000, max_model_len=128, **settings)
        assert engine.scheduler.speeds is None
        engine.close()


def test_an_engine_measures_prompts_and_copies(monkeypatch):
    engine = tiny_engine(memory=300_000, host_memory=4 << 20, max_rows=1, max_model_len=256)
    speeds, told = engine.scheduler.speeds, {"computed": [], "loaded": []}
    for name, calls in told.items():
        monkeypatch.setattr(speeds, name, lambda *args, calls=calls: calls.append(args))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 90, 120).tolist() for _ in range(10)]
    for number, prompt in enumerate([*prompts, *prompts]):
        params = SamplingParams(temperature=0, max_tokens=1)
        engine.add(
            Request(
                request_id=f"r{number}",
                prompt=prompt,
                params=params,
                seed=0,
                stop_ids=frozenset(),
                max_tokens=1,
            )
        )
        while engine.has_work:
            engine.step()
    # `told` takes the place of the measurements, so nothing is known, and all is loaded.
    loads = engine.stats()["host_loads"]
    assert loads > 2 and len(told["loaded"]) == 1 + (loads - 2) // 64
    [(tier, num_bytes, seconds), *_] = told["loaded"]
    assert tier == "the host's memory" and num_bytes % engine.geometry.frame_bytes == 0 < seconds
    # Most of them while the arena is full, where each plan copies something.
    assert len(told["computed"]) > len(prompts) and all(s > 0 for _, s in told["computed"])
    engine.close()

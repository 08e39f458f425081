"""Prompts that are all known: every shared prefix is computed once, in the least memory that allows it."""

import random

import numpy as np
import pytest

from hybrid_jax.cache.tree.eviction import Expected
from hybrid_jax.cache.tree.prefix_order import prefix_order
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.scheduler import Scheduler
from tests.schedule.simulated_engine import GRAIN, Engine, tokens_of


def shuffled_prompts(*, branches, lengths, seed=0):
    """Prompts of a tree with so many branches below every node of each level, whose edges are so long."""
    rng = random.Random(seed)
    level = [[]]
    for count, length in zip(branches, lengths, strict=True):
        level = [prompt + tokens_of(rng, length) for prompt in level for _ in range(count)]
    rng.shuffle(level)
    return level


def computed(prompts, *, planned, **options):
    """Prompt tokens that an engine computes."""
    engine = Engine.make(**options)
    order = range(len(prompts))
    if planned:
        order = prefix_order([np.array(prompt) for prompt in prompts], GRAIN)
    for place in order:
        engine.add(prompts[place], max_tokens=8, stop_ids=())
    engine.run()
    assert engine.counters["preemptions"] == 0
    assert len(engine.scheduler.memory.tree.expected) == 0
    engine.check()
    return engine.counters["prefill_tokens"]


@pytest.mark.parametrize("cache", ["lru", "adaptive", "marconi", "sglang"])
@pytest.mark.parametrize("num_frames", [40, 60, 100])
def test_in_order_each_shared_prefix_is_computed_once(num_frames, cache):
    prompts = shuffled_prompts(branches=(8, 6), lengths=(200, 30))
    options = {"max_rows": 4, "cache": cache, "num_frames": num_frames}
    ideal = 8 * 192 + 48 * 38  # the first grain boundary below 200, then the rest of each
    assert computed(prompts, planned=True, **options) == ideal
    assert computed(prompts, planned=False, **options) > ideal or num_frames == 100


@pytest.mark.parametrize("cache", ["lru", "adaptive"])
def test_in_order_a_tree_of_two_levels_needs_room_for_one_path(cache):
    prompts = shuffled_prompts(branches=(3, 4, 4), lengths=(128, 96, 30))
    options = {"max_rows": 3, "cache": cache, "num_frames": 40}
    assert computed(prompts, planned=True, **options) == 3 * 128 + 12 * 96 + 48 * 30


@pytest.mark.parametrize("cache", ["lru", "adaptive"])
def test_what_waiting_prompts_share_is_kept_for_them_in_any_order(cache, monkeypatch):
    prompts = shuffled_prompts(branches=(8, 6), lengths=(200, 30))
    options = {"max_rows": 4, "cache": cache, "num_frames": 60}
    kept = computed(prompts, planned=False, **options)
    for name in ("add", "remove", "__len__"):
        monkeypatch.setattr(Expected, name, lambda *args: 0)
    monkeypatch.setattr(Scheduler, "check_invariants", lambda self: None)
    assert kept < 0.75 * computed(prompts, planned=False, **options)


def test_a_prompt_that_is_aborted_is_expected_no_more():
    engine = Engine.make(max_rows=1)
    rng = random.Random(0)
    for _ in range(3):
        engine.add(tokens_of(rng, 100))
    expected = engine.scheduler.memory.tree.expected
    assert len(expected) == 3
    engine.step()
    assert len(expected) == 2
    engine.scheduler.abort("r2")
    assert len(expected) == 1
    engine.run()
    assert len(expected) == 0


def test_prompts_that_wait_are_expected_again_after_a_reset():
    engine = Engine.make(max_rows=1)
    rng = random.Random(0)
    for _ in range(3):
        engine.add(tokens_of(rng, 100))
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.scheduler.check_invariants()
    assert len(engine.scheduler.memory.tree.expected) == 2
    engine.run()
    engine.check()


def test_a_prompt_that_is_computed_in_full_expects_nothing():
    engine = Engine.make(max_rows=1)
    rng, params = random.Random(0), SamplingParams(max_tokens=2, prompt_logprobs=0)
    for name in ("a", "b"):
        prompt = tokens_of(rng, 100)
        engine.scheduler.add(
            Request(request_id=name, prompt=prompt, params=params, seed=0, max_tokens=2)
        )
    engine.scheduler.check_invariants()
    assert len(engine.scheduler.memory.tree.expected) == 0


def test_evictions_of_what_somebody_waits_for_are_counted():
    prompts = shuffled_prompts(branches=(8, 6), lengths=(200, 30))
    counts = []
    for num_frames in (26, 200):
        engine = Engine.make(max_rows=2, num_frames=num_frames)
        for prompt in prompts:
            engine.add(prompt, max_tokens=8, stop_ids=())
        engine.run()
        counts.append(engine.counters["cache_expected_evictions"])
    assert counts[0] > 0 and counts[1] == 0

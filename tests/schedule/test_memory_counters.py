"""What memory counts: who holds frames, what evictions gave, and when not even the whole cache did."""

import random

import pytest

from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of


def traffic(seed=0, **options):
    """Prompts of all lengths that share prefixes, in a pool for a few of them."""
    engine = Engine.make(**{"num_frames": 28, "max_rows": 4, "vocab": 200} | options)
    rng = random.Random(seed)
    trunks = [tokens_of(rng, 150) for _ in range(3)]
    for _ in range(30):
        prompt = rng.choice(trunks)[: rng.randint(1, 150)] + tokens_of(rng, rng.randint(1, 60))
        engine.add(prompt, max_tokens=rng.choice([5, 40, 150]), stop_ids=())
        for _ in range(rng.randint(0, 12)):
            engine.step()
    engine.run()
    return engine


def test_the_same_traffic_gives_the_same_counts():
    first, again = traffic(), traffic()
    for engine in (first, again):
        counters = engine.scheduler.memory.holds.counters
        assert counters.memory_shortages and counters.evicted_checkpoint_frames
        engine.check()
    assert first.counters == again.counters


def test_stats_tell_frames_by_kind_while_requests_run_and_after():
    engine = Engine.make(num_frames=60)
    engine.add(tokens_of(random.Random(0), 100), max_tokens=60, stop_ids=())
    while not engine.reported["r0"]:
        engine.step()
    stats = engine.counters
    assert (stats["live_page_frames"], stats["live_checkpoint_frames"]) == (4, 3)
    assert (stats["page_frames"], stats["checkpoint_frames"]) == (4, 3)
    assert stats["free_frames"] == 59 - 7
    engine.run()
    stats = engine.counters
    assert (stats["live_page_frames"], stats["live_checkpoint_frames"]) == (0, 0)
    assert stats["page_frames"] + stats["checkpoint_frames"] == stats["cached_frames"] > 0
    assert stats["peak_live_frames"] >= 7


def test_a_prefix_that_two_rows_and_the_cache_hold_is_live_once():
    engine = Engine.make(num_frames=60)
    prompt = tokens_of(random.Random(0), 140)
    engine.add(prompt, max_tokens=2, stop_ids=())
    engine.run()
    for _ in range(2):
        engine.add(prompt, max_tokens=60, stop_ids=())
    engine.step()
    stats = (
        engine.counters
    )  # 2 shared pages and their checkpoint; 1 page and a checkpoint of each row's own
    assert stats["cache_hits"] == 2 and stats["running"] == 2
    assert stats["live_page_frames"] == 2 * (2 + 2)
    engine.run()
    engine.check()


def test_memory_goes_on_counting_when_the_device_was_lost():
    engine = Engine.make(num_frames=23)
    engine.add(tokens_of(random.Random(0), 550), max_tokens=20, stop_ids=())
    engine.step()
    assert engine.counters["live_page_frames"] == 18
    engine.crash()
    assert engine.counters["live_page_frames"] == 0
    engine.run()
    assert engine.counters["peak_live_frames"] == 18 + 3
    engine.check()


@pytest.mark.parametrize("cache", ["off", "adaptive"])
def test_a_request_that_waits_for_memory_is_a_shortage(cache):
    engine = Engine.make(num_frames=60, cache=cache)
    for k, length in enumerate((400, 560, 560)):
        engine.add(tokens_of(random.Random(k), length), max_tokens=20, stop_ids=())
    engine.run()
    assert engine.counters["memory_shortages"] > 0
    alone = Engine.make(num_frames=60, cache=cache)
    alone.add(tokens_of(random.Random(0), 400), max_tokens=20, stop_ids=())
    alone.run()
    assert alone.counters["memory_shortages"] == 0


def test_evicted_frames_are_counted_by_kind():
    engine = Engine.make(num_frames=41, cache="lru")
    for k in range(6):
        engine.add(tokens_of(random.Random(k), 200), max_tokens=2, stop_ids=())
        engine.run()
    stats = engine.counters
    held = 6 * 3 * 2, 6 * 3  # of each prompt 3 pages of 2 frames, a checkpoint of 3
    evicted = stats["evicted_page_frames"], stats["evicted_checkpoint_frames"]
    assert evicted == (held[0] - stats["page_frames"], held[1] - stats["checkpoint_frames"])
    assert evicted[0] > evicted[1] > 0


def test_what_goes_for_a_request_that_needs_the_whole_pool_is_counted():
    engine = Engine.make(num_frames=14, geometry=make_geometry(page_tokens=128), max_model_len=700)
    prompt = tokens_of(random.Random(0), 97)
    engine.add(prompt, max_tokens=2, stop_ids=())
    engine.run()
    engine.add(prompt + tokens_of(random.Random(1), 525), max_tokens=2, stop_ids=())
    engine.run()
    stats = engine.counters
    assert stats["cache_leaf_evictions"] == 1
    assert (stats["evicted_page_frames"], stats["evicted_checkpoint_frames"]) == (2, 3)
    engine.check()

"""The status of memory: what it follows, when it changes, and that the same traffic gives the same log."""

import json
import random

import pytest

from hybrid_jax.config import CacheConfig
from hybrid_jax.schedule.pressure import LOG_LENGTH, SETTLES_AFTER, Pressure
from tests.engine.simulated_engine import Engine, make_geometry, tokens_of


def make_pressure():
    return Pressure(100, (0.1, 0.3))  # begins below 10 to be had, ends from 30 on


def statuses(pressure, observations):
    seen = []
    for pages, checkpoints in observations:
        pressure.observe(pages, checkpoints)
        seen.append(pressure.status.value)
    return seen


def test_pressure_begins_below_the_low_watermark_and_ends_at_the_high_one():
    held = [(50, 0), (90, 0), (91, 0), (80, 0), (71, 0), (70, 0), (90, 0)]
    kv = "KV_PRESSURED"
    expected = ["BALANCED", "BALANCED", kv, kv, kv, "BALANCED", "BALANCED"]
    assert statuses(make_pressure(), held) == expected


def test_pressure_is_named_after_the_kind_that_holds_most():
    assert statuses(make_pressure(), [(20, 75)]) == ["STATE_PRESSURED"]
    assert statuses(make_pressure(), [(75, 20)]) == ["KV_PRESSURED"]


def test_the_kind_changes_only_when_the_other_leads_clearly():
    held = [(50, 45), (45, 50), (40, 60), (39, 60), (45, 50), (60, 39)]
    kv, state = "KV_PRESSURED", "STATE_PRESSURED"
    assert statuses(make_pressure(), held) == [kv, kv, kv, state, state, kv]


def test_frames_that_changed_their_kind_show_for_a_while():
    pressure = make_pressure()
    pressure.evicted(asked=(24, 0), gave=(1, 25), enough=True)
    seen = statuses(pressure, [(10, 10)] * (SETTLES_AFTER + 1))
    assert seen == ["REBALANCING"] * (SETTLES_AFTER - 1) + ["BALANCED"] * 2
    assert (pressure.rebalanced_frames, pressure.num_transitions) == (23, 2)
    assert (pressure.evicted_page_frames, pressure.evicted_checkpoint_frames) == (1, 25)


def test_what_comes_back_is_no_move():
    pressure = make_pressure()
    for _ in range(20):
        pressure.evicted(asked=(12, 0), gave=(0, 12), enough=True)
        pressure.evicted(asked=(0, 12), gave=(12, 0), enough=True)
        assert statuses(pressure, [(10, 10)]) == ["BALANCED"]
    assert pressure.rebalanced_frames == 480
    for _ in range(2):
        pressure.evicted(asked=(12, 0), gave=(0, 12), enough=True)
    assert statuses(pressure, [(10, 10)]) == ["REBALANCING"]


@pytest.mark.parametrize(
    ("asked", "gave", "moved"),
    [
        ((4, 0), (4, 0), 0),  # pages for pages
        ((4, 0), (9, 0), 0),  # more of them than was asked for
        ((4, 0), (0, 6), 4),
        ((0, 6), (7, 0), 6),
        ((4, 0), (8, 3), 0),  # it gave enough itself
        ((0, 3), (8, 3), 0),
        ((4, 0), (3, 9), 1),
        ((3, 6), (5, 6), 0),
        ((3, 6), (5, 5), 1),
    ],
)
def test_rebalanced_frames_are_those_one_kind_gave_and_the_other_took(asked, gave, moved):
    pressure = make_pressure()
    pressure.evicted(asked=asked, gave=gave, enough=True)
    assert pressure.rebalanced_frames == moved


def test_a_shortage_moves_nothing():
    pressure = make_pressure()
    pressure.evicted(asked=(9, 0), gave=(0, 6), enough=False)
    assert (pressure.shortages, pressure.rebalanced_frames) == (1, 0)
    assert statuses(pressure, [(10, 0)]) == ["BALANCED"]


def test_the_log_is_bounded_and_its_entries_say_what_happened():
    pressure = make_pressure()
    statuses(pressure, [(95, 1), (0, 0)] * LOG_LENGTH)
    assert pressure.num_transitions == 2 * LOG_LENGTH and len(pressure.log) == LOG_LENGTH
    assert json.loads(json.dumps(pressure.report())) == {
        "memory_status": "BALANCED",
        "memory_log": [
            {
                "operation": LOG_LENGTH + 1 + k,
                "before": ["BALANCED", "KV_PRESSURED"][k % 2],
                "after": ["KV_PRESSURED", "BALANCED"][k % 2],
                "page_frames": [95, 0][k % 2],
                "checkpoint_frames": [1, 0][k % 2],
            }
            for k in range(LOG_LENGTH)
        ],
    }


# --- in the scheduler -----------------------------------------------------------------------------


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


def test_the_same_traffic_gives_the_same_log():
    reports = []
    for _ in range(2):
        engine = traffic()
        pressure = engine.scheduler.memory.holds.pressure
        reports.append(json.dumps(pressure.report() | pressure.stats()))
        assert pressure.num_transitions > 4 and pressure.shortages and pressure.rebalanced_frames
        engine.check()
    assert reports[0] == reports[1]


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
    assert (stats["memory_low_watermark"], stats["memory_high_watermark"]) == (3, 6)


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


def status_of(engine):
    return engine.scheduler.memory.holds.pressure.status.value


def test_one_long_text_makes_kv_short_and_many_short_ones_state():
    geometry = make_geometry(page_tokens=64)
    long = Engine.make(num_frames=23, geometry=geometry)
    long.add(tokens_of(random.Random(0), 550), max_tokens=20, stop_ids=())
    long.step()
    assert status_of(long) == "KV_PRESSURED"
    long.run()
    assert status_of(long) != "KV_PRESSURED"
    short = Engine.make(
        num_frames=43, max_rows=8, geometry=geometry, cache="off", prefill_tokens=512
    )
    for k in range(8):
        short.add(tokens_of(random.Random(k), 50), max_tokens=12, stop_ids=())
    seen = set()
    while short.step():
        seen.add(status_of(short))
    assert seen == {"BALANCED", "STATE_PRESSURED"}
    assert status_of(short) == "BALANCED"


def test_memory_goes_on_counting_when_the_device_was_lost():
    engine = Engine.make(num_frames=23)
    engine.add(tokens_of(random.Random(0), 550), max_tokens=20, stop_ids=())
    engine.step()
    before = engine.counters
    assert status_of(engine) == "KV_PRESSURED" and before["live_page_frames"] == 18
    engine.crash()
    assert engine.counters["memory_operations"] > before["memory_operations"]
    assert engine.counters["live_page_frames"] == 0 and status_of(engine) == "BALANCED"
    engine.run()
    assert engine.counters["peak_live_frames"] == 18 + 3
    engine.check()


def test_requests_of_one_shape_move_nothing_between_the_kinds():
    engine = Engine.make(num_frames=120, max_rows=2, cache="lru", max_slots=60, vocab=200)
    for k in range(12):
        engine.add(tokens_of(random.Random(k), 200), max_tokens=200, stop_ids=())
    seen = []
    while engine.step():
        seen.append(status_of(engine))
    assert seen.count("BALANCED") > 0.7 * len(seen)  # each entry that goes, shows for a while
    assert engine.counters["cache_leaf_evictions"] > 5
    engine.check()


@pytest.mark.parametrize("cache", ["off", "adaptive"])
def test_memory_is_short_while_the_queue_waits_for_it(cache):
    engine = Engine.make(num_frames=60, cache=cache)
    for k, length in enumerate((400, 560, 560)):
        engine.add(tokens_of(random.Random(k), length), max_tokens=20, stop_ids=())
    seen = []
    while engine.scheduler.num_waiting or not seen:
        engine.step()
        seen += [status_of(engine)] * bool(engine.counters["memory_shortages"])
    assert seen[:3] == ["KV_PRESSURED"] * 3
    engine.run()
    assert status_of(engine) != "KV_PRESSURED"


def test_memory_is_short_no_longer_when_who_waited_is_gone():
    engine = Engine.make(num_frames=60)
    engine.add(tokens_of(random.Random(0), 400), max_tokens=100, stop_ids=())
    engine.add(tokens_of(random.Random(1), 590), max_tokens=1, stop_ids=())
    engine.add(tokens_of(random.Random(2), 590), max_tokens=1, stop_ids=())
    engine.step()
    while engine.scheduler.num_waiting > 1:
        engine.step()
    engine.step()
    assert status_of(engine) == "KV_PRESSURED"
    for name in ("r1", "r2"):
        engine.scheduler.abort(name)
    while engine.step() and status_of(engine) == "KV_PRESSURED":
        pass
    assert engine.scheduler.num_running == 1 and status_of(engine) != "KV_PRESSURED"


def test_watermarks_and_evicted_frames_are_those_of_this_engine():
    cache = CacheConfig(policy="lru", watermarks=(0.5, 0.75))
    engine = Engine.make(num_frames=41, cache=cache)
    for k in range(6):
        engine.add(tokens_of(random.Random(k), 200), max_tokens=2, stop_ids=())
        engine.run()
    stats = engine.counters
    assert (stats["memory_low_watermark"], stats["memory_high_watermark"]) == (20, 30)
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


@pytest.mark.parametrize("policy", ["lru", "sglang", "alpha:1", "adaptive"])
@pytest.mark.parametrize("quota", [(0.0, 0.0), (0.2, 0.4), (1.0, 1.0)])
def test_any_quota_gives_the_same_tokens(policy, quota):
    engine = traffic(cache=CacheConfig(policy=policy, kv_quota=quota))
    assert engine.counters["cache_leaf_evictions"] > 5
    engine.check()

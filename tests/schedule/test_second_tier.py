"""An engine with a second tier: what plans save and load, on a device that checks every read."""

from random import Random

import numpy as np
import pytest

from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.sequence import Queued
from hybrid_jax.schedule.tiers.below import HOST
from tests.drawing import drawn
from tests.schedule.simulated_disk import SimulatedDisk
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of
from tests.schedule.traffic import serve

FORMS = [("hybrid", 40), ("attention", 30), ("recurrent", 19)]
POLICIES, SIZES = ("lru", "adaptive"), (600, 40, 20)


@pytest.mark.parametrize(
    ("kind", "num_frames", "cache", "below"),
    drawn([(*form, cache, below) for form in FORMS for cache in POLICIES for below in SIZES]),
)
def test_what_was_evicted_comes_back_and_changes_no_token(kind, num_frames, cache, below):
    options = dict(num_frames=num_frames, geometry=make_geometry(kind=kind), cache=cache)
    engine = Engine.make(host_frames=below, **options)
    hits = serve(engine, 1)
    events, stats = engine.device.events, engine.scheduler.stats()
    told = [request.hit.look_up for request in engine.requests.values()]
    loaded = sum(look_up.loaded for look_up in told if look_up is not None)
    assert loaded <= stats["host_hit_tokens"] <= stats["host_loaded_tokens"]
    assert stats["host_hit_tokens"] <= stats["cache_hit_tokens"] and (loaded or below < 600)
    assert min(events.get("saves", 0), events.get("loads", 0)) > (5 if below == 600 else 0)
    if below == 600:
        assert hits > 1.2 * serve(Engine.make(**options), 1)
    tier = engine.scheduler.memory.tree.tiers[HOST]
    assert tier.frames.num_held == tier.slots.num_held == 0


def test_no_tier_evicts_what_a_plan_loads_before_the_plan_is_made():
    engine = Engine.make(host_frames=100, num_frames=40)
    memory, prompt = engine.scheduler.memory, tokens_of(Random(0), 100)
    tree = memory.tree
    everything = [tier.frames.num_frames - 1 for tier in tree.tiers]
    engine.add(prompt, max_tokens=1)
    engine.run()
    memory.make_room(everything[ARENA])
    engine.add([7], max_tokens=1)  # its plan takes the save along
    engine.run()
    tokens = np.array([*prompt, 3])
    assert [found.hit_len for found in tree.match(tokens).found] == [0, 96]
    assert memory.below.fetch(Queued(), tree.match(tokens))
    for tier, frames in enumerate(everything):
        tree.make_room(frames, tier=tier)
    assert [found.hit_len for found in tree.match(tokens).found] == [96, 96]
    assert not memory.below.saves
    plan = Plan()
    memory.end_plan(plan)
    assert len(plan.loads) == 1 and not memory.below.loads
    for tier, frames in enumerate(everything):
        assert tree.make_room(frames, tier=tier)
    assert [found.hit_len for found in tree.match(tokens).found] == [0, 0]


@pytest.mark.parametrize("below", ["host", "disk"])
def test_a_hit_is_of_the_tier_that_it_was_copied_from_also_a_plan_later(below, monkeypatch):
    """A prompt may have its prefix loaded, and then find no room for the rest of it."""
    disk = SimulatedDisk(make_geometry()) if below == "disk" else None
    engine = Engine.make(host_frames=0 if disk else 100, disk=disk, num_frames=40)
    memory, prompt = engine.scheduler.memory, tokens_of(Random(0), 100)
    engine.add(prompt, max_tokens=1)
    engine.run()
    arena = engine.add([*prompt, 2], max_tokens=1)
    engine.run()
    memory.make_room(39)
    engine.add([7], max_tokens=1)
    engine.run()
    start, refused = memory.start, []

    def start_later(*arguments, **how):
        if not memory.loads or refused:
            return start(*arguments, **how)
        refused.append(True)
        return None

    monkeypatch.setattr(memory, "start", start_later)
    later = engine.add([*prompt, 3], max_tokens=1)
    engine.run()
    assert refused == [True]
    hits = [
        (request.hit.look_up.loaded, request.hit.look_up.loaded_from) for request in (arena, later)
    ]
    assert hits == [(0, ""), (96, "the host's memory" if below == "host" else "the disk")]
    stats = engine.scheduler.stats()
    assert (stats[f"{below}_hit_tokens"], stats["cache_hit_tokens"]) == (96, 192)
    engine.check()


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_row_that_is_alone_starts_without_what_there_is_no_room_to_load_beside_it(kind):
    geometry, prompt = make_geometry(kind=kind), tokens_of(Random(0), 200)
    num_frames = geometry.row_frames(209) + 1
    engine = Engine.make(
        host_frames=100, num_frames=num_frames, geometry=geometry, max_model_len=210
    )
    for tokens in (prompt[:100], tokens_of(Random(1), 200), prompt):
        engine.add(tokens, max_tokens=10)
        engine.run()
    assert engine.device.events["loads"] == 1 and engine.counters["cache_hits"] == 0
    engine.check()


WINDOWS = [
    ("hybrid", (None, 37)),
    ("hybrid", (20, 90)),
    ("attention", (None, 40)),
    ("attention", (50,)),
]


@pytest.mark.parametrize(
    ("kind", "windows", "page_tokens", "below"),
    drawn([(*form, page, below) for form in WINDOWS for page in (16, 64) for below in SIZES]),
)
def test_pages_behind_a_window_are_neither_saved_nor_loaded(kind, windows, page_tokens, below):
    geometry = make_geometry(kind=kind, windows=windows, page_tokens=page_tokens)
    num_frames = geometry.row_frames(330) * 3 // 2
    engine = Engine.make(host_frames=below, num_frames=num_frames, geometry=geometry)
    serve(engine, 1)
    events = engine.device.events
    assert min(events.get("saves", 0), events.get("loads", 0) if below == 600 else 9) > 5


def test_an_engine_with_the_arena_alone_copies_nothing():
    engine = Engine.make(num_frames=40)
    serve(engine, 2)
    assert engine.counters["cache_leaf_evictions"] > 5
    assert not any(plan.saves or plan.loads for plan in engine.plans)


@pytest.mark.parametrize(
    ("kind", "windows"),
    [("hybrid", ()), ("attention", ()), ("recurrent", ()), ("hybrid", (20, 90))],
)
def test_what_lies_below_is_still_there_when_the_arena_is_lost(kind, windows):
    geometry = make_geometry(kind=kind, windows=windows)
    num_frames = geometry.row_frames(330) * 3 // 2
    engine = Engine.make(host_frames=600, num_frames=num_frames, geometry=geometry)
    rng = Random(3)
    prompts = [tokens_of(rng, rng.randrange(60, 200)) for _ in range(8)]
    for prompt in prompts:
        engine.add(prompt, max_tokens=5)
        engine.run()
    looked_up = [np.array([*prompt, 1]) for prompt in prompts]

    def below():
        tree = engine.scheduler.memory.tree
        return [tree.match(tokens).found[HOST].hit_len for tokens in looked_up]

    before = below()
    held = engine.scheduler.memory.tree.tiers[HOST].frames.num_held
    assert sum(map(bool, before)) > 3
    engine.add(prompts[0], max_tokens=20)
    engine.step()
    engine.crash()
    assert below() == before
    assert engine.scheduler.memory.tree.tiers[HOST].frames.num_held <= held
    engine.run()
    for prompt in prompts[1:]:
        engine.add(prompt, max_tokens=5)
        engine.run()
    assert engine.device.events["loads"] > 3
    engine.check()


def test_after_a_change_that_was_broken_off_nothing_is_kept_below():
    engine = Engine.make(host_frames=600, num_frames=40)
    serve_some = [tokens_of(Random(seed), 100) for seed in range(6)]
    for prompt in serve_some:
        engine.add(prompt, max_tokens=2)
        engine.run()
    tree = engine.scheduler.memory.tree
    assert tree.tiers[HOST].frames.num_held
    tree.tiers[HOST].frames.allocate(1)  # somebody took it, and was stopped before it noted that
    engine.crash()
    assert not engine.scheduler.memory.tree.tiers[HOST].frames.num_held
    engine.run()
    engine.check()


def test_a_plan_that_only_copies_is_a_plan():
    engine = Engine.make(host_frames=100, num_frames=40)
    engine.add(tokens_of(Random(0), 100), max_tokens=1)
    engine.run()
    memory = engine.scheduler.memory
    memory.make_room(39)
    plan = engine.scheduler.plan()
    assert plan and len(plan.saves) == 1 and not plan.rows
    assert engine.scheduler.receive(plan) == [] and not engine.scheduler.plan()
    engine.check()

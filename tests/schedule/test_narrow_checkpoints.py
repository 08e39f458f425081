"""Narrow checkpoints in the cache: what plans narrow and widen, on a device that checks every read."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.schedule.narrowing import NARROW
from tests.drawing import drawn
from tests.schedule.damaged_devices import DAMAGED, DamagedDevice
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of
from tests.schedule.traffic import random_traffic, serve


def make(*, kind="hybrid", windows=(), **options):
    return Engine.make(geometry=make_geometry(kind=kind, windows=windows, narrow=True), **options)


FORMS = [("hybrid", 40), ("recurrent", 14), ("hybrid", 100)]


@pytest.mark.parametrize(
    ("kind", "num_frames", "cache", "below", "lag"),
    drawn(
        [
            (*form, cache, below, lag)
            for form in FORMS
            for cache in ("lru", "adaptive")
            for below in (0, 40, 600)
            for lag in (0, 1)
        ]
    ),
)
def test_rows_go_on_from_narrow_checkpoints(kind, num_frames, cache, below, lag):
    engine = make(kind=kind, num_frames=num_frames, cache=cache, host_frames=below, lag=lag)
    serve(engine, 1)
    events, counters = engine.device.events, engine.counters
    assert min(events["narrowed"], events["widened"]) > 5
    assert counters["narrowed_checkpoints"] == events["narrowed"]
    assert counters["widened_checkpoints"] == events["widened"] == counters["cache_hits"]
    if below == 600 and num_frames < 100:
        assert min(events.get("saves", 0), events.get("loads", 0)) > 3


MODES = {
    "tight": {"num_frames": 21},
    "results at once": {"num_frames": 25, "lag": 0},
    "a tier below": {"num_frames": 26, "host_frames": 60},
    "windows": {"num_frames": 30, "windows": (20, 90)},
    "few slots": {"num_frames": 100, "max_slots": 8},
    "texts that may be cut": {"num_frames": 30, "stop": "x"},
    "lost devices": {"num_frames": 40, "host_frames": 90, "crash_rate": 0.04},
    "drafts": {"num_frames": 40, "speculation": SpeculationConfig(num_tokens=3, adaptive=False)},
}


@pytest.mark.parametrize(("mode", "seed"), drawn([(m, seed) for m in MODES for seed in range(6)]))
def test_random_traffic(mode, seed):
    options, rng = dict(MODES[mode]), Random(seed)
    traffic = {name: options.pop(name) for name in ("stop", "crash_rate") if name in options}
    if mode == "drafts":
        options["keep"] = lambda most: rng.randint(1, most)
    engine = make(max_model_len=340, vocab=200, **options)
    random_traffic(seed, engine, turns=80, abort_rate=0.05, **traffic)
    events = engine.device.events
    assert events["narrowed"] > 5 and events["widened"] > 2
    counters = engine.counters
    assert mode != "tight" or counters["preemptions"] or counters["narrow_without_room"]


def entry(engine, tokens):
    return engine.scheduler.memory.tree.match(np.array([*tokens, 1])).hit_len


def test_a_checkpoint_at_the_end_of_a_sequence_is_narrowed_in_place():
    engine = make(num_frames=60)
    memory, prompt = engine.scheduler.memory, tokens_of(Random(0), 40)
    request = engine.add(prompt, max_tokens=60, stop_ids=())
    while request.output.finish_reason is None:
        engine.step()
    [slot] = [slot for slot, node in memory.tree.arena.slot_nodes.items() if node.end == 96]
    narrow = list(memory.slots.frames(slot))
    assert len(narrow) == memory.slots.lengths[NARROW]
    [held] = memory.narrowing.held_frames  # until the next plan has read them
    engine.run()
    [taken] = [each for plan in engine.plans for each in plan.narrowed if narrow[0] in each.target]
    assert taken.target.tolist() == narrow
    assert taken.source.tolist() == [*narrow, *held.tolist()]
    assert not memory.narrowing.held_frames
    assert all(memory.frames.holders(frame) == 0 for frame in held.tolist())
    assert entry(engine, [*prompt, *request.output.token_ids][:96]) == 96


def test_what_a_row_goes_on_from_is_not_overwritten_before_it_is_narrowed():
    """A breakpoint within a prompt: its chunk's checkpoint goes into the cache while the row needs the next one."""
    engine = make(num_frames=60, lag=0)
    memory, prompt = engine.scheduler.memory, tokens_of(Random(0), 150)
    engine.add(prompt, max_tokens=40, cache_breakpoints=(64,))
    plan = engine.scheduler.plan()
    assert [row.state_len for row in plan.prefill] == [64] and not plan.narrowed
    [held] = memory.narrowing.held_slots
    assert memory.slots.resolve(held) == plan.prefill[0].write_slot
    assert memory.slots.holders(held) == 2  # the row, and what waits for the next plan
    engine.device.execute(plan)
    engine.scheduler.receive(plan)
    following = engine.scheduler.plan()
    assert len(following.narrowed) == 1
    # The plan that narrows it may write over it.
    assert following.prefill[0].write_slot == following.prefill[0].read_slot


def test_an_entry_is_not_evicted_in_the_plan_that_publishes_it():
    engine = make(num_frames=60, host_frames=60, lag=0)
    memory, prompt = engine.scheduler.memory, tokens_of(Random(0), 150)
    tried = []
    end_plan = memory.end_plan

    def evicting(plan):
        memory.make_room(59, needed=False)
        tried.append(entry(engine, prompt[:64]))
        assert not memory.below.saves
        end_plan(plan)

    memory.end_plan = evicting
    engine.add(prompt, max_tokens=1, cache_breakpoints=(64,))
    engine.step()
    assert tried == [64]
    memory.end_plan = end_plan
    engine.run()
    engine.check()


def test_without_room_a_checkpoint_is_not_published_and_the_row_goes_on():
    geometry = make_geometry(narrow=True)
    engine = Engine.make(geometry=geometry, num_frames=geometry.row_frames(170) + 1, lag=0)
    prompt = tokens_of(Random(0), 160)
    engine.add(prompt, max_tokens=9, cache_breakpoints=(64,))
    engine.run()
    assert engine.counters["narrow_without_room"] >= 1
    assert entry(engine, prompt) == 160  # what the row has left at its end
    engine.check()


@pytest.mark.parametrize("lag", [0, 1])
def test_what_a_damaged_sequence_has_published_leaves_the_cache(lag):
    engine = make(num_frames=100, lag=lag, vocab=50)
    engine.device.__class__ = DamagedDevice
    prompt = [token % 48 + 1 for token in tokens_of(Random(0), 90)]
    engine.add([*prompt, DAMAGED], max_tokens=20, cache_breakpoints=(64,), stop_ids=())
    engine.run()
    assert entry(engine, prompt) == 0
    engine.add(prompt, max_tokens=5)
    engine.run()
    engine.check()


@pytest.mark.parametrize(("lag", "max_tokens"), [(0, 1), (1, 2)])
def test_an_entry_that_is_there_is_not_narrowed_again(lag, max_tokens):
    """With one token a sequence ends before the plan that narrows what its prompt has left."""
    engine = make(num_frames=100, lag=lag)
    prompt = tokens_of(Random(0), 100)
    for _ in range(3):
        engine.add(prompt, max_tokens=max_tokens)
        engine.run()
    assert engine.device.events["widened"] == 2
    assert engine.device.events["narrowed"] == 1
    assert [node.end for node in engine.scheduler.memory.tree.root.walk() if node.slots] == [96]


def test_outside_a_plan_nothing_is_evicted_for_a_narrow_checkpoint():
    """The next plan would save what was evicted after it has narrowed over it."""
    engine = make(num_frames=60, host_frames=60)
    memory, prompt = engine.scheduler.memory, tokens_of(Random(0), 64)
    engine.add(prompt, max_tokens=1)
    engine.run()
    slot, pages = memory.slots.allocate(), memory.frames.allocate(2).reshape(1, 2)
    memory.frames.allocate(memory.frames.num_free)
    other = np.array(tokens_of(Random(1), 32), np.int32)
    assert memory._fill(other, pages, slot) is None
    assert entry(engine, prompt) == 32 and not memory.below.saves
    memory.begin_plan()
    assert memory._fill(other, pages, slot) is not None
    assert entry(engine, prompt) == 0 and len(memory.below.saves) == 1

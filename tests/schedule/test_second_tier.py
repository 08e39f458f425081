"""An engine with a second tier: what plans save and load, on a device that checks every read."""

from random import Random
from unittest import mock

import numpy as np
import pytest

from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.engine.runner import Runner
from hybrid_jax.schedule.plan import Plan, Transfer
from tests.cache.second_tier import SECOND, load, publish, save, second_tier
from tests.drawing import drawn
from tests.schedule.simulated_device import SimulatedDevice
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of


class TwoTierTree(RadixTree):
    """Keeps below what its arena evicts, and has it back when a prompt asks for it.

    Attributes:
        memory: takes the transfers, once there is one.
        num_frames: of the second tier.
        saving: copies of the plan that is being made.
    """

    memory, num_frames = None, 600

    def __init__(self, tiers, **options):
        self.saving = []
        below = second_tier(tiers[ARENA], self.num_frames, 100)
        super().__init__([*tiers, below], sink=TwoTierTree.take, **options)

    def take(self, node, tier):
        copy = save(self, node) if tier == ARENA else None
        if copy is not None:
            transfer = Transfer(tier=SECOND, arena=copy.source, other=copy.target)
            self.memory.saves.append(transfer)
            self.saving.append(copy)

    def match(self, tokens, owner="", *, least=1):
        if owner and (copy := load(self, tokens)) is not None:  # a sequence is about to start
            transfer = Transfer(tier=SECOND, arena=copy.target, other=copy.source)
            self.memory.load(copy.node, transfer)
            publish(self, copy)
        return super().match(tokens, owner, least=least)


class TwoTierDevice(SimulatedDevice):
    """Copies what plans say between its frames and those of the second tier."""

    def execute(self, plan):
        self.below = getattr(self, "below", {})
        for move in (*plan.saves, *plan.loads):
            assert move.arena.all() and move.other.all(), "a copy of the sink"
        for move in plan.saves:
            for arena, other in zip(move.arena.tolist(), move.other.tolist(), strict=True):
                self.below[other] = self.frames[arena].copy()
            self._count("saves")
        for move in plan.loads:
            for arena, other in zip(move.arena.tolist(), move.other.tolist(), strict=True):
                self.frames[arena] = self.below[other].copy()
            self._count("loads")
        super().execute(plan)


class TwoTierEngine(Engine):
    """Tells the tree what is received."""

    def below(self):
        scheduler = self.scheduler
        tree, plan, receive = scheduler.memory.tree, scheduler.plan, scheduler.receive
        tree.memory, saves = scheduler.memory, {}
        self.device.__class__ = TwoTierDevice

        def planned():
            made = plan()
            if made:
                assert len(made.saves) == len(tree.saving)
                saves[id(made)], tree.saving = tree.saving, []
            assert not tree.saving
            return made

        def received(made):
            news = receive(made)
            for copy in saves.pop(id(made)):
                publish(tree, copy)
            return news

        scheduler.plan, scheduler.receive = planned, received
        return self


def serve(engine, seed):
    """Conversations that come back when the arena has long given their beginnings away."""
    rng = Random(seed)
    system = tokens_of(rng, 70)
    prompts = [system + tokens_of(rng, rng.randrange(60, 200)) for _ in range(8)]
    for _ in range(3):
        rng.shuffle(prompts)
        for place, prompt in enumerate(prompts):
            request = engine.add(prompt, max_tokens=rng.randrange(5, 50))
            if place % 2:
                engine.run()
                engine.scheduler.memory.tree.check_invariants()
            prompts[place] = prompt + request.output.token_ids[:3] + tokens_of(rng, 10)
        engine.run()
    hits = engine.counters["cache_hit_tokens"]
    engine.check()
    return hits


def two_tiers(below, **options):
    """An engine whose second tier has so many frames."""
    tree = type("Tree", (TwoTierTree,), {"num_frames": below})
    with mock.patch("hybrid_jax.schedule.memory.RadixTree", tree):
        return TwoTierEngine.make(**options).below()


FORMS = [("hybrid", 40), ("attention", 30), ("recurrent", 19)]
POLICIES, SIZES = ("lru", "adaptive"), (600, 40, 20)


@pytest.mark.parametrize(
    ("kind", "num_frames", "cache", "below"),
    drawn([(*form, cache, below) for form in FORMS for cache in POLICIES for below in SIZES]),
)
def test_what_was_evicted_comes_back_and_changes_no_token(kind, num_frames, cache, below):
    options = dict(num_frames=num_frames, geometry=make_geometry(kind=kind), cache=cache)
    engine = two_tiers(below, **options)
    hits = serve(engine, 1)
    events = engine.device.events
    assert min(events.get("saves", 0), events.get("loads", 0)) > (5 if below == 600 else 0)
    if below == 600:
        assert hits > 1.2 * serve(Engine.make(**options), 1)
    tier = engine.scheduler.memory.tree.tiers[SECOND]
    assert tier.frames.num_held == tier.slots.num_held == 0


def test_no_tier_evicts_what_a_plan_loads_before_the_plan_is_made():
    engine = two_tiers(100, num_frames=40)
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
    tree.match(tokens, "a sequence that is about to start")
    for tier, frames in enumerate(everything):
        tree.make_room(frames, tier=tier)
    assert [found.hit_len for found in tree.match(tokens).found] == [96, 96]
    assert not memory.saves
    plan = Plan()
    memory.end_plan(plan)
    assert len(plan.loads) == 1 and not memory.loads
    for tier, frames in enumerate(everything):
        assert tree.make_room(frames, tier=tier)
    assert [found.hit_len for found in tree.match(tokens).found] == [0, 0]


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_row_that_is_alone_starts_without_what_there_is_no_room_to_load_beside_it(kind):
    geometry, prompt = make_geometry(kind=kind), tokens_of(Random(0), 200)
    num_frames = geometry.row_frames(209) + 1
    engine = two_tiers(100, num_frames=num_frames, geometry=geometry, max_model_len=210)
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
    engine = two_tiers(below, num_frames=num_frames, geometry=geometry)
    serve(engine, 1)
    events = engine.device.events
    assert min(events.get("saves", 0), events.get("loads", 0) if below == 600 else 9) > 5


def test_an_engine_with_the_arena_alone_copies_nothing():
    engine = Engine.make(num_frames=40)
    serve(engine, 2)
    assert engine.counters["cache_leaf_evictions"] > 5
    assert not any(plan.saves or plan.loads for plan in engine.plans)


def test_a_plan_that_only_copies_is_a_plan():
    scheduler = Engine.make().scheduler
    transfer = Transfer(tier=SECOND, arena=np.array([3]), other=np.array([5]))
    for name in ("saves", "loads"):
        getattr(scheduler.memory, name).append(transfer)
        plan = scheduler.plan()
        assert plan and getattr(plan, name) == [transfer] and not plan.rows
        assert scheduler.receive(plan) == [] and not scheduler.plan()


def test_the_runner_refuses_to_copy_what_it_cannot():
    transfer = Transfer(tier=SECOND, arena=np.array([3]), other=np.array([5]))
    for plan in (Plan(saves=[transfer]), Plan(loads=[transfer])):
        with pytest.raises(AssertionError, match="the arena is the only tier"):
            Runner._dispatch(None, plan)

"""An engine with a second tier: what plans save and load, on a device that checks every read."""

from random import Random
from unittest import mock

import numpy as np
import pytest

from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.engine.runner import Runner
from hybrid_jax.schedule.plan import Plan, Transfer
from tests.cache.second_tier import SECOND, give_up, load, publish, save, second_tier
from tests.schedule.simulated_device import SimulatedDevice
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of

NUM_FRAMES_BELOW = 600


class TwoTierTree(RadixTree):
    """Keeps below what its arena evicts, and has it back when a prompt asks for it.

    Attributes:
        memory: takes the transfers, once there is one.
        saving, loading: copies of the plan that is being made.
    """

    memory = None

    def __init__(self, tiers, **options):
        self.saving, self.loading = [], []
        below = second_tier(tiers[ARENA], NUM_FRAMES_BELOW, 100)
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
            self.memory.loads.append(transfer)
            self.fill(copy.tokens, copy.pages, copy.slot)
            self.loading.append(copy)  # held until the plan is made
        return super().match(tokens, owner, least=least)


class TwoTierDevice(SimulatedDevice):
    """Copies what plans say between its frames and those of the second tier."""

    def execute(self, plan):
        self.below = getattr(self, "below", {})
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
            for copy in tree.loading:
                give_up(tree, copy)
            if made:
                assert len(made.saves) == len(tree.saving) and len(made.loads) == len(tree.loading)
                saves[id(made)], tree.saving = tree.saving, []
            assert not tree.saving
            tree.loading = []
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
            prompts[place] = prompt + request.output[:3] + tokens_of(rng, 10)
        engine.run()
    hits = engine.counters["cache_hit_tokens"]
    engine.check()
    return hits


@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
@pytest.mark.parametrize("cache", ["lru", "adaptive"])
def test_what_was_evicted_comes_back_and_changes_no_token(kind, cache):
    frames = {"hybrid": 40, "attention": 30, "recurrent": 19}[kind]
    options = dict(num_frames=frames, geometry=make_geometry(kind=kind), cache=cache)
    without = serve(Engine.make(**options), 1)
    with mock.patch("hybrid_jax.schedule.memory.RadixTree", TwoTierTree):
        engine = TwoTierEngine.make(**options).below()
    hits = serve(engine, 1)
    events = engine.device.events
    assert min(events.get("saves", 0), events.get("loads", 0)) > 5
    assert hits > 1.2 * without
    below = engine.scheduler.memory.tree.tiers[SECOND]
    assert below.frames.num_held == below.slots.num_held == 0


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

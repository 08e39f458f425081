"""Replicas behind the router on virtual time: every request ends once, and marks agree with the trees throughout."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hybrid_jax.cluster.router import ReplicaCosts
from hybrid_jax.cluster.watch import resume_points
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.sim.prefix_cache.virtual_engine import FRAME_BYTES, VirtualEngine
from hybrid_jax.sim.routing.fleet import run_fleet
from hybrid_jax.sim.routing.own import OwnRouting
from hybrid_jax.sim.routing.rivals import (
    ApproximateTree,
    BlocksAndLoad,
    ExploitOrExplore,
    LeastLoaded,
    PrefixHash,
    RoundRobin,
    joint_seen,
)
from hybrid_jax.sim.routing.shadow import ShadowReplica, ShadowRequest, run_shadow
from tests.sim.chats import KINDS, PLENTY, asked, chat, tokens

ENGINE = EngineConfig(cache=CacheConfig(loads="always"), max_rows=4, prefill_tokens=128)


class Machine:
    """Replicas and a router, and rules that change them at random. Each replica takes its turns when it is told to."""

    def __init__(self, kind: str, replicas: int, frames: int, seed: int, host: int = 0):
        costs, self.rng = KINDS[kind], np.random.default_rng(seed)
        self.make = lambda: VirtualEngine(
            costs, costs, ENGINE, frames * FRAME_BYTES, None, host_capacity=host * FRAME_BYTES
        )
        self.engines = [self.make() for _ in range(replicas)]
        self.routing = OwnRouting()
        self.routing.begin(self.engines)
        self.router = self.routing.router
        self.traced, self.done = {}, {}  # by name: the request, and the tokens that came
        self.at, self.ended, self.left = {}, Counter(), set()
        self.moved = self.aborted = 0
        self.stems = [tokens(seed * 100 + n, 300) for n in range(5)]

    def send(self, name: str) -> None:
        """Routes a request, new or back from a replica that left, from its tokens so far."""
        traced, done = self.traced[name], self.done[name]
        whole = np.concatenate((traced.prompt, np.array(done, np.int32)))
        replica = self.router.choose(name, whole).replica
        assert replica not in self.left
        self.engines[replica].add(name, traced, done)
        self.at[name] = replica

    def arrive(self) -> None:
        number = len(self.traced)
        stem = self.stems[self.rng.integers(5)][: self.rng.integers(1, 300)]
        prompt = np.concatenate((stem, tokens(10_000 + number, self.rng.integers(1, 60))))
        output = tokens(20_000 + number, self.rng.integers(1, 40))
        self.traced[str(number)], self.done[str(number)] = asked(number, 0.0, prompt, output), []
        self.send(str(number))

    def turn(self) -> None:
        replica = int(self.rng.choice([r for r in range(len(self.engines)) if r not in self.left]))
        engine = self.engines[replica]
        if engine.begin() is None:
            return
        for new in engine.end():
            name = new.request.request_id
            self.done[name] += new.new_token_ids
            if new.new_token_ids:
                self.router.computed(name)
            if new.finished:
                self.ended[name] += 1
                del self.at[name]
                self.router.ended(name)

    def leave(self) -> None:
        here = [r for r in range(len(self.engines)) if r not in self.left]
        if len(here) == 1:
            return
        replica = int(self.rng.choice(here))
        self.left.add(replica)
        back = self.router.leave(replica)
        assert sorted(back) == sorted(name for name, at in self.at.items() if at == replica)
        self.moved += len(back)
        for name in back:
            self.send(name)

    def join(self) -> None:
        if self.left:
            replica = self.left.pop()
            self.engines[replica] = self.make()
            self.router.join(replica)
            self.routing.watch(replica, self.engines[replica])

    def abort(self) -> None:
        if self.at:
            name = str(self.rng.choice(sorted(self.at)))
            self.engines[self.at.pop(name)].scheduler.abort(name)
            self.router.ended(name)
            self.ended[name] += 1
            self.aborted += 1
            self.done[name] = None

    def reset(self) -> None:
        self.engines[self.rng.integers(len(self.engines))].scheduler.reset_prefix_cache()

    def check(self) -> None:
        self.router.read_news()
        self.router.check_invariants()
        for replica, engine in enumerate(self.engines):
            tree = engine.scheduler.memory.tree
            for tier in tree.tiers:
                there = resume_points(tree, tier.number)
                self.router.marks.check(
                    replica, tier.number, there[:0] if replica in self.left else there
                )

    def run(self, steps: int) -> None:
        rules = [self.arrive, self.turn, self.leave, self.join, self.abort, self.reset]
        for _ in range(steps):
            self.rng.choice(rules, p=[0.2, 0.71, 0.02, 0.04, 0.02, 0.01])()
            self.check()
        while self.at:
            self.turn()
        self.check()
        assert self.ended == Counter(self.traced.keys())
        for name, done in self.done.items():
            assert done is None or done == self.traced[name].output.tolist()
        for replica, engine in enumerate(self.engines):
            if replica not in self.left:
                engine.scheduler.check_invariants()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_ends_once_with_its_tokens_while_replicas_come_and_go(kind, seed):
    frames = 30 if kind == "recurrent" else 120
    machine = Machine(kind, replicas=3, frames=frames, seed=seed, host=frames * (seed % 2))
    machine.run(400)
    assert machine.moved > 2 and machine.aborted > 0 and len(machine.traced) > 40


# --- fleets -----------------------------------------------------------------------------------------


def fleet(trace, routing, *, replicas=3, kind="hybrid", capacity=PLENTY, **more):
    return run_fleet(
        trace,
        routing,
        replicas=replicas,
        costs=KINDS[kind],
        engine=ENGINE,
        capacity=capacity,
        **more,
    )


def chats(count: int, turns: int = 4) -> list:
    found = [one for n in range(count) for one in chat(turns, 3.0, session=n)]
    return sorted(found, key=lambda one: one.arrival_s)


ROUTERS = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "hash": PrefixHash,
    "tree": ApproximateTree,
    "blocks": BlocksAndLoad,
    "blocks joint": lambda: BlocksAndLoad(joint_seen),
    "explore": lambda: ExploitOrExplore(KINDS["hybrid"]),
    "own": OwnRouting,
}


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_runs_a_trace_to_its_end_and_the_same_way_again(name):
    first, again = (fleet(chats(5), ROUTERS[name]()) for _ in range(2))
    assert first.ttft_s == again.ttft_s and first.token_hit_rate == again.token_hit_rate
    assert 0 < first.busy <= 1 <= first.imbalance


def test_one_replica_does_the_same_behind_every_router():
    found = [fleet(chats(4), make(), replicas=1) for make in ROUTERS.values()]
    assert len({(f.ttft_s["mean"], f.latency_s["mean"], f.token_hit_rate) for f in found}) == 1


def test_sessions_hit_where_they_went_before_and_in_turns_they_do_not():
    own, blind = fleet(chats(4), OwnRouting()), fleet(chats(4), RoundRobin())
    assert own.token_hit_rate > 0.5 > 2 * blind.token_hit_rate
    assert own.ttft_s["mean"] < blind.ttft_s["mean"]


def test_what_is_found_in_a_hosts_memory_is_worth_going_to():
    trace, small = chats(8, turns=5), 60 * FRAME_BYTES
    without, with_host = (
        fleet(trace, OwnRouting(), capacity=small, host_capacity=size) for size in (0, PLENTY)
    )
    assert with_host.token_hit_rate > 1.2 * without.token_hit_rate


def test_a_request_that_fits_no_replica_is_an_error():
    with pytest.raises(ValueError, match="request 0 fits no replica"):
        fleet([asked(0, 0.0, tokens(0, 5000), [1])], RoundRobin(), capacity=8 * FRAME_BYTES)


class Together(OwnRouting):
    """Sees all prompts at once."""

    def __init__(self, trace):
        super().__init__()
        self.trace = trace

    def begin(self, engines):
        super().begin(engines)
        prompts = {str(number): one.prompt for number, one in enumerate(self.trace)}
        self.chosen = self.router.choose_all(prompts)

    def choose(self, name, prompt, now):
        return self.chosen[name].replica


def groups(seed: int, count: int, most: int) -> list:
    """Groups of up to `most` prompts that share a beginning, in no order, all there at once."""
    rng, trace = np.random.default_rng(seed), []
    for group in range(count):
        stem = tokens(seed * 1000 + group, rng.integers(100, 800))
        for _ in range(rng.integers(1, most)):
            rest = tokens(rng.integers(1 << 30), rng.integers(5, 100))
            trace.append(asked(len(trace), 0.0, np.concatenate((stem, rest)), [1] * 4))
    order = rng.permutation(len(trace))
    return [trace[index] for index in order]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_come_together_are_parted_along_their_prefixes_and_evenly(kind, seed):
    """At least 0.95 of the hits of a single replica, and the busiest works at most 1.1 of the mean."""
    trace = groups(seed, 60, 20)
    alone, parted = (
        fleet(trace, Together(trace), replicas=replicas, kind=kind, capacity=4 * PLENTY)
        for replicas in (1, 4)
    )
    assert parted.token_hit_rate >= 0.95 * alone.token_hit_rate > 0.5
    assert parted.imbalance <= 1.1


# --- large fleets -----------------------------------------------------------------------------------


def test_a_shadow_waits_for_its_queue_and_hits_what_it_has():
    costs = KINDS["hybrid"].per_block(16)
    replica = ShadowReplica(costs, PLENTY, flops_per_second=costs.flops_per_token * 10, step_s=0.5)
    first = ShadowRequest(0.0, np.arange(40, dtype=np.int32), np.arange(44, dtype=np.int32))
    assert replica.add(first, 1.0, 16) == (1.0 + 4.0, 5.0 + 4 * 16 * 0.5)
    again = ShadowRequest(0.0, np.arange(50, dtype=np.int32), np.arange(51, dtype=np.int32))
    assert replica.add(again, 2.0, 16)[0] == pytest.approx(5.0 + 0.6)  # 44 of 50 are there
    assert (replica.asked, replica.hit) == (90, 44)


def test_a_large_fleet_goes_on_at_the_ends_of_its_requests():
    costs = KINDS["hybrid"].per_block(16)
    requests = [
        ShadowRequest(
            0.1 * n,
            np.append(stem, [1000 + n, 0]).astype(np.int32),
            np.append(stem, [1000 + n, 0, n]).astype(np.int32),
        )
        for n in range(60)
        for stem in [np.arange(100 * (n % 3), 100 * (n % 3) + 30, dtype=np.int32)]
    ]
    model = ReplicaCosts(costs=costs, grain=2, max_rows=99, steps=0, flops_per_byte=0.0)
    results = []
    for routing in (RoundRobin(), OwnRouting(model)):
        fleet = [
            ShadowReplica(costs, PLENTY, flops_per_second=costs.flops_per_token * 100, step_s=0.01)
            for _ in range(4)
        ]
        results.append(run_shadow(requests, routing, fleet, block_tokens=16))
    blind, own = results
    assert blind.requests == own.requests == 60 and own.hit_rate > blind.hit_rate > 0.5
    assert own.ttft_s["mean"] < blind.ttft_s["mean"]

"""Memory refused wherever it is asked for: admission, forks, growth, folds, chunks, preemption and ends.

A fixed traffic runs once undisturbed, and every call that asks for memory is noted. Then it runs again and again,
each time with another of these calls refused: as by a full pool, which the scheduler copes with, or by an exception,
after which the engine starts over. Either way every request ends with the plain loop's tokens.
"""

from __future__ import annotations

import functools
import os
import random
from dataclasses import fields
from unittest import mock

import numpy as np
import pytest

from hybrid_jax.config import CacheConfig, EngineConfig, SpeculationConfig
from hybrid_jax.geometry import make_geometry as geometry_of
from hybrid_jax.schedule.memory import Memory
from hybrid_jax.schedule.sequence import Announced, HeldMemory, InFlight, Queued, Sequence
from tests.drawing import left_to_all
from tests.schedule.faults import (
    ALLOCATIONS,
    ERRORS,
    EVERYTHING,
    ROOM,
    Faults,
    fail,
    is_ours,
    say_no,
    say_no_when_empty,
)
from tests.schedule.simulated_disk import SimulatedDisk
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of
from tests.tiny_models import tiny_model

# HYBRID_JAX_FAULTS=all refuses every call, not some of every site: minutes.
ALL = os.environ.get("HYBRID_JAX_FAULTS") == "all"
SETTINGS = {
    "max_model_len": 260, "vocab": 200, "max_rows": 3, "max_slots": 9, "prefill_tokens": 64,
    "steps_per_dispatch": 4, "kind": "hybrid", "cache": "adaptive",
}  # fmt: skip
ABOVE, DISK, INT8, BOTH = "above the host's memory", "above a disk", "int8", "int8 above both"
TIERS = ABOVE, DISK, BOTH
CASES = {
    "pages of half a grain": {"page_tokens": 16, "num_frames": 33, "steps_per_dispatch": 24},
    "pages of two grains": {"page_tokens": 64, "num_frames": 22, "max_slots": 7},
    "pages of four grains": {"page_tokens": 128, "num_frames": 18, "cache": "lru", "lag": 0},
    "attention": {"page_tokens": 64, "num_frames": 13, "kind": "attention"},
    "recurrent": {"page_tokens": 0, "num_frames": 9, "kind": "recurrent"},
    ABOVE: {"page_tokens": 64, "num_frames": 22, "host_frames": 60},
    DISK: {"page_tokens": 64, "num_frames": 22, "disk": True},
    INT8: {"page_tokens": 64, "num_frames": 22, "narrow": True},
    BOTH: {"page_tokens": 64, "num_frames": 22, "host_frames": 60, "disk": True, "narrow": True},
    "no cache": {"page_tokens": 64, "num_frames": 22, "cache": "off"},
    "drafts": {
        "page_tokens": 64,
        "num_frames": 22,
        "speculation": SpeculationConfig(num_tokens=3, adaptive=False),
        "keep": lambda most: 1 + most // 2,
    },  # fmt: skip
    # Every kind of state but Mamba's, and two shapes of KV.
    "a model of all kinds": {"page_tokens": 64, "num_frames": 31, "model": "with_unknown_kind"},
}
# (turn of arrival, tokens shared with the others, own tokens, completions, most output)
TRAFFIC = [
    (0, 0, 100, 1, 60),
    (0, 70, 10, 3, 40),
    (1, 70, 30, 1, 50),
    (2, 130, 0, 1, 9),
    (5, 0, 40, 2, 90),
    (8, 130, 9, 1, 30),
    (10, 96, 0, 2, 40),
    (14, 0, 33, 1, 100),
    (18, 130, 12, 1, 20),
    (22, 0, 120, 2, 60),
]
ASKED = {  # some part of the scheduler's work: the part of `Memory` it calls, and what that asks for
    "admit: start": "room, eviction, slot, frames, holds on frames, hold on slot",
    "fork: fork": "room, eviction, slot, frames, holds on frames, hold on slot",
    "chunk: slot_to_write": "room, eviction, slot, frames",
    "decode: plan_fold": "room, eviction, slot, frames",
    "decode: grow": "room, eviction, frames",
    "finish: publish": "holds on frames, hold on slot",  # of a turn
    "finish: finish": "holds on frames, hold on slot",  # of a sequence
    "preempt: finish": "holds on frames, hold on slot",
}
SITES = {f"{work} > {word}" for work, words in ASKED.items() for word in words.split(", ")}


def make_engine(case: str) -> Engine:
    settings = SETTINGS | CASES[case]
    kind, page_tokens = settings.pop("kind"), settings.pop("page_tokens")
    if (name := settings.pop("model", None)) is not None:
        config = EngineConfig(page_tokens=page_tokens)
        return Engine.make(geometry=geometry_of(tiny_model(name)[0], config), **settings)
    narrow = settings.pop("narrow", False)
    geometry = make_geometry(page_tokens=page_tokens, kind=kind, narrow=narrow)
    if narrow:
        settings["cache"] = CacheConfig(checkpoints="int8")
    if settings.pop("disk", False):
        settings["disk"] = SimulatedDisk(geometry)
    return Engine.make(geometry=geometry, **settings)


@functools.cache
def traffic() -> list[tuple[int, dict]]:
    """Turns in which requests arrive, in order, and the arguments of `Engine.add` for each."""
    rng, requests = random.Random(3), []
    trunk = tokens_of(rng, 130, 200)
    for index, (turn, shared, own, count, most) in enumerate(TRAFFIC):
        prompt = trunk[:shared] + tokens_of(rng, own, 200)
        group = f"g{index}" if count > 1 else None
        asked = {"prompt": prompt, "max_tokens": most, "sibling_group": group}
        requests += [(turn, asked)] * count
    return requests


def serve(engine: Engine, faults: Faults, *, abort: bool = False) -> int:
    """The traffic from its first request to its last token; returns how often the engine started over.

    With `abort` nobody waits for that: once a call was refused everything is aborted.
    """
    waiting, turn, restarts = list(traffic()), 0, 0
    with faults.installed():
        while waiting or engine.scheduler.has_work:
            try:
                while waiting and waiting[0][0] <= turn:
                    engine.add(**waiting[0][1])
                    waiting.pop(0)
                engine.step()  # plans nothing where the only row is refused its first chunk
            except ERRORS as error:
                assert is_ours(error), error
                restarts += 1 + start_over(engine)
            if abort and faults.num_refused:
                waiting = []
                for name in list(engine.requests):
                    engine.scheduler.abort(name)
                    engine.scheduler.check_invariants()
            turn += 1
            assert turn < 1000, f"no end in sight: {engine.counters}"
    return restarts


def start_over(engine: Engine) -> int:
    """Has the engine start over; how often that failed, because it takes holds for what lies below the arena."""
    failed = 0
    while True:
        try:
            engine.recover()
            return failed
        except ERRORS as error:
            assert is_ours(error), error
            failed += 1


@functools.cache
def sites_of(case: str, everything: bool) -> list[str]:
    """Where the undisturbed traffic asks for memory, or for room alone, call by call."""
    faults, engine = Faults(EVERYTHING if everything else ROOM), make_engine(case)
    serve(engine, faults)
    engine.check()
    return faults.sites


def points(sites: list[str], each: int) -> list[int]:
    """Numbers of calls to refuse: of every site the first, and others in even steps, `each` at most."""
    calls: dict[str, list[int]] = {}
    for number, site in enumerate(sites):
        calls.setdefault(site, []).append(number)
    each = len(sites) if ALL else each
    return sorted(n for these in calls.values() for n in these[:: -(-len(these) // each)])


def _part(site: str) -> str:
    """The part of `Memory` that asked."""
    return site.split(": ")[1].split(" > ")[0]


def disturbed(case: str, number: int, answer, *, times: int = 1, abort: bool = False) -> Engine:
    """The engine after the traffic, of whose calls one was refused, or some in a row."""
    everything = answer is fail
    faults = Faults(EVERYTHING if everything else ROOM, answer, range(number, number + times))
    engine = make_engine(case)
    restarts = serve(engine, faults, abort=abort)
    undisturbed = sites_of(case, everything)
    assert faults.sites[: number + 1] == undisturbed[: number + 1], "the traffic is another one"
    assert faults.num_refused == times or abort and faults.num_refused
    if everything and case in TIERS:  # a copy that finds no memory is left out
        assert restarts <= faults.num_refused
    else:
        assert restarts == (faults.num_refused if everything else 0)
    return engine


# --- what the traffic reaches ---------------------------------------------------------------------


def test_the_traffic_asks_for_memory_at_every_site():
    found = {site for case in CASES for site in sites_of(case, True)}
    assert found >= SITES, SITES - found
    plain = {site for case in CASES if "int8" not in case for site in sites_of(case, True)}
    assert _taking(plain) == {"admit", "fork", "chunk", "decode"}, (
        "others give back, and never take"
    )
    # A checkpoint that others hold, too, is narrowed into a slot of its own.
    assert _taking(found) <= _taking(plain) | {"finish", "preempt"}


def test_the_traffic_is_short_of_memory():
    total = {}
    for case in CASES:
        engine = make_engine(case)
        serve(engine, Faults({}))
        for name, count in {**engine.counters, **engine.device.events}.items():
            total[name] = total.get(name, 0) + count
    fired = """preemptions forks copies cache_hits cache_leaf_evictions cache_tombstone_evictions
        cache_disowned_checkpoints folds_in_place folds_to_new""".split()
    assert min(total[name] for name in fired) >= 2, {name: total[name] for name in fired}


def _taking(sites: set[str]) -> set[str]:
    """The work that takes memory, and not only holds."""
    return {site.split(":")[0] for site in sites if site.split(" > ")[1] in ALLOCATIONS.values()}


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [say_no, say_no_when_empty])
@pytest.mark.parametrize("case", CASES)
def test_a_pool_that_says_no_costs_no_token(case, answer):
    for number in points(sites_of(case, False), 5):
        disturbed(case, number, answer).check()


@pytest.mark.parametrize("case", CASES)
@left_to_all(
    "pages of two grains", "pages of four grains", "drafts", "recurrent", "int8", "above a"
)
def test_an_allocation_that_fails_costs_a_restart_and_no_token(case):
    for index, number in enumerate(points(sites_of(case, True), 3)):
        disturbed(case, number, fail, times=1 + 2 * (index % 5 == 0)).check()


@pytest.mark.parametrize("answer", [say_no, fail])
@pytest.mark.parametrize("case", CASES)
def test_whoever_aborts_everything_then_gets_everything_back(case, answer):
    numbers, num_aborted = points(sites_of(case, answer is fail), 2), 0
    for number in numbers:
        engine = disturbed(case, number, answer, abort=True)
        engine.check()  # all frames are free, once the prefix cache is empty
        reasons = {request.output.finish_reason for request in engine.requests.values()}
        num_aborted += "abort" in reasons
    assert num_aborted > len(numbers) / 2  # in the last turn nobody may be left


# --- calls that fail change nothing ---------------------------------------------------------------


def books(memory: Memory, sequences: list[Sequence]) -> dict:
    """Who holds what, the tree's own holds apart, and all that the sequences say."""
    frames, slots = memory.frames, memory.slots
    holds = {f: frames.holders(f) for f in range(1, frames.num_frames)}
    slot_holds = {slot: slots._holders[slot] for slot in range(1, slots.max_slots)}
    for slot in slot_holds:
        for frame in slots._frames[slot].tolist():
            holds[frame] -= 1
    pins = {}
    if memory.tree is not None:
        for frame, count in memory.tree.arena.pages.as_dict().items():
            holds[frame] -= count
        for handle in memory.tree.arena.slot_nodes:
            slot_holds[slots.resolve(handle)] -= 1
        pins = {id(node): node.pins for node in memory.tree.root.walk() if node.pins}
    return {
        "frames": {frame: count for frame, count in holds.items() if count},
        "slots": {slot: count for slot, count in slot_holds.items() if count},
        "live": (memory.holds.page_frames, memory.holds.num_slots),
        "pins": pins,
        "to release": (list(memory._later_frames), list(memory._later_slots)),
        "sequences": [_fields(sequence) for sequence in sequences],
    }


def _fields(sequence: Sequence | HeldMemory | Announced | Queued | InFlight) -> dict:
    """What the fields hold now, those of the values in them too."""

    def copied(value):
        if isinstance(value, HeldMemory | Announced | Queued | InFlight):
            return _fields(value)
        if isinstance(value, np.ndarray):
            return value.tolist()
        return list(value) if isinstance(value, list) else value

    return {field.name: copied(getattr(sequence, field.name)) for field in fields(sequence)}


def num_free(memory: Memory) -> tuple[int, int]:
    return memory.frames.num_free, memory.slots.num_free


def evicted(memory: Memory) -> int:
    return memory.tree.counters.evictions if memory.tree is not None else 0


def check_pools(memory: Memory) -> None:
    memory.frames.check_invariants()
    memory.slots.check_invariants()
    if memory.tree is not None:
        memory.tree.check_invariants()


def failing_first(method: str, faults: Faults, refused: set[str]):
    """`Memory.method`, made to fail at each of its allocations in turn before it may succeed."""
    real = getattr(Memory, method)

    def call(memory, sequence, *args, **kwargs):
        sequences = [sequence, *(arg for arg in args if isinstance(arg, Sequence))]
        nth = 0
        while True:
            if method == "start" and args[0] is not None:  # the last attempt may have evicted some
                args = (memory.tree.match(sequence.prompt, sequence.owner),)
            before, free, evictions = books(memory, sequences), num_free(memory), evicted(memory)
            number = len(faults.sites) + nth
            faults.refuse = range(number, number + 1)
            try:
                result = real(memory, sequence, *args, **kwargs)
            except ERRORS as error:
                assert is_ours(error), error
                refused.add(faults.sites[-1])
                assert books(memory, sequences) == before, faults.sites[-1]
                check_pools(memory)
                again = evicted(memory) > evictions  # it takes another way now
                assert again or num_free(memory) == free, faults.sites[-1]
                nth = 0 if again else nth + 1
                continue
            faults.refuse = range(0)
            return result

    return mock.patch.object(Memory, method, call)


@pytest.mark.parametrize("case", [case for case in CASES if case not in (*TIERS, INT8)])
def test_a_call_that_fails_changes_nothing(case):
    """Every call of the traffic, at every allocation inside it; what the tree evicted before stays evicted."""
    faults, refused, engine = Faults(ALLOCATIONS, fail), set(), make_engine(case)
    with (
        failing_first("start", faults, refused),
        failing_first("fork", faults, refused),
        failing_first("grow", faults, refused),
        failing_first("slot_to_write", faults, refused),
        failing_first("finish", faults, refused),
    ):
        assert serve(engine, faults) == 0
    engine.check()
    assert refused == set(faults.sites)
    geometry, reached = engine.scheduler.geometry, {_part(site) for site in refused}
    assert reached >= {"start", "fork"}
    assert ("grow" in reached, "plan_fold" in reached) == (
        geometry.has_pages,
        geometry.has_state,
    )

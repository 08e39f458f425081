"""An engine with a tier on disk: what plans copy, on a device that checks every read."""

from random import Random

import numpy as np
import pytest

from hybrid_jax.cache.tree.node import ARENA, DISK
from hybrid_jax.config import CacheConfig
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.tiers import on_disk
from hybrid_jax.schedule.tiers.below import HOST
from hybrid_jax.schedule.tiers.on_disk import MOST_READS, Fetched
from hybrid_jax.schedule.tiers.speeds import Rate, Speeds
from tests.drawing import drawn
from tests.schedule.simulated_device import EMPTY, Frame, extend
from tests.schedule.simulated_disk import SimulatedDisk
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of
from tests.schedule.traffic import serve

FORMS = [("hybrid", 40), ("attention", 30), ("recurrent", 19)]
WINDOWS = {"hybrid": (64, None), "attention": (64, None)}


def make(kind="hybrid", *, windows=(), failing=0.0, seed=0, **options):
    geometry = make_geometry(kind=kind, windows=windows)
    disk = SimulatedDisk(geometry, Random(seed), failing=failing)
    return Engine.make(geometry=geometry, disk=disk, **options), disk


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "num_frames", "host_frames", "windowed"),
    drawn(
        [
            (*form, below, windowed)
            for form in FORMS
            for below in (0, 40, 600)
            for windowed in (False, True)
            if form[0] in WINDOWS or not windowed
        ]
    ),
)
def test_what_was_written_comes_back_and_changes_no_token(
    kind, num_frames, host_frames, windowed, seed
):
    windows = WINDOWS[kind] if windowed else ()
    options = dict(num_frames=num_frames, host_frames=host_frames)
    engine, disk = make(kind, windows=windows, failing=0.1, seed=seed, **options)
    serve(engine, seed)
    assert disk.counters.saves > 3
    assert disk.counters.loads > 3 or host_frames
    assert engine.scheduler.memory.frames.num_held == 0
    again, _ = make(kind, windows=windows, **options)
    again.scheduler.memory.on_disk.disk = engine.scheduler.memory.on_disk.disk
    serve(again, seed)
    assert disk.counters.loads > 10


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("host_frames", [0, 40])
def test_narrow_checkpoints_are_written_as_they_are(seed, host_frames):
    geometry = make_geometry(narrow=True)
    cache = CacheConfig(policy="adaptive", checkpoints="int8")
    options = dict(num_frames=40, host_frames=host_frames, cache=cache, geometry=geometry)
    disk = SimulatedDisk(geometry, Random(seed), failing=0.1)
    serve(Engine.make(disk=disk, **options), seed)
    assert min(disk.counters.saves, disk.counters.loads) > 3
    again = Engine.make(disk=disk, **options)
    serve(again, seed)
    assert disk.counters.loads > 10 and again.device.events["widened"] > 10


def filled(length=100, **options):
    """An engine whose disk has a prompt that its arena has not, and the prompt."""
    engine, disk = make(**options)
    prompt = tokens_of(Random(0), length)
    engine.add(prompt, max_tokens=1)
    engine.run()
    while engine.scheduler.has_work:
        engine.step()
    assert disk.entries
    engine.scheduler.reset_prefix_cache()
    return engine, disk, prompt


def test_what_a_plan_loads_is_not_evicted_before_the_plan_is_made():
    engine, disk, prompt = filled(num_frames=40)
    memory, disk.slow = engine.scheduler.memory, 0
    tree, everything = memory.tree, memory.frames.num_frames - 1
    engine.add([*prompt, 3], max_tokens=1)
    [sequence] = engine.scheduler.admission.waiting
    tokens = sequence.looked_up
    assert memory.on_disk.fetch(sequence, tree.match(tokens)) is Fetched.LOADED
    assert tree.match(tokens).hit_len == 96
    tree.make_room(everything)
    assert tree.match(tokens).hit_len == 96 and memory.loads
    plan = Plan()
    memory.end_plan(plan)
    assert len(plan.from_disk) == 1 and not memory.loads
    assert tree.make_room(everything)
    assert tree.match(tokens).hit_len == 0


def test_a_prompt_that_is_being_read_holds_up_no_other():
    engine, disk, prompt = filled(num_frames=200)
    disk.slow = 10**6
    disk.rng = type("Slow", (Random,), {"randint": lambda self, a, b: b})()
    waits, goes_on = engine.add([*prompt, 3], max_tokens=4), engine.add([5] * 50, max_tokens=4)
    while not goes_on.output.finish_reason:
        engine.step()
    assert not waits.output.token_ids and disk.counters.loads == 0
    engine.run()
    assert waits.hit.num_tokens == 96 and disk.counters.loads == 1
    assert waits.hit.look_up.loaded == 96 and waits.hit.look_up.loaded_from == "the disk"


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_what_the_arena_had_when_a_read_began_may_be_gone_when_it_ends(kind):
    engine, disk, prompt = filled(200, num_frames=200, kind=kind)
    engine.add(prompt[:140], max_tokens=1)
    engine.run()
    disk.rng = type("Slow", (Random,), {"randint": lambda self, a, b: 2})()
    memory = engine.scheduler.memory
    request = engine.add([*prompt, 3], max_tokens=4)
    engine.add([5] * 50, max_tokens=1)
    engine.step()
    [read] = memory.on_disk._reads
    assert (0, 0) not in read.frames.pages and (2, 0) in read.frames.pages
    memory.make_room(memory.frames.num_frames - 1 - memory.holds.num_frames)
    engine.run()
    assert (disk.counters.loads_without_room, request.hit.num_tokens) == (
        0,
        192,
    )  # it was read again
    engine.check()


@pytest.mark.parametrize("below", [0, 400])
@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_what_a_plan_loads_is_not_copied_to_disk_before_it_is_there(kind, below):
    """A prefix that still waits to be written was given away, and comes back in the plan that would copy it."""
    engine, disk, prompt = filled(200, num_frames=200, kind=kind, host_frames=below)
    memory, chain = engine.scheduler.memory, disk.chain(np.array(prompt, np.int32))
    [(true, states)] = [disk.entries[chain.name(192)]]
    if below:
        engine.add(prompt, max_tokens=1)
        engine.run()
        memory.make_room(memory.frames.num_frames - 1)
        engine.add([7], max_tokens=1)  # its plan takes the save along
        engine.run()
    for length in (192,) if kind == "hybrid" else (128, 192):
        if below:  # the host's memory has it, and the disk not
            disk.entries.pop(chain.name(length), None)
        memory.on_disk._waiting[chain.name(length)] = chain, np.array(prompt[:length], np.int32)
    engine.add([*prompt, 3], max_tokens=1)
    while engine.step() or engine.scheduler.has_work:
        pass
    assert engine.counters["host_loads"] == 1 if below else disk.counters.loads == 1
    for length in (128, 192):
        pages, of_state = disk.entries.get(chain.name(length), ({}, []))
        assert all(frame == true[place] for place, frame in pages.items())
        assert of_state in ([], states)
    engine.check()


@pytest.mark.parametrize("above", [ARENA, HOST])
@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_what_was_evicted_for_a_read_is_no_hit_when_there_is_no_room_after_all(
    kind, above, monkeypatch
):
    engine, disk, prompt = filled(200, num_frames=200, host_frames=100, kind=kind)
    memory, tree = engine.scheduler.memory, engine.scheduler.memory.tree
    everything = [tier.frames.num_frames - 1 for tier in tree.tiers]
    disk.slow = 0
    engine.add(prompt[:100], max_tokens=1)
    engine.run()
    if above == HOST:
        memory.make_room(everything[ARENA])
        engine.add([7], max_tokens=1)  # its plan takes the save along
        engine.run()
    assert tree.match(np.array(prompt)).found[above].hit_len == 96

    def without_room(*args):
        for tier, frames in enumerate(everything):
            tree.make_room(frames, tier=tier)

    monkeypatch.setattr(on_disk, "arrive", without_room)
    request = engine.add([*prompt, 3], max_tokens=4)
    engine.run()
    assert disk.counters.loads_without_room == 1 and request.hit.num_tokens == 0
    engine.check()


@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
def test_what_a_plan_computes_is_not_copied_to_disk_before_it_is_there(kind):
    """A prefix that still waits to be written was given away, and the plan that would copy it computes it again."""
    engine, disk, prompt = filled(200, num_frames=200, kind=kind)
    memory, chain, true = engine.scheduler.memory, disk.chain(np.array(prompt, np.int32)), EMPTY
    for token in prompt[:128]:
        true = extend(true, token)
    disk.entries.clear()
    engine.device.frames = [Frame() for _ in engine.device.frames]
    memory.on_disk._waiting[chain.name(128)] = chain, np.array(prompt[:128], np.int32)
    engine.add([*prompt, 3], max_tokens=1, cache_breakpoints=(128,))
    while engine.step() or engine.scheduler.has_work:
        pass
    pages, states = disk.entries.get(chain.name(128), ({}, []))
    assert all(pages[1, group].summaries[-1:] == [true] for group in range(2 * bool(pages)))
    assert [frame.state[0] for frame in states] == [true] * len(states)
    assert chain.name(192) in disk.entries
    engine.check()


def test_a_sibling_that_forks_leaves_its_read_behind():
    engine, disk, prompt = filled(num_frames=200)
    disk.rng = type("Slow", (Random,), {"randint": lambda self, a, b: 3})()
    for number in range(6):
        engine.add_siblings(3, [*prompt, number + 3, 4], max_tokens=3)
        engine.run()
        assert not engine.scheduler.memory.on_disk._reads
    engine.check()


def test_an_aborted_prompt_leaves_its_read_behind():
    engine, disk, prompt = filled(num_frames=200)
    disk.rng = type("Slow", (Random,), {"randint": lambda self, a, b: 10**6})()
    engine.add([*prompt, 3], max_tokens=4, name="gone")
    engine.add([5] * 50, max_tokens=40)
    engine.step()
    assert engine.scheduler.memory.on_disk._reads
    engine.scheduler.abort("gone")
    assert not engine.scheduler.memory.on_disk._reads
    del engine.requests["gone"]
    engine.run()
    engine.check()


def test_nothing_is_written_of_a_sequence_that_has_drawn_no_token():
    engine, disk = make(num_frames=200, prefill_tokens=64)
    prompt = tokens_of(Random(1), 300)
    engine.add(prompt, max_tokens=1, name="aborted", cache_breakpoints=(64, 128))
    for _ in range(3):
        engine.step()
    assert engine.scheduler.memory.on_disk._unsettled and not disk.entries
    engine.scheduler.abort("aborted")
    while engine.scheduler.has_work:
        engine.step()
    assert not disk.entries and not engine.scheduler.memory.on_disk._unsettled


def test_what_is_evicted_before_it_was_copied_is_copied_by_that_plan():
    engine, disk = make(num_frames=40)
    disk.has_room = False  # the writer is busy
    prompt = tokens_of(Random(0), 100)
    engine.add(prompt, max_tokens=1)
    while engine.step():
        pass
    on_disk = engine.scheduler.memory.on_disk
    assert on_disk.has_saves and not disk.entries
    disk.has_room = True
    engine.scheduler.memory.make_room(engine.scheduler.memory.frames.num_frames - 1)
    assert not on_disk.has_saves
    engine.add([7], max_tokens=1)
    engine.run()
    chain = disk.chain(np.array(prompt, np.int32))
    assert set(disk.entries) == {chain.name(96)}


def test_a_full_writer_drops_what_is_evicted():
    engine, disk = make(num_frames=40)
    disk.has_room, disk.wait_for_room = False, lambda timeout: None
    engine.add(tokens_of(Random(0), 100), max_tokens=1)
    while engine.step():
        pass
    engine.scheduler.memory.make_room(engine.scheduler.memory.frames.num_frames - 1)
    assert disk.counters.saves_dropped == 1
    assert engine.scheduler.memory.tree.tiers[ARENA].frames.num_held == 0


@pytest.mark.parametrize("num_frames", [24, 25, 26])
@pytest.mark.parametrize("below", [0, 100])
def test_a_hit_that_was_evicted_for_a_load_without_room_is_not_used(num_frames, below):
    """The arena has a part of the prompt, and a row beside it. There is no room for the prompt that was read."""
    engine, disk, prompt = filled(200, num_frames=num_frames, host_frames=below)
    engine.add(prompt[:70], max_tokens=1)
    engine.run()
    engine.add([5] * 400, max_tokens=60)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.memory.tree.match(np.array(prompt, np.int32)).hit_len == 64
    engine.add([*prompt, 3], max_tokens=4)
    engine.run()
    assert disk.counters.loads_without_room >= 1
    engine.check()


def test_a_read_waits_for_room_as_long_as_its_prompt_does():
    """Another row holds the memory; when it has ended, the prompt goes on from what was read."""
    engine, disk, prompt = filled(200, num_frames=26)
    engine.add([5] * 400, max_tokens=60)
    for _ in range(5):
        engine.step()
    request = engine.add([*prompt, 3], max_tokens=4)
    engine.run()
    assert disk.counters.loads_without_room >= 1 and disk.counters.loads == 1
    assert request.hit.num_tokens == 192 and not engine.scheduler.memory.on_disk._without_room
    engine.check()


def test_what_a_restarted_request_computes_is_not_written_before_it_draws_a_token():
    """The tokens that it had tell nothing of numbers that are computed again."""
    engine, disk = make(num_frames=200)
    request = engine.add(tokens_of(Random(3), 300), max_tokens=40)
    while len(request.output.token_ids) < 3:
        engine.step()
    engine.scheduler = engine.scheduler.restarted([request])
    engine.pending.clear()
    disk.entries.clear()
    had = len(request.output.token_ids)
    while len(request.output.token_ids) == had:
        assert not disk.entries and not engine.scheduler.memory.on_disk._waiting
        engine.step()
    while engine.step() or engine.scheduler.has_work:
        pass
    assert disk.entries


def test_what_is_hit_above_counts_as_used_on_disk_and_is_written_again_if_it_is_gone():
    engine, disk = make(num_frames=200)
    used = []
    disk.use = lambda chain, position: used.append(position)
    prompt = tokens_of(Random(0), 200)

    def ask(token):
        engine.add([*prompt, token], max_tokens=1)
        while engine.step() or engine.scheduler.has_work:
            pass

    ask(1)
    name = disk.chain(np.array(prompt, np.int32)).name(192)
    assert name in disk.entries and not used
    ask(2)
    assert used == [192]
    del disk.entries[name]
    ask(3)
    assert name in disk.entries and used == [192]


def test_what_is_sooner_computed_is_not_written():
    speeds = Speeds(prompts=Rate(1e9, 1.0), tiers={DISK: Rate(1.0, 1.0)})
    engine, disk = make(num_frames=200, speeds=speeds)
    engine.add(tokens_of(Random(0), 200), max_tokens=1)
    while engine.step() or engine.scheduler.has_work:
        pass
    assert not disk.entries and disk.counters.saves_slower > 0


def test_a_prompt_does_not_wait_for_reads_of_others_if_there_is_nothing_for_it():
    engine, disk, prompt = filled(num_frames=200)
    disk.rng = type("Slow", (Random,), {"randint": lambda self, a, b: 10**6})()
    engine.add([5] * 40, max_tokens=500)  # so that nobody waits for a read
    engine.step()
    for token in range(MOST_READS):
        engine.add([*prompt, token + 3], max_tokens=1)
    engine.step()
    assert len(engine.scheduler.memory.on_disk._reads) == MOST_READS
    other = engine.add([9] * 50, max_tokens=2, name="other")
    while not other.output.finish_reason:
        engine.step()
    assert disk.counters.loads == 0
    engine.run()

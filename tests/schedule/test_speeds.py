"""Which prefixes come back from lower tiers, by what loading and computing took."""

from random import Random

import pytest

from hybrid_jax.cache.tree.node import ARENA, DISK, HOSTS_MEMORY, Why
from hybrid_jax.schedule.tiers.speeds import FADING, TIMED, TRIAL, Rate, Speeds
from tests.schedule.simulated_disk import SimulatedDisk
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of

# A prompt of 100 tokens resumes at 96. That is two pages of two frames, a checkpoint of three, and a FLOP a token.
HIT, HIT_BYTES = 96, 7 * 256


def test_a_rate_forgets_slowly():
    rate = Rate()
    assert rate.seconds_of(10) is None
    rate.add(100, 1.0)
    assert rate.seconds_of(50) == 0.5
    rate.add(100, 3.0)
    assert rate.seconds_of(1) == pytest.approx((FADING + 3.0) / (100 * FADING + 100))
    for _ in range(200):
        rate.add(10, 1.0)
    assert rate.seconds_of(10) == pytest.approx(1.0)


def test_whatever_is_not_known_is_loaded():
    assert Speeds().choose(DISK, 1e9, flops=1.0)
    assert Speeds(prompts=Rate(1e12, 1.0)).choose(HOSTS_MEMORY, 1e9, flops=1.0)
    assert Speeds(tiers={DISK: Rate(1.0, 1.0)}).choose(DISK, 1e9, flops=1.0)
    slow = Speeds(prompts=Rate(1.0, 1.0), tiers={DISK: Rate(1.0, 1.0)})
    assert not slow.choose(DISK, 2, flops=1.0) and slow.choose(HOSTS_MEMORY, 2, flops=1.0)


def test_one_of_many_slow_loads_is_tried_and_may_change_the_verdict():
    speeds = Speeds(prompts=Rate(1.0, 1.0), tiers={HOSTS_MEMORY: Rate(1.0, 1.0)})
    found = [speeds.choose(HOSTS_MEMORY, 2, flops=1.0) for _ in range(3 * TRIAL)]
    assert [number for number, loads in enumerate(found, 1) if loads] == [
        TRIAL,
        2 * TRIAL,
        3 * TRIAL,
    ]
    assert speeds.take_due() and not speeds.take_due()
    speeds.loaded(HOSTS_MEMORY, 100.0, 1.0)
    assert speeds.choose(HOSTS_MEMORY, 2, flops=1.0)


def test_a_copy_from_the_hosts_memory_is_timed_now_and_then_but_not_the_first():
    speeds, due = Speeds(), []
    for _ in range(2 * TIMED + 2):
        speeds.choose(DISK, 1, flops=1.0)
        assert not speeds.take_due()
        speeds.choose(HOSTS_MEMORY, 1, flops=1.0)
        due.append(speeds.take_due())
    assert [number for number, timed in enumerate(due, 1) if timed] == [2, 2 + TIMED, 2 + 2 * TIMED]


def asked_again(engine, prompt):
    """What a prompt hits whose prefix the arena has lost."""
    engine.scheduler.memory.make_room(engine.scheduler.memory.frames.num_frames - 1)
    engine.add([7], max_tokens=1)  # its plan takes the save along
    engine.run()
    assert engine.scheduler.memory.tree.match(tokens_of(Random(0), 100)).found[ARENA].hit_len == 0
    request = engine.add([*prompt, 3], max_tokens=1)
    engine.run()
    return request.hit


def speeds_at(tier, spare_bytes):
    """A prefix of `HIT` tokens takes a second to compute, and one of `HIT_BYTES` less `spare_bytes` to load."""
    return Speeds(prompts=Rate(HIT, 1.0), tiers={tier: Rate(HIT_BYTES - spare_bytes, 1.0)})


@pytest.mark.parametrize(("spare", "loads"), [(-1, True), (0, False), (1, False)])
def test_the_hosts_memory_gives_what_is_sooner_there(spare, loads):
    engine = Engine.make(host_frames=100, num_frames=40, speeds=speeds_at(HOSTS_MEMORY, spare))
    prompt = tokens_of(Random(0), 100)
    engine.add(prompt, max_tokens=1)
    engine.run()
    hit = asked_again(engine, prompt)
    counters = engine.scheduler.memory.below.counters
    assert (counters.loads, counters.loads_slower) == (int(loads), int(not loads))
    assert hit.num_tokens == (HIT if loads else 0)
    if not loads:
        found = hit.look_up
        assert (found.why, found.position, found.slower_from) == (Why.SLOWER, HIT, HOSTS_MEMORY)


@pytest.mark.parametrize(("spare", "loads"), [(-1, True), (0, False), (1, False)])
def test_the_disk_gives_what_is_sooner_there(spare, loads):
    geometry = make_geometry()
    disk = SimulatedDisk(geometry, Random(0))
    speeds = speeds_at(DISK, spare)
    engine = Engine.make(num_frames=40, geometry=geometry, disk=disk, speeds=speeds)
    prompt = tokens_of(Random(0), 100)
    engine.add(prompt, max_tokens=1)
    engine.run()
    while engine.scheduler.has_work:
        engine.step()
    hit = asked_again(engine, prompt)
    assert (disk.counters.loads, disk.counters.loads_slower) == (int(loads), int(not loads))
    assert hit.num_tokens == (HIT if loads else 0)
    if loads:
        assert speeds._tiers[DISK].seconds > 1.0  # its read was taken in
    else:
        found = hit.look_up
        assert (found.why, found.position, found.slower_from) == (Why.SLOWER, HIT, DISK)


@pytest.mark.parametrize(("spare", "loads"), [(-1, 1), (0, 0)])
def test_what_the_arena_has_already_counts_for_neither_side(spare, loads):
    """Behind 64 cached tokens a load brings one page and a checkpoint, and spares 32 tokens."""
    speeds = Speeds(prompts=Rate(32.0, 1.0), tiers={HOSTS_MEMORY: Rate(5 * 256 - spare, 1.0)})
    engine = Engine.make(host_frames=100, num_frames=60, speeds=speeds)
    prompt = tokens_of(Random(0), 100)
    engine.add(prompt[:70], max_tokens=1)
    engine.run()
    engine.add(prompt, max_tokens=1)
    engine.run()
    memory, tokens = engine.scheduler.memory, tokens_of(Random(0), 100)
    tree = memory.tree
    memory.make_room(
        memory.frames.num_frames - 1, keep=tree.match(tokens[:65]).found[ARENA].node, needed=False
    )
    engine.add([7], max_tokens=1)
    engine.run()
    assert tree.match(tokens).found[ARENA].hit_len == 64
    engine.add([*prompt, 3], max_tokens=1)
    engine.run()
    assert engine.scheduler.memory.below.counters.loads == loads

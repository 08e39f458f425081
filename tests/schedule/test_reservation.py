"""Admission: pages and checkpoint are taken together, and what was reserved is used or given back."""

import random

import numpy as np
import pytest

from hybrid_jax.cache.tree.node import Match
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of


@pytest.mark.parametrize(("free", "fits"), [(9, True), (8, False), (3, False)])
def test_pages_and_checkpoint_are_taken_together(free, fits):
    """130 tokens take 3 pages of 2 frames, and 3 frames of a checkpoint."""
    engine = Engine.make(num_frames=60)
    memory = engine.scheduler.memory
    engine.add(tokens_of(random.Random(0), 130), stop_ids=())
    sequence = engine.scheduler.admission.waiting[0]
    taken = memory.holds.allocate_frames(59 - free)
    match = memory.tree.match(sequence.prompt)
    assert isinstance(match, Match)
    hit_len = memory._start(sequence, match, reserve=False)
    if fits:
        assert hit_len == 0 and memory.frames.num_free == 0
        assert memory.holds.num_frames == len(taken) + 9
        reserved = sequence.held.reserved_slot
        assert memory.slot_to_write(sequence) == reserved and not sequence.held.reserved_slot
        # Had it been written, it would be the row's own.
        assert memory.slot_to_write(sequence) is None
    else:
        assert hit_len is None and memory.frames.num_free == free
        assert sequence.held.pages.size == 0 and not sequence.held.reserved_slot
        assert memory.holds.num_frames == len(taken)


@pytest.mark.parametrize(("num_frames", "seated"), [(17, 2), (16, 1), (14, 1)])
def test_two_hits_of_one_turn_do_not_count_on_the_same_frames(num_frames, seated):
    """The prefix has 5 frames; either row takes one page and a checkpoint, 5 more, and asks for one page beyond."""
    engine = Engine.make(num_frames=num_frames + 1)
    prefix = tokens_of(random.Random(0), 64)
    for last in (1, 2):  # the second one's parting shows where to leave a checkpoint
        engine.add([*prefix, last], max_tokens=2)
        engine.run()
    for last in (3, 4):  # both tails and folds lie ahead
        engine.add([*prefix, *[last] * 5], max_tokens=60, stop_ids=())
    engine.step()
    running = engine.scheduler.seats.running
    assert len(running) == seated
    assert all(
        row.held.real_checkpoint == 64 and row.held.slot and row.held.reserved_slot
        for row in running
    )
    engine.run()
    engine.check()
    assert engine.counters["preemptions"] == 0
    assert engine.counters["cache_disowned_checkpoints"] == 0
    assert engine.counters["folds_to_new"] == 2


def test_forks_reserve_a_checkpoint_each():
    """Beside the parent's 2 pages and checkpoint, a fork takes a page and a checkpoint, and asks for one page more."""
    for num_frames, num_forks in ((7 + 2 * 5 + 2, 2), (7 + 2 * 5 + 1, 1)):
        engine = Engine.make(num_frames=num_frames + 1, cache="off")
        engine.add_siblings(3, tokens_of(random.Random(0), 70), max_tokens=59, stop_ids=())
        engine.step()
        parent, *forks = engine.scheduler.seats.running
        assert not parent.held.reserved_slot and len(forks) == num_forks
        assert all(fork.held.slot == parent.held.slot and fork.held.reserved_slot for fork in forks)
        engine.run()
        engine.check()
        assert engine.counters["preemptions"] == 0


def test_a_fork_that_cannot_fold_behind_its_parents_checkpoint_reserves_none():
    # The checkpoint is at 64, the last token fed at 95 or 96.
    for most, reserves in ((26, False), (27, True)):
        engine = Engine.make(num_frames=60, cache="off")
        engine.add_siblings(2, tokens_of(random.Random(0), 71), max_tokens=most, stop_ids=())
        engine.step()
        fork = engine.scheduler.seats.running[1]
        assert fork.held.real_checkpoint == 64 and bool(fork.held.reserved_slot) == reserves
        engine.run()
        engine.check()


def test_a_checkpoint_reserved_and_not_needed_is_given_back():
    """By a row that stops before it folds, and by one whose checkpoint became its own."""
    engine = Engine.make(num_frames=60)
    memory = engine.scheduler.memory
    prompt = tokens_of(random.Random(0), 70)
    for _ in range(2):
        engine.add(prompt, max_tokens=1)
        engine.run()
    cached = memory.slots.num_held
    request = engine.add(prompt, max_tokens=60, stop_ids=())
    engine.step()
    assert memory.slots.num_held == cached + 1
    engine.scheduler.abort(request.request_id)
    engine.run()
    assert memory.slots.num_held == cached
    request = engine.add(prompt, max_tokens=60, stop_ids=())
    engine.step()
    assert memory.slots.num_held == cached + 1
    memory.tree.reset()
    assert memory.slots.num_held == 2  # the one it came from, now its own, and the one reserved
    while engine.counters["folds_in_place"] == 0:
        assert engine.step()
    assert memory.slots.num_held == 1
    engine.run()
    engine.check()


def test_a_row_short_of_a_page_gives_its_reserve_back():
    """Alone: its checkpoint comes from the tree, and pages for 103 tokens and one checkpoint are all there is."""
    engine = Engine.make(
        geometry=make_geometry(page_tokens=16), num_frames=20, steps_per_dispatch=8
    )
    prefix = tokens_of(random.Random(0), 64)
    for last in (1, 2):
        engine.add([*prefix, last], max_tokens=2, stop_ids=())
        engine.run()
    computed = engine.counters["prefill_tokens"]
    engine.add([*prefix, 3], max_tokens=39, stop_ids=())
    engine.step()
    assert engine.scheduler.seats.running[0].held.reserved_slot
    engine.run()
    engine.check()
    assert engine.counters["preemptions"] == 0
    assert engine.counters["prefill_tokens"] == computed + 1


def test_who_can_never_fold_reserves_no_checkpoint():
    engine = Engine.make(num_frames=60)
    for limit, reserves in ((32, False), (33, False), (34, True)):
        engine.add(tokens_of(random.Random(limit), 20), max_tokens=limit - 20, stop_ids=())
        engine.step()
        assert [bool(row.held.reserved_slot) for row in engine.scheduler.seats.running] == [
            reserves
        ]
        engine.run()
        assert engine.counters["folds_in_place"] + engine.counters["folds_to_new"] == reserves


def test_a_full_slot_table_holds_an_admission_back_before_pages_are_taken():
    engine = Engine.make(num_frames=60, max_slots=3, cache="off")
    memory = engine.scheduler.memory
    engine.add(tokens_of(random.Random(0), 130), stop_ids=())
    memory.holds.allocate_slot(), memory.holds.allocate_slot()
    free = memory.frames.num_free
    assert memory.start(engine.scheduler.admission.waiting[0], None, alone=False) is None
    assert memory.frames.num_free == free


def test_a_hit_is_asked_for_what_it_takes_and_for_nothing_once_it_is_live():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 100)
    engine.add(prompt, max_tokens=2, stop_ids=())
    engine.run()
    memory = engine.scheduler.memory
    match = memory.tree.match(np.array(prompt, np.int32))
    before, asked = memory.holds.num_frames, memory.holds.num_frames_of(match)
    memory.holds.acquire(match)
    assert memory.holds.num_frames - before == asked > 0
    assert memory.holds.num_frames_of(match) == 0

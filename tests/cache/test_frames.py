"""Frames and slots: counted holders, errors that name the numbers."""

import random

import pytest

from hybrid_jax.cache.pools import handles
from hybrid_jax.cache.pools.frames import FrameAllocator, OutOfFrames
from hybrid_jax.cache.pools.slots import OutOfSlots, SlotTable


def test_pools_that_are_too_small_or_too_large_for_handles_are_refused():
    for count in (1, handles.MAX_ID + 2):
        with pytest.raises(ValueError, match=rf"num_frames must be between 2 and .* got {count}"):
            FrameAllocator(count)
    for count in (0, handles.MAX_ID + 2):
        with pytest.raises(ValueError, match=f"max_slots must be between 1 and .* got {count}"):
            SlotTable(FrameAllocator(4), lengths=(1,), max_slots=count)


def test_last_released_frame_is_handed_out_first():
    frames = FrameAllocator(6)
    a, b, c = frames.allocate(3)
    frames.release([b])
    assert frames.allocate(1).tolist() == [b]
    assert (a, c) == (1, 3)
    frames.check_invariants()


def test_a_frame_returns_when_its_last_holder_lets_go():
    frames = FrameAllocator(3)
    (frame,) = frames.allocate(1)
    frames.retain([frame])
    frames.release([frame])
    assert frames.num_free == 1 and frames.holders(frame) == 1
    frames.release([frame])
    assert frames.num_free == 2
    frames.check_invariants()


def test_running_out_names_the_numbers_and_takes_nothing():
    frames = FrameAllocator(4)
    frames.allocate(2)
    with pytest.raises(OutOfFrames, match=r"needs 2 frames, 1 of 3 free; lower max_rows or raise"):
        frames.allocate(2)
    assert frames.num_free == 1


def test_a_negative_count_is_refused():
    frames = FrameAllocator(4)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        frames.allocate(-1)
    assert frames.num_free == 3
    frames.check_invariants()


def test_a_failed_release_changes_nothing():
    frames = FrameAllocator(4)
    a, b = frames.allocate(2)
    frames.release([b])
    with pytest.raises(ValueError, match="cannot release frame 2, nobody holds it"):
        frames.release([a, b])
    assert frames.holders(a) == 1
    with pytest.raises(ValueError, match="cannot retain frame 0"):
        frames.retain([0])
    frames.check_invariants()


@pytest.mark.parametrize("frame", [-1, 0, 2, 3, 4, 1000])
def test_what_nobody_holds_or_is_no_frame_is_named(frame):
    frames = FrameAllocator(4)  # of which 1 is held
    frames.allocate(3)
    frames.release([2, 3])
    for action, call in (
        ("retain", frames.retain),
        ("release", frames.release),
        ("name", frames.handles),
    ):
        with pytest.raises(ValueError, match=f"cannot {action} frame {frame}, nobody holds it"):
            call([1, frame])
    assert frames.holders(1) == 1
    frames.check_invariants()


def test_frames_are_counted():
    frames = FrameAllocator(5)
    a, b, c = frames.allocate(3)
    frames.retain([a, b])
    frames.release([b, c])
    assert [frames.holders(f) for f in (a, b, c)] == [2, 1, 0]
    with pytest.raises(ValueError, match="cannot release frame 3, nobody holds it"):
        frames.release([a, c])
    frames.release([a, b])
    frames.release([a])
    assert frames.allocate(4).tolist() == [a, b, c, 4]
    frames.check_invariants()


def test_slots_hold_frames_until_their_last_holder_lets_go():
    frames = FrameAllocator(7)
    slots = SlotTable(frames, lengths=(3,), max_slots=8)
    handle = slots.allocate()
    assert slots.frames(handle) == (1, 2, 3) and frames.num_free == 3
    slots.retain(handle)
    slots.release(handle)
    assert frames.num_free == 3 and slots.holders(handle) == 1
    slots.release(handle)
    assert frames.num_free == 6
    with pytest.raises(handles.StaleHandle, match="slot 1 of generation 0"):
        slots.release(handle)
    slots.check_invariants()
    frames.check_invariants()


def test_a_slot_without_frames_or_without_an_id_changes_nothing():
    frames = FrameAllocator(6)
    slots = SlotTable(frames, lengths=(3,), max_slots=3)
    slots.allocate()
    with pytest.raises(OutOfFrames, match="needs 3 frames, 2 of 5 free"):
        slots.allocate()
    assert slots.num_held == 1
    few = SlotTable(FrameAllocator(20), lengths=(3,), max_slots=2)
    few.allocate()
    with pytest.raises(OutOfSlots, match="all 1 checkpoints are held"):
        few.allocate()
    slots.check_invariants()


def test_new_slots_are_reported_once_and_only_while_held():
    slots = SlotTable(FrameAllocator(20), lengths=(2,), max_slots=8)
    first, second = slots.allocate(), slots.allocate()
    slots.release(first)
    told = lambda: [(slot, tuple(frames.tolist())) for slot, frames in slots.take_new()]
    assert told() == [(2, slots.frames(second))]
    assert told() == []
    again = slots.allocate()
    assert told() == [(1, slots.frames(again))]


def test_random_traffic_agrees_with_a_list_of_holds():
    rng = random.Random(0)
    frames = FrameAllocator(20)
    holds = []
    for _ in range(2000):
        action = rng.random()
        if action < 0.4 and frames.num_free:
            holds += frames.allocate(rng.randint(1, frames.num_free)).tolist()
        elif action < 0.6 and holds:
            frame = rng.choice(holds)
            frames.retain([frame])
            holds.append(frame)
        elif holds:
            frame = holds.pop(rng.randrange(len(holds)))
            frames.release([frame])
        assert all(frames.holders(f) == holds.count(f) for f in range(1, 20))
        frames.check_invariants()


@pytest.mark.parametrize("corrupt", ["free twice", "held and free", "lost"])
def test_the_invariant_check_sees_corruption(corrupt):
    frames = FrameAllocator(6)
    frames.allocate(2)
    if corrupt == "free twice":
        frames._free[frames.num_free] = frames._free[0]
        frames.num_free += 1
    elif corrupt == "held and free":
        frames._free[frames.num_free] = 1
        frames.num_free += 1
    else:
        frames.num_free -= 1
    with pytest.raises(AssertionError, match="frames:"):
        frames.check_invariants()


def test_frames_that_are_claimed_are_the_callers_and_no_other_gets_them():
    frames = FrameAllocator(8)
    first = frames.allocate(2)
    frames.release(first)
    frames.claim([5, 2, 7])
    frames.check_invariants()
    assert frames.num_free == 4 and [frames.holders(n) for n in (5, 2, 7, 3)] == [1, 1, 1, 0]
    assert not set(frames.allocate(4).tolist()) & {5, 2, 7}
    frames.release([5, 2, 7])
    frames.check_invariants()
    frames.claim([2])
    for wrong in ([2], [5, 2], [0], [8]):
        with pytest.raises(ValueError, match="cannot claim"):
            frames.claim(wrong)
    frames.check_invariants()
    assert frames.num_free == 2

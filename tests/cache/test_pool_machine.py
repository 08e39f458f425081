"""Frames and slots driven at random beside a naive model: who holds which frames, which slot lists which."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybrid_jax.cache.pools import handles
from hybrid_jax.cache.pools.frames import FrameAllocator, OutOfFrames
from hybrid_jax.cache.pools.slots import OutOfSlots, SlotTable
from tests.cache.worn import contents

NUM_FRAMES, MAX_SLOTS, STATE_FRAMES = 13, 4, 3
FRAMES = range(1, NUM_FRAMES)
holder = st.sampled_from("abc")


class PoolMachine(RuleBasedStateMachine):
    """The model: `holds`, a multiset of frames for each holder; `lists` and `slot_holds`, of each slot's handle.

    `names` are handles of held frames, `dead` those of earlier lives, frames' and slots', as many as must raise.
    """

    def __init__(self):
        super().__init__()
        self.frames = FrameAllocator(NUM_FRAMES)
        self.slots = SlotTable(self.frames, lengths=(STATE_FRAMES,), max_slots=MAX_SLOTS)
        self.holds = {name: collections.Counter() for name in "abc"}
        self.lists, self.slot_holds = {}, collections.Counter()
        self.slot_ids, self.new = {}, {}
        self.names = {}  # frame -> handle
        self.dead = collections.defaultdict(lambda: collections.deque(maxlen=63))

    # --- the naive model ------------------------------------------------------------------------

    def paged(self):
        """Frames with their holders, slots aside."""
        return sum(self.holds.values(), collections.Counter())

    def listed(self):
        return [frame for frames in self.lists.values() for frame in frames]

    def free(self):
        return set(FRAMES) - set(self.paged()) - set(self.listed())

    def born(self, frames):
        self.names.update(zip(frames, self.frames.handles(frames).tolist(), strict=True))

    def died(self, frames):
        for frame in frames:
            self.dead["frame", frame].append(self.names.pop(frame))

    @contextlib.contextmanager
    def refused(self, error, match):
        """The call inside raises, and nothing inside the pools is another than before."""
        before = contents(self.frames, self.slots)
        with pytest.raises(error, match=match):
            yield
        assert contents(self.frames, self.slots) == before

    # --- frames ---------------------------------------------------------------------------------

    @rule(who=holder, count=st.integers(0, NUM_FRAMES + 1))
    def allocate(self, who, count):
        free = self.free()
        if count > len(free):
            with self.refused(OutOfFrames, f"needs {count} frames, {len(free)} of 12 free; lower"):
                self.frames.allocate(count)
            return
        taken = self.frames.allocate(count).tolist()
        assert len(taken) == len(set(taken)) == count and set(taken) <= free
        self.holds[who].update(taken)
        self.born(taken)

    @rule(count=st.integers(-NUM_FRAMES, -1))
    def allocate_less_than_nothing(self, count):
        with self.refused(ValueError, f"count must be at least 0, got {count}"):
            self.frames.allocate(count)

    @precondition(lambda self: self.paged())
    @rule(who=holder, data=st.data(), as_array=st.booleans())
    def retain(self, who, data, as_array):
        paged = st.sampled_from(sorted(self.paged()))
        frames = data.draw(st.lists(paged, max_size=8, unique=True))
        given = np.array(frames, np.int32) if as_array else frames
        self.frames.retain(given)
        self.holds[who].update(frames)

    @precondition(lambda self: self.paged())
    @rule(data=st.data(), as_array=st.booleans())
    def release(self, data, as_array):
        who = data.draw(st.sampled_from([name for name, own in self.holds.items() if own]))
        own = data.draw(st.permutations(sorted(self.holds[who])))
        frames = own[: data.draw(st.integers(0, len(own)))]
        given = np.array(frames, np.int32) if as_array else frames
        self.frames.release(given)
        self.holds[who] -= collections.Counter(frames)
        self.died(set(frames) & self.free())

    @rule(data=st.data(), name=st.sampled_from(["retain", "release", "handles"]))
    def touch_what_nobody_holds(self, data, name):
        unheld = data.draw(st.sampled_from([*sorted(self.free()), 0, -1, -5, NUM_FRAMES, 2**31]))
        frames = [unheld]
        if paged := sorted(self.paged()):
            frames = data.draw(st.lists(st.sampled_from(paged), unique=True))
            frames.insert(data.draw(st.integers(0, len(frames))), unheld)
        action = "name" if name == "handles" else name
        with self.refused(ValueError, f"cannot {action} frame {unheld}, nobody holds it"):
            getattr(self.frames, name)(frames)

    @precondition(lambda self: self.free())
    @rule(times=st.integers(1, 70))
    def wear_out(self, times):
        """One frame lives many times: what was released last is given first."""
        [frame] = self.frames.allocate(1).tolist()
        for _ in range(times):
            self.born([frame])
            self.frames.release([frame])
            self.died([frame])
            assert self.frames.allocate(1).tolist() == [frame]
        self.holds["a"][frame] += 1
        self.born([frame])

    # --- slots ----------------------------------------------------------------------------------

    @rule()
    def allocate_slot(self):
        free = self.free()
        if len(self.lists) == MAX_SLOTS - 1:
            with self.refused(OutOfSlots, f"all {MAX_SLOTS - 1} checkpoints are held"):
                self.slots.allocate()
            return
        if len(free) < STATE_FRAMES:
            with self.refused(OutOfFrames, f"needs {STATE_FRAMES} frames, {len(free)} of 12 free"):
                self.slots.allocate()
            return
        handle = self.slots.allocate()
        frames = self.slots.frames(handle)
        slot = self.slots.resolve(handle)
        assert len(set(frames)) == STATE_FRAMES and set(frames) <= free
        assert 0 < slot < MAX_SLOTS and slot not in self.slot_ids.values()
        self.lists[handle], self.slot_ids[handle], self.new[slot] = frames, slot, frames
        self.slot_holds[handle] = 1
        self.born(frames)

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def retain_slot(self, data):
        handle = data.draw(st.sampled_from(sorted(self.lists)))
        self.slots.retain(handle)
        self.slot_holds[handle] += 1

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def release_slot(self, data):
        self.drop_slot(data.draw(st.sampled_from(sorted(self.lists))))

    def drop_slot(self, handle):
        self.slots.release(handle)
        self.slot_holds[handle] -= 1
        if not self.slot_holds[handle]:
            self.died(self.lists.pop(handle))
            slot = self.slot_ids.pop(handle)
            self.new.pop(slot, None)
            self.dead["slot", slot].append(handle)

    @rule(data=st.data(), name=st.sampled_from(["retain", "release", "frames", "holders"]))
    def touch_no_slot(self, data, name):
        dead = [h for lives in self.dead.values() for h in lives]
        handle = data.draw(st.sampled_from([*self.names.values(), *dead, 0, -1, 2**32, 2**70]))
        if handle == 0 and name in ("frames", "holders"):
            assert not getattr(self.slots, name)(0)
            return
        error, match = (handles.StaleHandle, "StaleHandle") if handle else (ValueError, "handle 0")
        with self.refused(error, match):
            getattr(self.slots, name)(handle)

    @rule()
    def tell_the_device(self):
        told = {slot: tuple(frames.tolist()) for slot, frames in self.slots.take_new()}
        assert told == self.new
        self.new = {}

    # --- names ----------------------------------------------------------------------------------

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def resolve_many_with_a_dead_one(self, data):
        frames = data.draw(st.lists(st.sampled_from(sorted(self.names)), max_size=6))
        names = [self.names[frame] for frame in frames]
        assert self.frames.resolve(np.array(names, np.uint32)).tolist() == frames
        dead = [h for lives in self.dead.values() for h in lives] + [0, *self.lists]
        names.insert(data.draw(st.integers(0, len(names))), data.draw(st.sampled_from(dead)))
        with self.refused(handles.StaleHandle, "StaleHandle"):
            self.frames.resolve(np.array(names, np.uint32))

    @invariant()
    def counts_agree(self):
        self.frames.check_invariants()
        self.slots.check_invariants()
        paged, listed = self.paged(), self.listed()
        assert len(set(listed)) == len(listed) and not set(listed) & set(paged)
        expected = [(frame in listed) + paged[frame] for frame in FRAMES]
        assert [self.frames.holders(frame) for frame in FRAMES] == expected
        assert self.frames.holders_of(np.array(FRAMES)).tolist() == expected
        assert self.frames.num_free == len(self.free()) == len(FRAMES) - self.frames.num_held
        assert self.slots.num_held == len(self.lists) == MAX_SLOTS - 1 - self.slots.num_free
        for handle, frames in self.lists.items():
            assert self.slots.frames(handle) == frames
            assert self.slots.resolve(handle) == self.slot_ids[handle]
            assert self.slots.holders(handle) == self.slot_holds[handle]

    @invariant()
    def names_live_and_die_with_what_they_name(self):
        frames = sorted(self.names)
        assert set(frames) == set(FRAMES) - self.free()
        names = [self.names[frame] for frame in frames]
        assert self.frames.handles(frames).tolist() == names
        assert self.frames.resolve(np.array(names, np.uint32)).tolist() == frames
        for (kind, _), lives in self.dead.items():
            resolve = self.frames.resolve if kind == "frame" else self.slots.resolve
            for handle in lives:
                with pytest.raises(handles.StaleHandle):
                    resolve(np.array([handle], np.uint32) if kind == "frame" else handle)

    def teardown(self):
        for handle in list(self.lists):
            while handle in self.lists:
                self.drop_slot(handle)
        for own in self.holds.values():
            for frame in own.elements():
                self.frames.release([frame])
        assert self.frames.num_free == NUM_FRAMES - 1 and self.slots.num_held == 0
        self.frames.check_invariants()
        self.slots.check_invariants()


def test_pools_agree_with_sets_of_frames():
    machine = PoolMachine.TestCase
    machine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
    machine("runTest").runTest()

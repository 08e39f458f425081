"""Checkpoints as the host sees them: a slot names the frames of one recurrent state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybrid_jax.cache.pools import handles
from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.recount import agree

NO_FRAMES: np.ndarray = np.zeros(0, np.int32)


class OutOfSlots(RuntimeError):
    """Every slot is held; the call that raised it changed nothing."""


class SlotTable:
    """Slots 1 .. max_slots - 1, each a list of frames, with counted holders.

    The device has a table of those in the first form; `take_new` says which of its rows to write before the next
    dispatch.
    Callers keep handles, never bare ids: `allocate` gives one, and 0 stands for "no checkpoint".

    Args:
        lengths: frames of a checkpoint in each form that it may be kept in. Rows use the first form.

    Attributes:
        num_frames: frames of all checkpoints that somebody holds.

    Example:
        >>> slots = SlotTable(FrameAllocator(10), lengths=(3,), max_slots=4)
        >>> handle = slots.allocate()
        >>> slots.resolve(handle), slots.frames(handle)
        (1, (1, 2, 3))
        >>> [(slot, frames.tolist()) for slot, frames in slots.take_new()]
        [(1, [1, 2, 3])]
    """

    def __init__(self, frames: FrameAllocator, *, lengths: Sequence[int], max_slots: int):
        if not 1 <= max_slots <= handles.MAX_ID + 1:
            raise ValueError(
                f"SlotTable: max_slots must be between 1 and {handles.MAX_ID + 1}, got {max_slots}"
            )
        self.lengths, self.max_slots, self.num_frames = tuple(lengths), max_slots, 0
        self._allocator = frames
        self._free = list(range(max_slots - 1, 0, -1))
        self._holders = [0] * max_slots
        self._generation = bytearray(max_slots)
        self._frames: list[np.ndarray] = [NO_FRAMES] * max_slots
        self._new: dict[int, np.ndarray] = {}

    @property
    def num_free(self) -> int:
        """Slots that can be given out."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Slots that somebody holds."""
        return self.max_slots - 1 - len(self._free)

    def allocate(self, form: int = 0) -> int:
        """A handle of a new slot with one holder, the caller.

        Args:
            form: which of the lengths its list has.

        Raises:
            OutOfSlots: no slot is free.
            OutOfFrames: its frames are not free. Either way nothing was taken.
        """
        self._require_free()
        return self._take(self._allocator.allocate(self.lengths[form]))

    def claim(self, frames: npt.ArrayLike) -> int:
        """A handle of a new slot with one holder, the caller, in frames that the caller holds and gives away.

        Raises:
            OutOfSlots: no slot is free.
        """
        self._require_free()
        return self._take(np.asarray(frames, np.int32))

    def _require_free(self) -> None:
        if not self._free:
            raise OutOfSlots(
                f"OutOfSlots: all {self.max_slots - 1} checkpoints are held; lower max_rows or raise memory"
            )

    def _take(self, frames: np.ndarray) -> int:
        slot = self._free.pop()
        self._holders[slot], self._frames[slot] = 1, frames
        self.num_frames += len(frames)
        if len(frames) == self.lengths[0]:
            self._new[slot] = frames
        return handles.pack(handles.SLOT, self._generation[slot], slot)

    def resolve(self, handle: int) -> int:
        """The slot id behind a handle; 0 for 0.

        Raises:
            StaleHandle: the slot was released since.
            ValueError: it is not a handle.
        """
        handle = handles.as_integer(handle)
        if handle == 0:
            return 0
        slot = handle & handles.MAX_ID
        there = slot < self.max_slots
        generation = self._generation[slot] if there else 0
        known = handle == handles.pack(handles.SLOT, generation, slot)
        if not (there and known and self._holders[slot]):
            raise handles.stale(handle, handles.SLOT, generation)
        return slot

    def frames(self, handle: int) -> tuple[int, ...]:
        """The frames of a slot, in the order of the checkpoint."""
        return tuple(self._frames[self.resolve(handle)].tolist())

    def length(self, handle: int) -> int:
        """How many frames a slot lists."""
        return len(self._frames[self.resolve(handle)])

    def holders(self, handle: int) -> int:
        """How many hold a slot."""
        return self._holders[self.resolve(handle)]

    def retain(self, handle: int) -> None:
        """Adds a holder."""
        self._holders[self._require(handle)] += 1

    def release(self, handle: int) -> None:
        """Drops a holder; takes the caller's hold away. The last one releases the slot's frames."""
        slot = self._require(handle)
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            self._allocator.release(self._frames[slot])
            self.num_frames -= len(self._frames[slot])
            self._frames[slot] = NO_FRAMES
            self._generation[slot] = (self._generation[slot] + 1) % handles.NUM_GENERATIONS
            self._free.append(slot)
            self._new.pop(slot, None)

    def shrink(self, handle: int, form: int) -> np.ndarray:
        """Leaves a slot only as many of its first frames as another form has; hands out the hold on the others.

        Returns:
            int32[n] the other frames.
        """
        slot, length = self._require(handle), self.lengths[form]
        kept, rest = np.split(self._frames[slot], [length])
        self._frames[slot] = kept
        self.num_frames -= len(rest)
        if rest.size:
            self._new.pop(slot, None)
        return rest

    def _require(self, handle: int) -> int:
        slot = self.resolve(handle)
        if slot == 0:
            raise ValueError(
                "SlotTable: slot 0 stands for no checkpoint and has no holders, got handle 0"
            )
        return slot

    def take_new(self) -> list[tuple[int, np.ndarray]]:
        """(slot, frames int32[lengths[0]]) of slots of the first form made since the last call and still held."""
        new, self._new = self._new, {}
        return list(new.items())

    def check_invariants(self) -> None:
        """Recounts slots and their frames; raises AssertionError with both numbers when they differ."""
        held = [slot for slot, count in enumerate(self._holders) if count]
        free = [slot for slot, count in enumerate(self._holders) if slot and not count]
        lists = [self._frames[slot] for slot in held]
        frames = [frame for listed in lists for frame in listed.tolist()]
        once = dict.fromkeys(frames, 1)
        agree(
            "slots",
            free_slots=(Counter(self._free), dict.fromkeys(free, 1)),
            frames_of_no_form=([n for n in map(len, lists) if n not in self.lengths], []),
            frames_in_all=(self.num_frames, len(frames)),
            frames_of_free_slots=([slot for slot in free if self._frames[slot].size], []),
            new_slots_that_are_free=([slot for slot in free if slot in self._new], []),
            frames=(Counter(frames), once),
            holders_of_frames=({frame: self._allocator.holders(frame) for frame in once}, once),
        )

    def __repr__(self) -> str:
        return f"SlotTable({self.num_held} of {self.max_slots - 1} checkpoints held)"

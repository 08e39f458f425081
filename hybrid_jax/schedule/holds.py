"""What running sequences hold, apart from what is only cached."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from hybrid_jax.cache.pools.frames import FrameAllocator, given, indices
from hybrid_jax.cache.pools.pages import FrameHolds
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.node import ARENA, Match
from hybrid_jax.cache.tree.radix import RadixTree


@dataclass
class MemoryCounters:
    """What happened to an engine's memory since it began.

    Attributes:
        memory_shortages: how often a sequence could not get the memory it needed even if the whole cache were evicted.
        evicted_page_frames, evicted_checkpoint_frames: frames that evictions freed.
        peak_live_frames: the most frames that running sequences ever held.
        folds_in_place, folds_to_new: folds into the row's own checkpoint, and into another slot.
        narrowed_checkpoints, widened_checkpoints: those that the cache took as int8, and those that rows went on from.
        narrow_without_room: those that the cache had no room for.
    """

    memory_shortages: int = 0
    evicted_page_frames: int = 0
    evicted_checkpoint_frames: int = 0
    peak_live_frames: int = 0
    folds_in_place: int = 0
    folds_to_new: int = 0
    narrowed_checkpoints: int = 0
    widened_checkpoints: int = 0
    narrow_without_room: int = 0


class Holds:
    """Takes frames and slots for sequences and gives them back: the pools, with a count of what is live.

    A frame or slot is live while at least one sequence holds it, even if the tree holds it too. Each counts once.

    Args:
        frames, slots: the pools. tree: the other holder; None without a prefix cache.

    Attributes:
        counters: what happened so far.
        checkpoint_frames: live frames of checkpoints.
    """

    def __init__(self, frames: FrameAllocator, slots: SlotTable, tree: RadixTree | None):
        self._frames, self._slots, self._tree = frames, slots, tree
        self._pages = FrameHolds(frames)
        self._slot_holds: dict[int, int] = {}
        self.checkpoint_frames = 0
        self.counters = MemoryCounters()

    @property
    def page_frames(self) -> int:
        """Live frames of pages."""
        return self._pages.num_frames

    @property
    def num_slots(self) -> int:
        """Live slots."""
        return len(self._slot_holds)

    @property
    def num_frames(self) -> int:
        """Live frames of pages and of checkpoints."""
        return self.page_frames + self.checkpoint_frames

    def _observe(self) -> None:
        self.counters.peak_live_frames = max(self.counters.peak_live_frames, self.num_frames)

    # --- pages ----------------------------------------------------------------------------------

    def allocate_frames(self, count: int) -> np.ndarray:
        """`count` frames for pages: int32[count].

        Raises:
            OutOfFrames: fewer are free; nothing was taken.
        """
        frames = self._frames.allocate(count)
        self._pages.note(indices(frames))
        self._observe()
        return frames

    def retain_frames(self, frames: npt.ArrayLike) -> None:
        """Adds a sequence's hold on each of these frames; none is listed twice, and zeros are none."""
        self._pages.hold(given(frames))
        self._observe()

    def release_frames(self, frames: npt.ArrayLike) -> None:
        """Drops a sequence's hold on each of these frames; none is listed twice, and zeros are none."""
        self._pages.drop(given(frames))

    # --- checkpoints ----------------------------------------------------------------------------

    def allocate_slot(self) -> int:
        """A handle of a new slot.

        Raises:
            OutOfSlots, OutOfFrames: no slot is free, or too few frames are; nothing was taken.
        """
        slot = self._slots.allocate()
        self._note_slot(slot)
        return slot

    def retain_slot(self, slot: int) -> None:
        """Adds a sequence's hold on this slot; does nothing for 0."""
        if slot:
            self._slots.retain(slot)
            self._note_slot(slot)

    def release_slot(self, slot: int) -> None:
        """Drops a sequence's hold on this slot; does nothing for 0."""
        if slot:
            length = self._slots.length(slot)
            self._slots.release(slot)
            self._slot_holds[slot] -= 1
            if not self._slot_holds[slot]:
                del self._slot_holds[slot]
                self.checkpoint_frames -= length

    def _note_slot(self, slot: int) -> None:
        if slot not in self._slot_holds:
            self._slot_holds[slot] = 0
            self.checkpoint_frames += self._slots.length(slot)
        self._slot_holds[slot] += 1
        self._observe()

    # --- both -----------------------------------------------------------------------------------

    def acquire(self, match: Match) -> tuple[np.ndarray, int]:
        """Takes pages and slot of a match's resume point for a sequence, as `RadixTree.acquire` returns them."""
        assert self._tree is not None, "holds: a match without a tree"
        pages, slot = self._tree.acquire(match)
        self._pages.note(given(pages))
        if slot:
            self._note_slot(slot)
        self._observe()
        return pages, slot

    def num_frames_of(self, match: Match) -> int:
        """How many frames of a match's pages and checkpoint no sequence holds yet; taking them makes them live."""
        assert self._tree is not None, "holds: a match without a tree"
        pages = given(self._tree.pages_to(match.node, match.hit_len))
        slot = match.node.slots.get(ARENA, 0)
        lives = not slot or slot in self._slot_holds
        checkpoint = 0 if lives else self._slots.length(slot)
        return pages.size - self._pages.num_held(pages) + checkpoint

    # --- looking at it --------------------------------------------------------------------------

    def frames_by_kind(self) -> tuple[int, int]:
        """How many frames of pages, and how many of checkpoints, are held."""
        checkpoints = self._slots.num_frames
        return self._frames.num_held - checkpoints, checkpoints

    def stats(self, frame_bytes: int) -> dict[str, int | float]:
        """Who holds the frames now, and the counters of what happened to them."""
        cached_pages = num_cached = cached_checkpoints = 0
        if self._tree is not None:
            arena = self._tree.arena
            cached_pages, num_cached = arena.pages.num_frames, len(arena.slot_nodes)
            cached_checkpoints = sum(map(self._slots.length, arena.slot_nodes))
        page_frames, checkpoint_frames = self.frames_by_kind()
        return {
            "num_frames": self._frames.num_frames - 1,
            "free_frames": self._frames.num_free,
            "page_frames": page_frames,
            "checkpoint_frames": checkpoint_frames,
            "live_page_frames": self.page_frames,
            "live_checkpoint_frames": self.checkpoint_frames,
            "cached_frames": cached_pages + cached_checkpoints,
            "cached_page_frames": cached_pages,
            "cached_page_bytes": cached_pages * frame_bytes,
            "cached_checkpoints": num_cached,
            "cached_checkpoint_bytes": cached_checkpoints * frame_bytes,
            "checkpoints": self._slots.num_held,
            **asdict(self.counters),
        }

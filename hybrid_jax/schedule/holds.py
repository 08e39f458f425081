"""What running sequences hold, apart from what is only cached."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from hybrid_jax.cache.pools.frames import FrameAllocator, indices
from hybrid_jax.cache.pools.pages import PageHolds
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.look_up import Match
from hybrid_jax.cache.tree.radix import RadixTree


@dataclass
class MemoryCounters:
    """What happened to an engine's memory since it began.

    Attributes:
        memory_shortages: how often a sequence could not get the memory it needed even if the whole cache were evicted.
        evicted_page_frames, evicted_checkpoint_frames: frames that evictions freed.
        peak_live_frames: the most frames that running sequences ever held.
    """

    memory_shortages: int = 0
    evicted_page_frames: int = 0
    evicted_checkpoint_frames: int = 0
    peak_live_frames: int = 0

    def evicted(self, page_frames: int, checkpoint_frames: int, *, enough: bool) -> None:
        """Counts the frames of evicted entries, and a shortage if there was not `enough` in the end."""
        self.evicted_page_frames += page_frames
        self.evicted_checkpoint_frames += checkpoint_frames
        self.memory_shortages += not enough

    def stats(self) -> dict[str, int]:
        """All counters by name."""
        return asdict(self)


class Holds:
    """Takes frames and slots for sequences and gives them back: the pools, with a count of what is live.

    A frame or slot is live while at least one sequence holds it, even if the tree holds it too. Each counts once.

    Args:
        frames, slots: the pools. tree: the other holder; None without a prefix cache.

    Attributes:
        counters: what happened so far.
        page_frames, num_slots: how many page frames and slots are live.
        page_holds: the tree's own holds on page frames; None without a tree.
    """

    def __init__(
        self,
        frames: FrameAllocator,
        slots: SlotTable,
        tree: RadixTree | None,
    ):
        self._frames, self._slots, self._tree = frames, slots, tree
        # An engine's tree lists frames; simulations have trees that only count.
        self.page_holds = cast(PageHolds, tree.page_holds if tree is not None else None)
        self.counters = MemoryCounters()
        self.page_frames = self.num_slots = 0

    @property
    def checkpoint_frames(self) -> int:
        """Live frames of checkpoints."""
        return self.num_slots * self._slots.state_frames

    @property
    def num_frames(self) -> int:
        """Live frames of pages and of checkpoints."""
        return self.page_frames + self.checkpoint_frames

    def _observe(self) -> None:
        counters, held = self.counters, self.num_frames
        if held > counters.peak_live_frames:
            counters.peak_live_frames = held

    # --- pages ----------------------------------------------------------------------------------

    def allocate_frames(self, count: int) -> np.ndarray:
        """`count` frames for pages: int32[count].

        Raises:
            OutOfFrames: fewer are free; nothing was taken.
        """
        frames = self._frames.allocate(count)
        self.page_frames += count
        self._observe()
        return frames

    def retain_frames(self, frames: npt.ArrayLike) -> None:
        """Adds a sequence's hold on each of these frames; none is listed twice."""
        self._frames.retain(frames, distinct=True)
        self.page_frames += self._num_new(indices(frames))
        self._observe()

    def release_frames(self, frames: npt.ArrayLike, *, distinct: bool = False) -> None:
        """Drops a sequence's holds on these frames, one for each time a frame is listed.

        `distinct` says that no frame is listed twice.
        """
        frames = indices(frames)
        if not frames.size:
            return
        self._frames.release(frames, distinct=distinct)
        gone = self._live_holders(frames) == 0
        self.page_frames -= (
            int(np.count_nonzero(gone)) if distinct else len(set(frames[gone].tolist()))
        )
        self._observe()

    def _num_new(self, frames: np.ndarray) -> int:
        """How many of these frames are held by a single sequence, the one that has just got them."""
        return int(np.count_nonzero(self._live_holders(frames) == 1))

    def _live_holders(self, frames: np.ndarray) -> np.ndarray:
        holders = self._frames.holders_of(frames)
        return holders if self._tree is None else holders - self.page_holds.on(frames)

    # --- checkpoints ----------------------------------------------------------------------------

    def allocate_slot(self) -> int:
        """A handle of a new slot.

        Raises:
            OutOfSlots, OutOfFrames: no slot is free, or too few frames are; nothing was taken.
        """
        slot = self._slots.allocate()
        self.num_slots += 1
        self._observe()
        return slot

    def retain_slot(self, slot: int) -> None:
        """Adds a sequence's hold on this slot; does nothing for 0."""
        if slot:
            self._slots.retain(slot)
            self.num_slots += self._live_slot_holders(slot) == 1
            self._observe()

    def release_slot(self, slot: int) -> None:
        """Drops a sequence's hold on this slot; does nothing for 0."""
        if slot:
            last = self._live_slot_holders(slot) == 1
            self._slots.release(slot)
            self.num_slots -= last
            self._observe()

    def _live_slot_holders(self, slot: int) -> int:
        cached = self._tree is not None and slot in self._tree.slot_nodes
        return self._slots.holders(slot) - cached

    # --- both -----------------------------------------------------------------------------------

    def acquire(self, match: Match) -> tuple[np.ndarray, int]:
        """Takes pages and slot of a match's resume point for a sequence, as `RadixTree.acquire` returns them."""
        assert self._tree is not None, "holds: a match without a tree"
        pages, slot = self._tree.acquire(match)
        self.page_frames += self._num_new(indices(pages))
        if slot:
            self.num_slots += self._live_slot_holders(slot) == 1
        self._observe()
        return pages, slot

    def num_frames_of(self, match: Match) -> int:
        """How many frames of a match's pages and checkpoint no sequence holds yet; taking them makes them live."""
        assert self._tree is not None, "holds: a match without a tree"
        pages = indices(self._tree.pages_of(match))
        num_new = int(np.count_nonzero(self._live_holders(pages) == 0))
        slot = match.node.slot
        return num_new + (slot and not self._live_slot_holders(slot)) * self._slots.state_frames

    # --- looking at it --------------------------------------------------------------------------

    def frames_by_kind(self) -> tuple[int, int]:
        """How many frames of pages, and how many of checkpoints, are held."""
        checkpoints = self._slots.num_held * self._slots.state_frames
        return self._frames.num_held - checkpoints, checkpoints

    def stats(self, frame_bytes: int) -> dict[str, int | float]:
        """Who holds the frames now, and the counters of what happened to them."""
        cached_pages = num_cached = 0
        if self._tree is not None:
            cached_pages, num_cached = self.page_holds.num_frames, len(self._tree.slot_nodes)
        cached_checkpoints = num_cached * self._slots.state_frames
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
            **self.counters.stats(),
        }

    def check_invariants(self, frames: set[int], slots: set[int]) -> None:
        """Compares the counts with what sequences list; raises AssertionError with both numbers if they differ."""
        assert self.page_frames == len(frames), (
            f"holds: counts {self.page_frames} live page frames, sequences list {len(frames)}"
        )
        assert self.num_slots == len(slots), (
            f"holds: counts {self.num_slots} live checkpoints, sequences have {len(slots)}"
        )

"""The engine's memory in a pool study: equal frames, pages and checkpoints, one free list."""

from __future__ import annotations

import numpy as np

from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.geometry import ITEM_BYTES
from hybrid_jax.sim.allocators.honest_memory import HonestCounters
from hybrid_jax.sim.allocators.honest_models import HonestModel

ENTRY_BYTES = ITEM_BYTES["int32"]  # of the slot table on the device, a frame id
MAX_TABLE = 1 << 16  # slots, as the engine has it


class FramesMemory:
    """Pages of one frame per group of layers, checkpoints of `state_frames` frames, with the engine's own classes.

    Every `grain` tokens a request folds: its checkpoint is written over, if nobody else holds it, and else to a new
    one, for which the old one makes no room until then. `share` and `unshare` are what a prefix cache would do; a
    study without shared prefixes never calls them, so that every fold there is in place.

    A checkpoint is taken on admission, though the engine would wait for the first `grain` tokens.

    Args:
        model, pool_bytes: sizes; the pool is the arena, with its frame 0 beside it.
        rows: requests that the pool has to leave memory for in rings and tables, and the most that run at once; None
            for as many as come, with rings beside the pool.
    """

    def __init__(self, model: HonestModel, pool_bytes: int, *, rows: int | None = None):
        self.geometry = geometry = model.frames
        self.counters = HonestCounters()
        self.model, self.rows = model, rows
        self.num_frames = num_frames = self._fill(pool_bytes)  # without the sink
        max_slots = min(1 + num_frames // geometry.state_frames, MAX_TABLE)
        self.frames = FrameAllocator(num_frames + 1)
        self.slots = SlotTable(self.frames, state_frames=geometry.state_frames, max_slots=max_slots)
        # Where a page begins or a fold is due; both are powers of two.
        self.step_tokens = min(geometry.page_tokens, geometry.grain)
        self.prefix_tokens = geometry.grain  # a hit inside a page copies the page
        self.slot_bytes = model.slot_bytes
        table = ENTRY_BYTES * max_slots * geometry.state_frames
        self.reserved_bytes = (num_frames + 1) * geometry.frame_bytes + table
        self._pages: dict[int, list[np.ndarray]] = {}
        self._slot: dict[int, int] = {}
        self._folded: dict[int, int] = {}  # position of the checkpoint

    def _fill(self, pool_bytes: int) -> int:
        """Frames that the pool has room for beside what else lies in it."""
        if self.rows is None:
            return self._require(pool_bytes // self.geometry.frame_bytes, pool_bytes, 0)
        beside = self._rings(self.rows)
        num_frames = (pool_bytes - beside) // (self.geometry.frame_bytes + ENTRY_BYTES)
        return self._require(num_frames, pool_bytes, beside)

    def _require(self, num_frames: int, pool_bytes: int, beside: int, ring_frames: int = 0) -> int:
        """The same number, if that is enough for one request."""
        geometry = self.geometry
        least = geometry.state_frames + geometry.frames_per_page + ring_frames
        if num_frames < least:
            raise ValueError(
                f"pool-sim: frames: {pool_bytes} bytes must hold {least} frames of {geometry.frame_bytes} bytes, "
                f"as one request takes, beside {beside} bytes of rings and tables"
            )
        return num_frames

    @property
    def used_bytes(self) -> int:
        return self.frames.num_held * self.geometry.frame_bytes

    def fits_alone(self, num_tokens: int) -> bool:
        return self._page_frames(num_tokens) + self.geometry.state_frames <= self.num_frames

    def admit(self, request: int, num_tokens: int) -> bool:
        frames = self._page_frames(num_tokens)
        self.counters.allocate_calls += 2
        if frames + self.geometry.state_frames > self.frames.num_free or not self.slots.num_free:
            return False
        if self.rows is not None and len(self._slot) >= self.rows:
            return False
        self._pages[request] = [self.frames.allocate(frames)]
        self._slot[request] = self.slots.allocate()
        self._folded[request] = 0
        return self.fold(request, num_tokens)

    def grow(self, request: int, num_tokens: int) -> bool:
        missing = self._missing(request, num_tokens)
        if missing > 0:
            self.counters.allocate_calls += 1
            if missing > self.frames.num_free:
                return False
            self._pages[request].append(self.frames.allocate(missing))
        return self.fold(request, num_tokens)

    def fold(self, request: int, num_tokens: int) -> bool:
        """Checkpoints up to the last multiple of the grain before the last token; False for want of a new one."""
        due = (self.geometry.align(num_tokens - 1) - self._folded[request]) // self.geometry.grain
        if due <= 0:
            return True
        if self.slots.holders(self._slot[request]) > 1:
            if self.geometry.state_frames > self.frames.num_free or not self.slots.num_free:
                return False
            old, self._slot[request] = self._slot[request], self.slots.allocate()
            self.slots.release(old)
            self.counters.folds_to_new += 1
            due -= 1
            self._folded[request] += self.geometry.grain
        self.counters.folds_in_place += due
        self._folded[request] += due * self.geometry.grain
        return True

    def share(self, request: int) -> int:
        """A second holder of the request's checkpoint, as a prefix cache is; returns its handle."""
        self.slots.retain(self._slot[request])
        return self._slot[request]

    def unshare(self, handle: int) -> None:
        """The second holder lets go."""
        self.slots.release(handle)

    def release(self, request: int) -> None:
        for frames in self._pages.pop(request):
            self.frames.release(frames, distinct=True)
        self.slots.release(self._slot.pop(request))
        self.slots.take_new()
        del self._folded[request]

    def holds(self, request: int) -> tuple[int, bool]:
        frames = sum(
            int(np.count_nonzero(self.frames.holders_of(part)))
            for part in self._pages.get(request, ())
        )
        pages = frames // self.geometry.frames_per_page
        slot = self._slot.get(request, 0)
        return pages * self.geometry.page_tokens, bool(slot) and bool(self.slots.resolve(slot))

    def row_bytes(self, num_rows: int) -> int:
        """Rings are made once: for all rows that were asked for, or else for the most that ever ran."""
        return self._rings(num_rows if self.rows is None else self.rows)

    def check_invariants(self) -> None:
        self.frames.check_invariants()
        self.slots.check_invariants()

    def _rings(self, rows: int) -> int:
        return (rows + 1) * self.model.ring_bytes  # and the row that padding writes to

    def _missing(self, request: int, num_tokens: int) -> int:
        """Frames of pages that a request lacks."""
        return self._page_frames(num_tokens) - sum(map(len, self._pages[request]))

    def _page_frames(self, num_tokens: int) -> int:
        return self.geometry.num_pages(num_tokens) * self.geometry.frames_per_page

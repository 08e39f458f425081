"""Rings in frames of the arena: what that would give. The engine has its rings beside the arena."""

from __future__ import annotations

from hybrid_jax.sim.allocators.honest_frames import ENTRY_BYTES, FramesMemory
from hybrid_jax.sim.allocators.honest_models import HonestModel

KINDS = {
    "rings": "a whole ring, from admission to the end",
    "records": "the convolution's columns, and records as tokens come; the fold gives these back",
    "raw": "records of what enters the convolution, as tokens come; no columns",
}


class RingsInFrames(FramesMemory):
    """Pages, checkpoints and rings from one free list; sink and tables are within the pool too.

    Records are packed into frames without regard to layers, the least that any layout could take. A request has those
    of its prompt's end from its admission on. Where a page begins as a fold is due, the page comes first. Raw records
    are convolved again at every step; the columns before the first of them are the checkpoint's.

    Args:
        model, pool_bytes: sizes; the model's grain is the ring's length.
        kind: one of KINDS.
    """

    def __init__(self, model: HonestModel, pool_bytes: int, *, kind: str):
        self.columns_bytes = 0 if kind == "raw" else model.window_bytes
        self.record_bytes = model.raw_bytes if kind == "raw" else model.record_bytes
        self.whole = kind == "rings"
        super().__init__(model, pool_bytes)
        # A frame is in the table of checkpoints or in that of rings; both have a line for padding.
        self.reserved_bytes += ENTRY_BYTES * (
            self.num_frames + self._ring_frames(self.geometry.grain)
        )
        self._ring: dict[int, list[int]] = {}
        if not self.whole:
            self.step_tokens = 1

    def fits_alone(self, num_tokens: int) -> bool:
        most = min(num_tokens, self.geometry.grain)
        return self._all_frames(num_tokens, most) <= self.num_frames

    def admit(self, request: int, num_tokens: int) -> bool:
        if self._all_frames(num_tokens, num_tokens) > self.frames.num_free:
            self.counters.allocate_calls += 1
            return False
        if not super().admit(request, num_tokens):
            return False
        self._ring[request] = self.frames.allocate(self._ring_frames(num_tokens)).tolist()
        return True

    def grow(self, request: int, num_tokens: int) -> bool:
        ring, count = self._ring[request], self._ring_frames(num_tokens)
        more = count - len(ring)
        if more > 0:
            self.counters.allocate_calls += 1
            if more + max(self._missing(request, num_tokens), 0) > self.frames.num_free:
                return False
            ring += self.frames.allocate(more).tolist()
        if not super().grow(request, num_tokens):
            return False
        if more < 0:  # once the fold has read them
            self.frames.release(ring[count:], distinct=True)
            del ring[count:]
        return True

    def release(self, request: int) -> None:
        self.frames.release(self._ring.pop(request), distinct=True)
        super().release(request)

    def row_bytes(self, num_rows: int) -> int:
        return 0

    def _fill(self, pool_bytes: int) -> int:
        ring = self._ring_frames(self.geometry.grain)
        lines = ENTRY_BYTES * (self.geometry.state_frames + ring)
        num_frames = (pool_bytes - lines) // (self.geometry.frame_bytes + 2 * ENTRY_BYTES) - 1
        return self._require(num_frames, pool_bytes, lines, ring)

    def _all_frames(self, num_tokens: int, ring_tokens: int) -> int:
        frames = self._page_frames(num_tokens) + self.geometry.state_frames
        return frames + self._ring_frames(ring_tokens)

    def _ring_frames(self, num_tokens: int) -> int:
        """Of a request with so many tokens since its first: the records since its last fold."""
        grain = self.geometry.grain
        records = grain if self.whole else num_tokens - self.geometry.align(num_tokens - 1)
        return -(-(self.columns_bytes + records * self.record_bytes) // self.geometry.frame_bytes)

"""Soft quotas: which kind of memory gives way first when frames run out."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.node import Node


class Quota:
    """Shares of the frames that pages and checkpoints may take while the other kind wants them.

    Any free frame serves either kind, so nothing is reserved and nobody is refused: only when something has to be
    evicted does it matter who has more than its quota.

    Args:
        frames, slots: the pools.
        pages: (low, high) shares of all frames. Pages above the high one give way first, and checkpoints where
            pages have less than the low one left to them: their own quota is what remains.
    """

    def __init__(self, frames: FrameAllocator, slots: SlotTable, pages: tuple[float, float]):
        self._frames, self._slots = frames, slots
        total = frames.num_frames - 1
        self.most_pages, self.most_checkpoints = pages[1] * total, (1 - pages[0]) * total

    def picks(self) -> Callable[[Node], bool] | None:
        """What tells entries of the kind that exceeds its quota; None while neither does.

        Both can only where the quotas leave frames to neither; then pages go.
        """
        checkpoints = self._slots.num_held * self._slots.state_frames
        if self._frames.num_held - checkpoints > self.most_pages:
            return lambda node: self._freed_pages(node) >= self._freed_checkpoint(node)
        if checkpoints > self.most_checkpoints:
            return lambda node: self._freed_checkpoint(node) >= self._freed_pages(node)
        return None

    def _freed_pages(self, node: Node) -> int:
        return 0 if node.num_cached_children else node.pages.size

    def _freed_checkpoint(self, node: Node) -> int:
        return self._slots.state_frames if node.slot else 0

"""The tree's own holds on page frames, so that it can tell what only the tree holds."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_jax.cache.frames import FrameAllocator

Page = tuple[int, ...]  # frame ids, one per layer group
PageHandles = tuple[int, ...]  # their handles


class PageHolds:
    """Pages held by tree nodes, as handles; a frame counts once for every node that lists it."""

    def __init__(self, frames: FrameAllocator):
        self._frames = frames
        self._holds: dict[int, int] = {}

    def __len__(self) -> int:
        """Frames held at all."""
        return len(self._holds)

    def as_dict(self) -> dict[int, int]:
        """Holds per frame."""
        return dict(self._holds)

    def adopt(self, pages: Sequence[Page]) -> list[PageHandles]:
        """Takes a hold on every frame of a row's pages; the row keeps its own."""
        handle = self._frames.handle
        handles = [tuple(handle(frame) for frame in page) for page in pages]
        self.share(handles)
        return handles

    def share(self, pages: Sequence[PageHandles]) -> None:
        """One more node lists these pages."""
        frames = self._resolve(pages)
        self._frames.retain(frames)
        for frame in frames:
            self._holds[frame] = self._holds.get(frame, 0) + 1

    def release(self, pages: Sequence[PageHandles]) -> None:
        """A node lists these pages no more."""
        frames = self._resolve(pages)
        self._frames.release(frames)
        for frame in frames:
            self._holds[frame] -= 1
            if not self._holds[frame]:
                del self._holds[frame]

    def only_ours(self, pages: Sequence[PageHandles]) -> bool:
        """Some frame of these pages is held by nobody but tree nodes."""
        holders, holds = self._frames.holders, self._holds
        return any(holders(frame) == holds[frame] for frame in self._resolve(pages))

    def ids(self, page: PageHandles) -> Page:
        """Frame ids of one page.

        Raises:
            StaleHandle: one of them was released since.
        """
        return tuple(self._frames.resolve(handle) for handle in page)

    def _resolve(self, pages: Sequence[PageHandles]) -> list[int]:
        resolve = self._frames.resolve
        return [resolve(handle) for page in pages for handle in page]

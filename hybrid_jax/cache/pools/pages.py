"""What one holder holds of the frames, and pages as the nodes of a tree list them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hybrid_jax.cache.pools.frames import ONE, FrameAllocator, indices
from hybrid_jax.cache.pools.recount import agree

RowPages = Any  # what a row lists: an array of frame ids, or a range where pages are only counted
NodePages = Any  # what a node lists; slices are its parts


class PageStore(Protocol):
    """What nodes list as pages: `PageHolds` of frames, or `CountedPages` of a budget of bytes."""

    none: NodePages

    num_frames: int

    def adopt(self, pages: RowPages) -> NodePages:
        """Takes a hold on every frame of a row's pages, for a node; the row keeps its own."""

    def share(self, pages: NodePages) -> object:
        """One more node lists these pages."""

    def release(self, pages: NodePages) -> None:
        """A node lists these pages no more."""

    def join(self, upper: NodePages, lower: NodePages) -> NodePages:
        """The pages of two spans, one below the other, as those of one."""

    def only_ours(self, pages: NodePages) -> bool:
        """Whether some frame of these pages is held by nobody but tree nodes."""

    def row(self, parts: Sequence[NodePages]) -> RowPages:
        """A row's pages from those of the nodes on its path, in order."""

    def check_invariants(self, listed: Sequence[NodePages]) -> None:
        """Recounts from what all nodes list; raises AssertionError with both numbers when they differ."""


class FrameHolds:
    """What one holder holds of the frames, such as the tree, or all rows together.

    Attributes:
        num_frames: frames that it holds at all; each counts once.
    """

    def __init__(self, frames: FrameAllocator):
        self._frames = frames
        self._holds: np.ndarray = np.zeros(frames.num_frames, np.int32)
        self.num_frames = 0

    def as_dict(self) -> dict[int, int]:
        """Holds per frame."""
        return {int(frame): int(self._holds[frame]) for frame in np.flatnonzero(self._holds)}

    def num_held(self, frames: np.ndarray) -> int:
        """How many of these frames it holds."""
        return int(np.count_nonzero(self._holds[frames]))

    def hold(self, frames: np.ndarray) -> None:
        """Adds a hold on each of these frames, given as an index; none is listed twice."""
        self._frames.retain(frames)
        self.note(frames)

    def note(self, frames: np.ndarray) -> None:
        """Notes holds that the pool has counted already; no frame is listed twice."""
        before = self._holds[frames]
        self.num_frames += len(before) - int(np.count_nonzero(before))
        self._holds[frames] = before + ONE

    def drop(self, frames: np.ndarray) -> None:
        """Drops a hold on each of these frames, given as an index; none is listed twice."""
        self._frames.release(frames)
        left = self._holds[frames] - ONE
        self._holds[frames] = left
        self.num_frames -= len(left) - int(np.count_nonzero(left))


class PageHolds(FrameHolds, PageStore):
    """Pages held by tree nodes, as handles; a frame counts once for every node that lists it.

    A row's pages are frame ids, int32[n, frames_per_page]; a node's are their handles, uint32 of the same
    shape, so that a node that outlives its hold is found out.
    """

    none: np.ndarray = np.zeros((0, 0), np.uint32)

    def adopt(self, pages: np.ndarray) -> np.ndarray:
        pages = np.asarray(pages, np.int32)
        names = self._frames.handles(pages)
        self.hold(indices(pages))
        return names

    def share(self, pages: np.ndarray) -> None:
        self.hold(indices(self.ids(pages)))

    def release(self, pages: np.ndarray) -> None:
        self.drop(indices(self.ids(pages)))

    def join(self, upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        return np.concatenate((upper, lower))

    def only_ours(self, pages: np.ndarray) -> bool:
        frames = indices(self.ids(pages))
        return bool((self._frames.holders_of(frames) == self._holds[frames]).any())

    def ids(self, pages: np.ndarray) -> np.ndarray:
        """Frame ids of a node's pages, as an index.

        Raises:
            StaleHandle: one of them was released since.
        """
        return self._frames.resolve(pages)

    def row(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        if not parts:
            return np.zeros((0, 0), np.int32)
        return self.ids(np.concatenate(parts)).astype(np.int32)

    def check_invariants(self, listed: Sequence[np.ndarray]) -> None:
        found = Counter(frame for pages in listed for frame in indices(self.ids(pages)).tolist())
        agree(
            "radix",
            page_holds=(self.as_dict(), found),
            page_frames=(self.num_frames, len(found)),
        )

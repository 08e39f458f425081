"""What one holder holds of the frames, and pages as the nodes of a tree list them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hybrid_jax.cache.pools.frames import ONE, FrameAllocator, indices
from hybrid_jax.cache.pools.recount import agree

RowPages = Any  # what a row lists: an array of frame ids, or a range where pages are only counted
NOWHERE = 1 << 62  # past the end of every sequence
NodePages = Any  # what a node lists of its span; only its `PageStore` takes it apart


class WindowedFrames(NamedTuple):
    """Frames of every page that belong to layers with a window.

    Attributes:
        window: how many tokens a query sees there, with itself.
        frames: which frames of a page.
    """

    window: int
    frames: slice


class PageStore(Protocol):
    """The pages of one tier, as the nodes of a tree list them: `PageHolds` of frames, `CountedPages` of a budget.

    What a node lists is a value made for its span. The tree hands it back to be split, joined or released, and knows
    nothing of what is in it.

    Attributes:
        none: what a node without tokens lists.
        page_tokens: tokens of a page; 0 for a model without attention, whose nodes list no pages.
        num_frames: frames that nodes list; each counts once.
        windows: the parts of pages that are only read so far back. Where no row reads them any more, they may be
            missing.
    """

    none: NodePages
    page_tokens: int
    num_frames: int
    windows: tuple[WindowedFrames, ...] = ()

    def num_pages(self, length: int) -> int:
        """Pages that overlap [0, length)."""
        return -(-length // self.page_tokens) if self.page_tokens else 0

    def places(self, start: int, end: int) -> slice:
        """Which of a row's pages overlap [start, end)."""
        return slice(start // self.page_tokens if self.page_tokens else 0, self.num_pages(end))

    def adopt(self, row: RowPages, start: int, end: int) -> NodePages:
        """Takes a hold on those of a row's pages that overlap [start, end), for a node; the row keeps its own."""
        return self._take(row[self.places(start, end)])

    def split(self, pages: NodePages, start: int, middle: int) -> tuple[NodePages, NodePages]:
        """The pages of a span from `start`, as those up to `middle` and the rest; a page that is cut is in both."""
        place = middle // self.page_tokens - start // self.page_tokens if self.page_tokens else 0
        if not self._cuts(middle):
            return pages[:place], pages[place:]
        upper = pages[: place + 1]
        self._share(upper[-1:])
        return upper, pages[place:]

    def join(self, upper: NodePages, lower: NodePages, middle: int) -> NodePages:
        """The pages of two spans that meet at `middle`, as those of one; of a page that was cut the lower one stays."""
        if self._cuts(middle):
            self.release(upper[-1:])
            upper = upper[:-1]
        return self._joined(upper, lower)

    def loses(self, upper: NodePages, lower: NodePages, middle: int) -> bool:
        """Whether `join` would lose something: a page that the boundary cuts and of which only the upper has all."""
        return False

    def row(self, spans: Iterable[tuple[int, NodePages]], length: int) -> RowPages:
        """A row's pages of [0, length), from those of the nodes on its path.

        Of a page that a boundary cuts it is the deepest node's that counts. What no window reads from `length` on is
        left out.

        Args:
            spans: where each node starts, and its pages; the deepest node first.
        """
        parts, missing = [], self.num_pages(length)
        for start, pages in spans:
            if not missing:
                break
            first = start // self.page_tokens
            parts.append(pages[: missing - first])
            missing = min(missing, first)
        return self._row(parts[::-1], length)

    def readable(self, spans: Iterable[tuple[int, NodePages]], length: int) -> bool:
        """Whether all is there that a row reads which goes on from `length`.

        Args:
            spans: as for `row`.
        """
        return True

    def deepest(self, spans: Sequence[tuple[int, NodePages]], length: int, grain: int) -> int:
        """The last multiple of `grain` up to `length`, which is one, from which a row can go on; 0 for none.

        Args:
            spans: as for `row`; `length` lies in the first one.
        """
        return length

    def given(self, pages: RowPages | NodePages) -> RowPages | NodePages:
        """What a row or a node has of its pages."""
        return pages

    def read_from(self, position: int) -> int:
        """Where the first page begins that a row reads through a window if it goes on at `position`."""
        return NOWHERE

    def kept_from(self, row: RowPages) -> int:
        """The position from which on a row has pages that are only read so far back; past its end without any."""
        return NOWHERE

    def mend(self, pages: NodePages, row: RowPages, start: int, end: int) -> NodePages:
        """The pages of the span [start, end); what they lack is taken from a row's pages, with a hold on it."""
        return pages

    def hollow(self, pages: NodePages, start: int, position: int) -> NodePages:
        """The pages of a span from `start`, without what is only read by rows that go on before `position`."""
        return pages

    def lack_beginnings(self, frames: np.ndarray, position: int) -> None:
        """Notes of held frames that came from elsewhere without what no row reads that goes on at `position`.

        From then on they are read by rows that go on there or later.

        Args:
            frames: int32[n] of layers with a window.
        """
        return None

    def lacking(self, row: np.ndarray, position: int) -> np.ndarray:
        """Which of a row's frames lack something that is read by a row that goes on at `position`: bool like it."""
        found: np.ndarray = np.zeros(row.shape, bool)
        return found

    def copied(self, source: PageStore, frames: np.ndarray, into: np.ndarray) -> None:
        """Notes that held frames are copies: what those of `source` lack, these lack too.

        Args:
            frames, into: int32[n] frame ids; zeros are none.
        """
        return None

    def _cuts(self, position: int) -> bool:
        return self.page_tokens > 0 and position % self.page_tokens > 0

    def only_ours(self, pages: NodePages) -> bool:
        """Whether some frame of these pages is held by nobody but tree nodes."""

    def release(self, pages: NodePages) -> None:
        """A node lists these pages no more."""

    def check_invariants(self, listed: Sequence[NodePages]) -> None:
        """Recounts from what all nodes list; raises AssertionError with both numbers when they differ."""

    def _take(self, row: RowPages) -> NodePages:
        """A hold on every one of a row's pages, for a node."""

    def _share(self, pages: NodePages) -> object:
        """One more node lists these pages."""

    def _joined(self, upper: NodePages, lower: NodePages) -> NodePages:
        """The pages of two spans, one below the other, as those of one."""

    def _row(self, parts: Sequence[NodePages], length: int) -> RowPages:
        """A row's pages of [0, length), from parts of those of the nodes on its path, in order."""


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

    def __init__(self, frames: FrameAllocator, page_tokens: int):
        super().__init__(frames)
        self.page_tokens = page_tokens

    def _take(self, row: np.ndarray) -> np.ndarray:
        row = np.asarray(row, np.int32)
        self.hold(indices(row))
        return self._frames.handles(row)

    def _share(self, pages: np.ndarray) -> None:
        self.hold(self.given(self.ids(pages)))

    def release(self, pages: np.ndarray) -> None:
        self.drop(self.given(self.ids(pages)))

    def given(self, pages: np.ndarray) -> np.ndarray:
        return indices(pages)

    def _joined(self, upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        return np.concatenate((upper, lower))

    def only_ours(self, pages: np.ndarray) -> bool:
        frames = self.given(self.ids(pages))
        return bool((self._frames.holders_of(frames) == self._holds[frames]).any())

    def ids(self, pages: np.ndarray) -> np.ndarray:
        """Frame ids of a node's pages, as an index.

        Raises:
            StaleHandle: one of them was released since.
        """
        return self._frames.resolve(pages)

    def _row(self, parts: Sequence[np.ndarray], length: int) -> np.ndarray:
        if not parts:
            return np.zeros((0, 0), np.int32)
        return self.ids(np.concatenate(parts)).astype(np.int32)

    def check_invariants(self, listed: Sequence[np.ndarray]) -> None:
        hollow = {i for _, frames in self.windows for i in range(frames.start, frames.stop)}
        holes = {int(i) for pages in listed for i in np.flatnonzero(~pages.all(axis=0))}
        agree("radix", holes_in_frames_without_a_window=(holes - hollow, set()))
        found = Counter(frame for pages in listed for frame in self.given(self.ids(pages)).tolist())
        agree(
            "radix",
            page_holds=(self.as_dict(), found),
            page_frames=(self.num_frames, len(found)),
        )

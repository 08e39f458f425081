"""What one holder holds of the frames, and pages as the nodes of a tree list them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hybrid_jax.cache.pools.frames import ONE, SINK, FrameAllocator, given, indices
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
    shape, so that a node that outlives its hold is found out. In both, 0 stands where a frame was given back.
    """

    none: np.ndarray = np.zeros((0, 0), np.uint32)

    def __init__(
        self,
        frames: FrameAllocator,
        page_tokens: int,
        windows: Iterable[tuple[int, slice]] = (),
    ):
        super().__init__(frames)
        self.page_tokens = page_tokens
        self.windows = tuple(WindowedFrames(*part) for part in windows)

    def _take(self, row: np.ndarray) -> np.ndarray:
        row = np.asarray(row, np.int32)
        if not self.windows:  # so there are no holes, here and in `ids`
            self.hold(indices(row))
            return self._frames.handles(row)
        names: np.ndarray = np.zeros(row.shape, np.uint32)
        names[row > 0] = self._frames.handles(row[row > 0])
        self.hold(given(row))
        return names

    def _share(self, pages: np.ndarray) -> None:
        self.hold(given(self.ids(pages)))

    def release(self, pages: np.ndarray) -> None:
        self.drop(given(self.ids(pages)))

    def _first_read(self, window: int, position: int) -> int:
        """The first page that a row reads which goes on at `position`."""
        return max(position - window + 1, 0) // self.page_tokens

    def readable(self, spans: Iterable[tuple[int, np.ndarray]], length: int) -> bool:
        if not self.windows:
            return True
        firsts = [self._first_read(window, length) for window, _ in self.windows]
        missing = self.num_pages(length)
        for start, pages in spans:
            if missing <= min(firsts):
                break
            first = start // self.page_tokens
            for read, (_, frames) in zip(firsts, self.windows, strict=True):
                if not pages[max(read - first, 0) : missing - first, frames].all():
                    return False
            missing = min(missing, first)
        return True

    def deepest(self, spans: Sequence[tuple[int, np.ndarray]], length: int, grain: int) -> int:
        if self.readable(spans, length):
            return length
        # What the nodes list, one below the other. A page that a boundary cuts has an entry in each of them.
        starts = np.array([start for start, _ in reversed(spans)])
        counts = np.array([len(pages) for _, pages in reversed(spans)])
        entries = np.concatenate([pages for _, pages in reversed(spans)])
        firsts, offsets = starts // self.page_tokens, np.cumsum(counts) - counts
        numbers = np.arange(len(entries)) + np.repeat(firsts - offsets, counts)
        # The pages after such a page follow its deepest entry.
        followed: np.ndarray = np.append(numbers[1:] > numbers[:-1], True)
        # A row that goes on at one of these reads up to this entry.
        ends = np.arange(grain, length + 1, grain)
        nodes = np.searchsorted(starts, ends) - 1
        last = offsets[nodes] + (ends - 1) // self.page_tokens - firsts[nodes]
        good: np.ndarray = np.ones(len(ends), bool)
        for window, frames in self.windows:
            there = entries[:, frames].all(axis=1)
            # Where the run of pages begins that are there down to an entry; if it is not there itself, after it.
            runs = np.maximum.accumulate(np.where(there, 0, numbers + 1)[followed])
            begins = np.where(there, np.append(0, runs)[numbers], numbers + 1)
            good &= begins[last] <= np.maximum(ends - window + 1, 0) // self.page_tokens
        return int(ends[good].max(initial=0))

    def given(self, pages: np.ndarray) -> np.ndarray:
        return given(pages)

    def read_from(self, position: int) -> int:
        pages = (self._first_read(window, position) for window, _ in self.windows)
        return min((page * self.page_tokens for page in pages), default=NOWHERE)

    def kept_from(self, row: np.ndarray) -> int:
        row = np.asarray(row)
        held = (np.flatnonzero(row[:, frames].any(axis=1))[:1] for _, frames in self.windows)
        pages = (int(first[0]) for first in held if first.size)
        return min((page * self.page_tokens for page in pages), default=NOWHERE)

    def mend(self, pages: np.ndarray, row: np.ndarray, start: int, end: int) -> np.ndarray:
        own = np.asarray(row[self.places(start, end)], np.int32)
        own = np.where(pages == 0, own, 0)
        return np.where(pages == 0, self._take(own), pages) if own.any() else pages

    def hollow(self, pages: np.ndarray, start: int, position: int) -> np.ndarray:
        gone = np.zeros_like(pages)
        for window, frames in self.windows:
            count = max(self._first_read(window, position) - start // self.page_tokens, 0)
            gone[:count, frames] = pages[:count, frames]
        if not gone.any():
            return pages
        self.release(gone)
        return pages - gone

    def _joined(self, upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        return np.concatenate((upper, lower))

    def only_ours(self, pages: np.ndarray) -> bool:
        frames = given(self.ids(pages))
        return bool((self._frames.holders_of(frames) == self._holds[frames]).any())

    def ids(self, pages: np.ndarray) -> np.ndarray:
        """Frame ids of a node's pages, as an index; 0 where it has none.

        Raises:
            StaleHandle: one of them was released since.
        """
        if not self.windows:
            return self._frames.resolve(pages)
        frames: np.ndarray = np.zeros(pages.shape, np.intp)
        frames[pages > 0] = self._frames.resolve(pages[pages > 0])
        return frames

    def loses(self, upper: np.ndarray, lower: np.ndarray, middle: int) -> bool:
        return (
            bool(self.windows)
            and self._cuts(middle)
            and bool(((lower[:1] == 0) & (upper[-1:] > 0)).any())
        )

    def _row(self, parts: Sequence[np.ndarray], length: int) -> np.ndarray:
        if not parts:
            return np.zeros((0, 0), np.int32)
        row: np.ndarray = self.ids(np.concatenate(parts)).astype(np.int32)
        for window, frames in self.windows:
            row[: self._first_read(window, length), frames] = SINK
        return row

    def check_invariants(self, listed: Sequence[np.ndarray]) -> None:
        hollow = {i for _, frames in self.windows for i in range(frames.start, frames.stop)}
        holes = {int(i) for pages in listed for i in np.flatnonzero(~pages.all(axis=0))}
        agree("radix", holes_in_frames_without_a_window=(holes - hollow, set()))
        found = Counter(frame for pages in listed for frame in given(self.ids(pages)).tolist())
        agree(
            "radix",
            page_holds=(self.as_dict(), found),
            page_frames=(self.num_frames, len(found)),
        )

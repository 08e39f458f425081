"""Pages whose frames of layers with a window may be missing: where a row gave them back, because nothing read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hybrid_jax.cache.pools.frames import SINK, FrameAllocator, given
from hybrid_jax.cache.pools.handles import MAX_ID
from hybrid_jax.cache.pools.pages import NOWHERE, PageHolds, PageStore, WindowedFrames


class WindowedPageHolds(PageHolds):
    """Pages held by tree nodes, where layers have windows.

    In what rows and nodes list, 0 stands where a frame was given back. The first page that a window reads may come from
    elsewhere with the tokens alone that the window sees. Then its frame is read by rows that go on from there on.

    Args:
        windows: which frames of a page belong to layers with a window, and how many tokens a query sees there.
    """

    def __init__(
        self, frames: FrameAllocator, page_tokens: int, windows: Iterable[tuple[int, slice]]
    ):
        super().__init__(frames, page_tokens)
        self.windows = tuple(WindowedFrames(*part) for part in windows)
        self._read_from: dict[int, int] = {}  # by handle, of frames without the tokens in front

    def _take(self, row: np.ndarray) -> np.ndarray:
        row = np.asarray(row, np.int32)
        names: np.ndarray = np.zeros(row.shape, np.uint32)
        names[row > 0] = self._frames.handles(row[row > 0])
        self.hold(given(row))
        return names

    def given(self, pages: np.ndarray) -> np.ndarray:
        return given(pages)

    def ids(self, pages: np.ndarray) -> np.ndarray:
        frames: np.ndarray = np.zeros(pages.shape, np.intp)
        frames[pages > 0] = self._frames.resolve(pages[pages > 0])
        return frames

    def _first_read(self, window: int, position: int) -> int:
        """The first page that a row reads which goes on at `position`."""
        return max(position - window + 1, 0) // self.page_tokens

    def readable(self, spans: Iterable[tuple[int, np.ndarray]], length: int) -> bool:
        firsts = [self._first_read(window, length) for window, _ in self.windows]
        missing = self.num_pages(length)
        for start, pages in spans:
            if missing <= min(firsts):
                break
            first = start // self.page_tokens
            for read, (_, frames) in zip(firsts, self.windows, strict=True):
                part = pages[max(read - first, 0) : missing - first, frames]
                if not part.all() or self._is_early(part, length):
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
        for end in reversed(ends[good].tolist()):
            if not self._read_from or self.readable([s for s in spans if s[0] < end], end):
                return end
        return 0

    def _is_early(self, pages: np.ndarray, position: int) -> bool:
        """Whether one of a node's pages lacks something that a row reads which goes on at `position`."""
        if not self._read_from:
            return False
        return any(self._read_from.get(name, 0) > position for name in pages.ravel().tolist())

    def lacking(self, row: np.ndarray, position: int) -> np.ndarray:
        row = np.asarray(row, np.int32)
        found: np.ndarray = np.zeros(row.shape, bool)
        for place in zip(*np.nonzero(row), strict=True) if self._read_from else ():
            found[place] = self._first_reader(int(row[place])) > position
        return found

    def lack_beginnings(self, frames: np.ndarray, position: int) -> None:
        known = {name: first for name, first in self._read_from.items() if self._is_held(name)}
        for name in self._frames.handles(given(frames)).tolist():
            known[name] = max(position, known.get(name, 0))
        self._read_from = known

    def _is_held(self, name: int) -> bool:
        frame = name & MAX_ID
        return self._frames.holders(frame) > 0 and self._frames.handles(frame) == name

    def copied(self, source: PageStore, frames: np.ndarray, into: np.ndarray) -> None:
        if not isinstance(source, WindowedPageHolds) or not source._read_from:
            return
        copies: dict[int, list[int]] = {}  # by the position from which they are read
        for frame, copy in zip(frames.ravel().tolist(), into.ravel().tolist(), strict=True):
            if frame and copy and (first := source._first_reader(frame)):
                copies.setdefault(first, []).append(copy)
        for first, alike in copies.items():
            self.lack_beginnings(np.array(alike), first)

    def _first_reader(self, frame: int) -> int:
        """From which position on rows go on that may read a frame; 0 for any."""
        return self._read_from.get(int(self._frames.handles(frame)), 0)

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
        own = np.where((pages == 0) | self._has_more(own, pages), own, 0)
        if not own.any():
            return pages
        taken = self._take(own)
        self.release(np.where(own > 0, pages, 0))
        return np.where(own > 0, taken, pages)

    def _has_more(self, own: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Where the frames of a row may be read by rows for which those of a node lack something: bool like both."""
        found: np.ndarray = np.zeros(pages.shape, bool)
        for place in zip(*np.nonzero(own), strict=True) if self._read_from else ():
            first = self._read_from.get(int(pages[place]), 0)
            found[place] = first > self._first_reader(int(own[place]))
        return found

    def hollow(self, pages: np.ndarray, start: int, position: int) -> np.ndarray:
        gone = np.zeros_like(pages)
        for window, frames in self.windows:
            count = max(self._first_read(window, position) - start // self.page_tokens, 0)
            gone[:count, frames] = pages[:count, frames]
        if not gone.any():
            return pages
        self.release(gone)
        return pages - gone

    def loses(self, upper: np.ndarray, lower: np.ndarray, middle: int) -> bool:
        return self._cuts(middle) and bool(((lower[:1] == 0) & (upper[-1:] > 0)).any())

    def _row(self, parts: Sequence[np.ndarray], length: int) -> np.ndarray:
        row = super()._row(parts, length)
        if parts:
            for window, frames in self.windows:
                row[: self._first_read(window, length), frames] = SINK
        return row


def page_holds(
    frames: FrameAllocator, page_tokens: int, windows: Iterable[tuple[int, slice]] = ()
) -> PageHolds:
    """What holds the pages of a tree: with holes where some layers have windows, as for `WindowedPageHolds`."""
    windows = tuple(windows)
    if not windows:
        return PageHolds(frames, page_tokens)
    return WindowedPageHolds(frames, page_tokens, windows)

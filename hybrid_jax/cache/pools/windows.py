"""Pages whose frames of layers with a window may be missing: where a row gave them back, because nothing read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hybrid_jax.cache.pools.frames import SINK, FrameAllocator, given
from hybrid_jax.cache.pools.pages import NOWHERE, PageHolds, WindowedFrames


class WindowedPageHolds(PageHolds):
    """Pages held by tree nodes, where layers have windows.

    In what rows and nodes list, 0 stands where a frame was given back.

    Args:
        windows: which frames of a page belong to layers with a window, and how many tokens a query sees there.
    """

    def __init__(
        self, frames: FrameAllocator, page_tokens: int, windows: Iterable[tuple[int, slice]]
    ):
        super().__init__(frames, page_tokens)
        self.windows = tuple(WindowedFrames(*part) for part in windows)

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

"""The free list of the arena: equal frames with counted holders."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from hybrid_jax.cache.pools import handles
from hybrid_jax.cache.pools.recount import agree

SINK = 0  # padding writes here, nothing reads it; never allocated
ONE = np.int32(1)  # of the counts' own type: ufunc.at takes four times as long with another


class OutOfFrames(RuntimeError):
    """Not enough free frames; the call that raised it changed nothing."""


class FrameAllocator:
    """Hands out frame ids 1 .. num_frames - 1, last released first.

    A frame starts with one holder; `retain` adds holders, `release` drops one, and the last one to let go
    returns it to the free list under a new generation. Frames come and go as int32 arrays: a prompt has
    hundreds of pages. As indices they are made intp once: numpy takes five times as long with others.

    Example:
        >>> frames = FrameAllocator(4)
        >>> pages = frames.allocate(2)
        >>> pages.tolist(), frames.num_free
        ([1, 2], 1)
        >>> frames.release(pages)
        >>> frames.num_free
        3
    """

    def __init__(self, num_frames: int):
        if not 2 <= num_frames <= handles.MAX_ID + 1:
            raise ValueError(
                f"FrameAllocator: num_frames must be between 2 and {handles.MAX_ID + 1} "
                f"(frame 0 is the sink), got {num_frames}; raise memory"
            )
        self.num_frames = num_frames
        self._free: np.ndarray = np.arange(num_frames - 1, SINK, -1, dtype=np.int32)  # a stack
        self.num_free = num_frames - 1  # its height
        # The last stands for no frame.
        self._holders: np.ndarray = np.zeros(num_frames + 1, np.int32)
        # A free frame has the handle it will have next, without its id. So no handle that was given out equals it.
        self._handles: np.ndarray = np.full(
            num_frames, handles.pack(handles.FRAME, 0, 0), np.uint32
        )
        self._handles[SINK] = handles.ID_BITS  # equals no frame's handle

    @property
    def num_held(self) -> int:
        """Frames that somebody holds; the sink does not count."""
        return self.num_frames - 1 - self.num_free

    def holders(self, frame: int) -> int:
        """How many hold this frame; 0 when it is free."""
        return int(self._holders[frame])

    def holders_of(self, frames: np.ndarray) -> np.ndarray:
        """How many hold each of these frames."""
        return self._holders[indices(frames)]

    def allocate(self, count: int) -> np.ndarray:
        """`count` frames with one holder each, which is the caller: int32[count].

        Raises:
            OutOfFrames: fewer are free; nothing was taken.
            ValueError: the count is negative.
        """
        if count < 0:
            raise ValueError(f"FrameAllocator: count must be at least 0, got {count}")
        if count > self.num_free:
            raise OutOfFrames(
                f"OutOfFrames: needs {count} frames, {self.num_free} of {self.num_frames - 1} free; "
                f"lower max_rows or raise memory"
            )
        taken = self._free[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        if count == 1:  # a row that grows by a page: as a number it takes a third of the time
            frame: int = taken.item()
            self._holders[frame] = 1
            self._handles[frame] = self._handles.item(frame) | frame
            return taken
        frames = indices(taken)
        self._holders[frames] = 1
        self._handles[frames] |= taken.view(np.uint32)
        return taken

    def claim(self, frames: npt.ArrayLike) -> None:
        """Takes these frames with one holder each, which is the caller; none is listed twice.

        Raises:
            ValueError: one of them is not free; nothing was taken.
        """
        frames = indices(frames)
        free = self._free[: self.num_free]
        left = free[~np.isin(free, frames)]
        if len(left) + len(frames) != len(free):
            raise ValueError("FrameAllocator: cannot claim frames that are not free")
        self._free[: len(left)] = left
        self.num_free = len(left)
        self._holders[frames] = 1
        self._handles[frames] |= frames.astype(np.uint32)

    def retain(self, frames: npt.ArrayLike) -> None:
        """Adds one holder to each frame; none is listed twice."""
        frames = indices(frames)
        self._holders[frames] = self._require_held(frames, "retain") + ONE

    def release(self, frames: npt.ArrayLike) -> None:
        """Drops one holder of each frame; none is listed twice. Raises before changing anything."""
        frames = indices(frames)
        left = self._require_held(frames, "release") - ONE
        self._holders[frames] = left
        num_left = np.count_nonzero(left)
        if num_left < len(left):
            self._put_back(frames[left == 0] if num_left else frames)

    def _put_back(self, frames: np.ndarray) -> None:
        """Puts frames on the free list, with the handles of their next lives but without the ids."""
        self._handles[frames] = handles.next_lives(self._handles[frames])
        self._free[self.num_free : self.num_free + frames.size] = frames
        self.num_free += frames.size

    def _require_held(self, frames: np.ndarray, action: str) -> np.ndarray:
        """Holders of each frame, all at least 1."""
        # What is no frame is clipped to the first or last entry, which nobody holds.
        held: np.ndarray = self._holders.take(frames, mode="clip")
        if np.count_nonzero(held) == len(held):
            return held
        frame = next(f for f in frames.tolist() if not self._is_held(f))
        raise ValueError(
            f"FrameAllocator: cannot {action} frame {frame}, nobody holds it "
            f"(frames are 1 .. {self.num_frames - 1})"
        )

    def _is_held(self, frame: int) -> bool:
        return SINK < frame < self.num_frames and bool(self._holders[frame])

    def handles(self, frames: npt.ArrayLike) -> np.ndarray:
        """Handles of held frames: uint32, in the shape that came."""
        frames = np.asarray(frames, np.intp)
        self._require_held(frames.reshape(-1), "name")
        return self._handles[frames]

    def resolve(self, names: npt.ArrayLike) -> np.ndarray:
        """The frame ids behind handles: intp, in the shape that came.

        Raises:
            StaleHandle: a frame was released since its handle was made, or never had it.
            ValueError: a name is not a handle.
        """
        names = handles.as_handles(names, handles.FRAME)
        frames = (names & handles.ID_BITS).astype(np.intp)
        valid = self._handles.take(frames, mode="clip") == names
        if np.count_nonzero(valid) < valid.size:
            name = int(names.reshape(-1)[valid.reshape(-1).argmin()])
            frame = name & handles.MAX_ID
            present = int(self._handles[frame]) if frame < self.num_frames else 0
            raise handles.stale(name, handles.FRAME, handles.unpack(present)[1])
        return frames

    def check_invariants(self) -> None:
        """Recounts the free list; raises AssertionError with both numbers when they differ."""
        held, frames = self._holders[1:-1], np.arange(1, self.num_frames)
        kinds, _, ids = handles.unpack(self._handles[1:])
        own_ids = np.where(held > 0, frames, 0)
        agree(
            "frames",
            free_frames=(
                Counter(self._free[: self.num_free].tolist()),
                dict.fromkeys(frames[held == 0].tolist(), 1),
            ),
            holders_below_0=(frames[held < 0].tolist(), []),
            holders_of_the_sink_and_of_no_frame=(self._holders[[SINK, -1]].tolist(), [0, 0]),
            kinds_of_names=(set(kinds.tolist()), {handles.FRAME}),
            ids_of_names=(dict(enumerate(ids.tolist(), 1)), dict(enumerate(own_ids.tolist(), 1))),
        )

    def __repr__(self) -> str:
        return f"FrameAllocator({self.num_held} of {self.num_frames - 1} frames held)"


def indices(frames: npt.ArrayLike) -> np.ndarray:
    """Frame ids as an index: intp[n]."""
    return np.asarray(frames, np.intp).reshape(-1)


def given(pages: npt.ArrayLike) -> np.ndarray:
    """The frames of pages as an index: intp[n]; without the zeros, which stand where a frame was given back."""
    frames = indices(pages)
    return frames if frames.all() else frames[frames != SINK]

"""The free list of the arena: equal frames with counted holders."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_jax.cache import handles

SINK = 0  # padding writes here, nothing reads it; never allocated


class OutOfFrames(RuntimeError):
    """Not enough free frames; the call that raised it changed nothing."""


class FrameAllocator:
    """Hands out frame ids 1 .. num_frames - 1, last released first.

    A frame starts with one holder; `retain` adds holders, `release` drops one, and the last one to let go
    returns it to the free list under a new generation.

    Example:
        >>> frames = FrameAllocator(4)
        >>> pages = frames.allocate(2)
        >>> pages, frames.num_free
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
        self._free = list(range(num_frames - 1, SINK, -1))
        self._holders = [0] * num_frames
        self._generation = bytearray(num_frames)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_frames - 1 - len(self._free)

    def holders(self, frame: int) -> int:
        """How many hold this frame; 0 when it is free."""
        return self._holders[frame]

    def allocate(self, count: int) -> list[int]:
        """`count` frames with one holder each, which is the caller.

        Raises:
            OutOfFrames: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfFrames(
                f"OutOfFrames: needs {count} frames, {len(self._free)} of {self.num_frames - 1} free; "
                f"lower max_rows or raise memory"
            )
        if count == 0:
            return []
        taken = self._free[-count:]
        taken.reverse()
        del self._free[-count:]
        for frame in taken:
            self._holders[frame] = 1
        return taken

    def retain(self, frames: Iterable[int]) -> None:
        """Adds one holder to each frame."""
        frames = tuple(frames)
        self._require_held(frames, "retain")
        for frame in frames:
            self._holders[frame] += 1

    def release(self, frames: Iterable[int]) -> None:
        """Drops one holder of each frame; takes the caller's hold away. Raises before changing anything."""
        frames = tuple(frames)
        self._require_held(frames, "release")
        for frame in frames:
            self._holders[frame] -= 1
            if self._holders[frame] == 0:
                self._generation[frame] = (self._generation[frame] + 1) % handles.NUM_GENERATIONS
                self._free.append(frame)

    def _require_held(self, frames: tuple[int, ...], action: str) -> None:
        for frame in frames:
            if not 0 < frame < self.num_frames or self._holders[frame] == 0:
                raise ValueError(
                    f"FrameAllocator: cannot {action} frame {frame}, nobody holds it "
                    f"(frames are 1 .. {self.num_frames - 1})"
                )
        if action == "release" and len(set(frames)) < len(frames):
            for frame in set(frames):
                if frames.count(frame) > self._holders[frame]:
                    raise ValueError(
                        f"FrameAllocator: cannot release frame {frame} {frames.count(frame)} times, "
                        f"{self._holders[frame]} hold it"
                    )

    def handle(self, frame: int) -> int:
        """The handle of a held frame."""
        self._require_held((frame,), "name")
        return handles.pack(handles.FRAME, self._generation[frame], frame)

    def resolve(self, handle: int) -> int:
        """The frame id behind a handle.

        Raises:
            StaleHandle: the frame was released since the handle was made.
        """
        frame = handle & handles.MAX_ID
        generation = self._generation[frame] if frame < self.num_frames else 0
        if handle != handles.pack(handles.FRAME, generation, frame) or not self._holders[frame]:
            raise handles.stale(handle, handles.FRAME, generation)
        return frame

    def check_invariants(self) -> None:
        """Recounts the free list; raises AssertionError with both numbers when they differ."""
        free = set(self._free)
        assert len(free) == len(self._free), (
            f"frames: {len(self._free)} entries in the free list, {len(free)} different"
        )
        unheld = {frame for frame in range(1, self.num_frames) if self._holders[frame] == 0}
        assert free == unheld, (
            f"frames: {len(free)} in the free list, {len(unheld)} without holders"
        )
        assert SINK not in free and self._holders[SINK] == 0, "frames: the sink was handed out"

    def __repr__(self) -> str:
        return f"FrameAllocator({self.num_held} of {self.num_frames - 1} frames held)"

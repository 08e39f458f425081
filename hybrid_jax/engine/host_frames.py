"""Frames in the host's memory: what the arena has given away and may have back.

Each frame is an array of its own, which a program makes and another one reads. So nothing is copied on the host, no
large array is made anew, and the order of programs is the order in which frames are read and written.
"""

from __future__ import annotations

import jax
import numpy as np

from hybrid_jax.engine.programs.programs import Programs
from hybrid_jax.schedule.bucket import COPIED_FRAMES
from hybrid_jax.schedule.plan import Transfer
from hybrid_jax.state import State


class HostFrames:
    """The frames of a tier in the host's memory.

    Args:
        programs: that copy.

    Attributes:
        frames: uint32[words of a frame] by number; those that were never saved are not there.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self.frames: dict[int, jax.Array] = {}

    def save(self, state: State, transfer: Transfer) -> None:
        """Copies frames out of the arena. The call returns before they are copied."""
        run = self._programs.get("save_frames")
        for begin in range(0, len(transfer.arena), COPIED_FRAMES):
            targets = transfer.other[begin : begin + COPIED_FRAMES].tolist()
            made = run(state, _padded(transfer.arena[begin : begin + COPIED_FRAMES]))
            self.frames |= zip(targets, made[: len(targets)], strict=True)

    def load(self, state: State, transfer: Transfer) -> State:
        """Copies frames into the arena, and returns the state with them."""
        run = self._programs.get("load_frames")
        for begin in range(0, len(transfer.arena), COPIED_FRAMES):
            words = [self.frames[n] for n in transfer.other[begin : begin + COPIED_FRAMES].tolist()]
            words += words[:1] * (COPIED_FRAMES - len(words))
            state = run(state, _padded(transfer.arena[begin : begin + COPIED_FRAMES]), *words)
        return state

    def clear(self) -> None:
        """Frees all of it."""
        self.frames.clear()


def _padded(frames: np.ndarray) -> np.ndarray:
    """Frames of the arena as int32[COPIED_FRAMES]; 0 is the sink."""
    return np.pad(frames, (0, COPIED_FRAMES - len(frames)))

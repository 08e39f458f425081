"""Copies of frames out of the arena and back, and those that the host's memory keeps.

Each frame is an array of its own, which a program makes and another one reads. So nothing is copied on the host, no
large array is made anew, and the order of programs is the order in which frames are read and written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import numpy as np

from hybrid_jax.cache.tree.node import HOSTS_MEMORY
from hybrid_jax.engine.programs.programs import Programs
from hybrid_jax.schedule.bucket import COPIED_FRAMES
from hybrid_jax.schedule.plan import Transfer
from hybrid_jax.schedule.tiers.speeds import Speeds
from hybrid_jax.state import State


def copy_out(programs: Programs, state: State, frames: np.ndarray) -> list[jax.Array]:
    """Copies of frames int32[n], each an array uint32[frame_words]. The call returns before they are made."""
    run, copies = programs.get("save_frames"), []
    for begin in range(0, len(frames), COPIED_FRAMES):
        copies += run(state, _padded(frames[begin : begin + COPIED_FRAMES]))
    return copies[: len(frames)]


def copy_in(
    programs: Programs, state: State, frames: np.ndarray, words: Sequence[jax.Array | np.ndarray]
) -> State:
    """Writes n arrays uint32[frame_words] to frames int32[n], and returns the state with them."""
    run = programs.get("load_frames")
    for begin in range(0, len(frames), COPIED_FRAMES):
        some = list(words[begin : begin + COPIED_FRAMES])
        some += some[:1] * (COPIED_FRAMES - len(some))
        state = run(state, _padded(frames[begin : begin + COPIED_FRAMES]), *some)
    return state


class HostFrames:
    """The frames of a tier in the host's memory.

    Args:
        programs: that copy.

    Attributes:
        frames: uint32[words of a frame] by number; those that were never saved are not there.
        speeds: are told how long a copy takes when they ask; None to time nothing.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self.frames: dict[int, jax.Array] = {}
        self.speeds: Speeds | None = None

    def save(self, state: State, transfer: Transfer) -> None:
        """Copies frames out of the arena. The call returns before they are copied."""
        made = copy_out(self._programs, state, transfer.arena)
        self.frames |= zip(transfer.other.tolist(), made, strict=True)

    def load(self, state: State, transfer: Transfer) -> State:
        """Copies frames into the arena, and returns the state with them."""
        words = [self.frames[number] for number in transfer.other.tolist()]
        if self.speeds is None or not self.speeds.take_due():
            return copy_in(self._programs, state, transfer.arena, words)
        jax.block_until_ready((state, words))
        begun = time.perf_counter()
        state = jax.block_until_ready(copy_in(self._programs, state, transfer.arena, words))
        num_bytes = sum(word.nbytes for word in words)
        self.speeds.loaded(HOSTS_MEMORY, num_bytes, time.perf_counter() - begun)
        return state

    def clear(self) -> None:
        """Frees all of it."""
        self.frames.clear()


def _padded(frames: np.ndarray) -> np.ndarray:
    """Frames of the arena as int32[COPIED_FRAMES]; 0 is the sink."""
    return np.pad(frames, (0, COPIED_FRAMES - len(frames)))

"""Frames of the simulated device as words, so that a real folder can keep them, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hybrid_jax.geometry import Geometry, KVPlace, NarrowForm, NarrowPart
from tests.schedule.simulated_device import EMPTY, Frame, SimulatedDevice, extend

TOKEN_WORDS = 3  # of an entry: the layer group and one more, and two words of the summary
STATE_WORDS = 64
FRAME_WORDS = 32 * TOKEN_WORDS  # pages have at most 32 tokens
STATE = 0xFFFFFFFF  # begins a checkpoint's frame


def storable(geometry: Geometry) -> Geometry:
    """The same with places for words: what a page's frame holds of a token, and a checkpoint's first words."""
    assert geometry.page_tokens * TOKEN_WORDS <= FRAME_WORDS, geometry.page_tokens
    places = [
        KVPlace(frame=frame, offset=0, token_words=TOKEN_WORDS)
        for frame in range(geometry.frames_per_page)
    ]
    narrow = geometry.narrow
    if narrow is not None:
        parts = (NarrowPart(states=STATE_WORDS, scales=0, columns=0),)
        narrow = NarrowForm(num_frames=narrow.num_frames, parts=parts)
    return replace(geometry, frame_words=FRAME_WORDS, kv=tuple(places), narrow=narrow)


class StoringDevice(SimulatedDevice):
    """Gives the disk words, as a real device does, and can check what a tier holds without a row that reads it."""

    def stored(self, frame: Frame) -> np.ndarray:
        words: np.ndarray = np.zeros(FRAME_WORDS, np.uint32)
        if frame.state is not None:
            summary, part, narrow = frame.state
            words[:5] = STATE, *_split(summary), part, narrow
        for index, summary in enumerate(frame.summaries):
            if summary is not None:
                begin = index * TOKEN_WORDS
                words[begin : begin + TOKEN_WORDS] = frame.group + 1, *_split(summary)
        return words

    def restored(self, words: np.ndarray) -> Frame:
        found = words.tolist()
        if found[0] == STATE:
            return Frame(state=(_joined(found[1:3]), found[3], bool(found[4])))
        size = self.geometry.page_tokens
        entries = [found[n * TOKEN_WORDS : (n + 1) * TOKEN_WORDS] for n in range(size)]
        groups = {entry[0] - 1 for entry in entries if entry[0]}
        assert len(groups) <= 1, f"a frame with tokens of the layer groups {groups}"
        summaries = [_joined(entry[1:]) if entry[0] else None for entry in entries]
        return Frame(group=groups.pop() if groups else -1, summaries=summaries)

    def check_entry(
        self,
        tokens: Sequence[int],
        pages: np.ndarray,
        states: Sequence[int],
        *,
        below: bool,
        wide: bool,
    ) -> None:
        """Checks that frames hold what a row reads that goes on after these tokens.

        Args:
            pages: int32[n, frames_per_page]. states: frames of the checkpoint. below: they are frames of the host's
                memory. wide: the checkpoint has the form of rows.
        """  # fmt: skip
        true = summaries_of(tokens)
        arena, frames = self.frames, self.below if below else self.frames
        self.frames = frames  # ty: ignore
        try:
            self._check_pages(pages, len(tokens), true, len(tokens))
        finally:
            self.frames = arena
        found = [frames[frame].state for frame in states]
        wanted = [(true[-1], part, not wide) for part in range(len(states))]
        assert found == wanted, f"a checkpoint after {len(tokens)} tokens holds {found}"


def summaries_of(tokens: Sequence[int]) -> list[int]:
    """Of all prefixes, the empty one first."""
    found = [EMPTY]
    for token in tokens:
        found.append(extend(found[-1], token))
    return found


def _split(summary: int) -> tuple[int, int]:
    return summary & 0xFFFFFFFF, summary >> 32


def _joined(words: Sequence[int]) -> int:
    low, high = words
    return low | high << 32

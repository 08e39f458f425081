"""How short memory is, and of what: a status that follows what running sequences hold."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

LOG_LENGTH = 128  # latest transitions that are kept
SETTLES_AFTER = 64  # operations without another move


class MemoryStatus(StrEnum):
    """Which kind of memory is short, if one is.

    Attributes:
        BALANCED: what is asked for can be had.
        KV_PRESSURED, STATE_PRESSURED: running sequences, and the one that waits in front for memory, leave less than
            the low watermark to be had (free, or only cached), and pages, or checkpoints, are most of what these
            hold and ask for.
        REBALANCING: enough can be had, and evictions lately moved as much as lies between the watermarks from one
            kind to the other, back and forth not counted.
    """

    BALANCED = "BALANCED"
    KV_PRESSURED = "KV_PRESSURED"
    STATE_PRESSURED = "STATE_PRESSURED"
    REBALANCING = "REBALANCING"


Frames = tuple[int, int]  # of pages, of checkpoints
PRESSURED = (MemoryStatus.KV_PRESSURED, MemoryStatus.STATE_PRESSURED)


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A change of status.

    Attributes:
        operation: of the pressure's counter, at which it came.
        before, after: what it was and is.
        page_frames, checkpoint_frames: frames that running sequences held then.
    """

    operation: int
    before: MemoryStatus
    after: MemoryStatus
    page_frames: int
    checkpoint_frames: int


class Pressure:
    """The status of one engine's memory, and a log of how it changed.

    Time is a counter of operations: sequences taking frames or giving them back. The same requests give the same log.

    Args:
        num_frames: that can be handed out.
        watermarks: shares of them. Pressure begins where less than the low one can be had, and ends where the high one
            can. While it lasts, the kind it is named after changes only if the other leads by more than lies
            between the two.

    Attributes:
        low, high: the watermarks in frames.
        operations: so far.
        num_transitions: so far; `log` holds the latest.
        peak_frames: most frames that running sequences ever held.
        rebalanced_frames: frames of evicted entries that the other kind took.
        evicted_page_frames, evicted_checkpoint_frames: that were given away.
        shortages: times that not even the whole cache could make enough room, for a sequence that runs or waits.
    """

    def __init__(self, num_frames: int, watermarks: tuple[float, float]):
        self.num_frames = num_frames
        self.low, self.high = (math.ceil(share * num_frames) for share in watermarks)
        self.status = MemoryStatus.BALANCED
        self.operations = self.num_transitions = 0
        self.peak_frames = self.rebalanced_frames = self.shortages = 0
        self.evicted_page_frames = self.evicted_checkpoint_frames = 0
        self.log: deque[Transition] = deque(maxlen=LOG_LENGTH)
        self._last_move = -SETTLES_AFTER
        # Frames that went to checkpoints and did not come back, since the last move.
        self._drift = 0
        self._wanted: Frames = (0, 0)

    def observe(self, page_frames: int, checkpoint_frames: int) -> None:
        """One operation happened; running sequences now hold so many frames of each kind."""
        self.operations += 1
        held = page_frames + checkpoint_frames
        if held > self.peak_frames:
            self.peak_frames = held
        pages, checkpoints = self._wanted
        wanted, lead = pages + checkpoints, page_frames + pages - checkpoint_frames - checkpoints
        status = self.status
        if self.num_frames - held - wanted < (self.high if status in PRESSURED else self.low):
            status = self._of_kind(lead)
        elif self.operations - self._last_move < SETTLES_AFTER:
            status = MemoryStatus.REBALANCING
        else:
            status = MemoryStatus.BALANCED
        if status is not self.status:
            self.log.append(
                Transition(
                    operation=self.operations,
                    before=self.status,
                    after=status,
                    page_frames=page_frames,
                    checkpoint_frames=checkpoint_frames,
                )
            )
            self.num_transitions += 1
            self.status = status

    def _of_kind(self, lead: int) -> MemoryStatus:
        """Which kind is short, by how many frames more of pages than of checkpoints are held."""
        if self.status in PRESSURED and abs(lead) <= self.high - self.low:
            return self.status
        return MemoryStatus.KV_PRESSURED if lead > 0 else MemoryStatus.STATE_PRESSURED

    def refused(self, asked: Frames, page_frames: int, checkpoint_frames: int) -> None:
        """A sequence that waits asked in vain, while others hold so many frames; counts as an operation.

        Until `admitted`, status sees what it asked for as held.
        """
        self.shortages += 1
        self._wanted = asked
        self.observe(page_frames, checkpoint_frames)

    def admitted(self) -> None:
        """The sequence in front of the queue has got what it asked for, or is gone."""
        self._wanted = (0, 0)

    def evicted(self, *, asked: Frames, gave: Frames, enough: bool) -> None:
        """Entries were evicted because free frames did not do.

        Args:
            asked: what had to be free. gave: what the entries held.
            enough: it was had in the end.
        """
        self.evicted_page_frames += gave[0]
        self.evicted_checkpoint_frames += gave[1]
        self.shortages += not enough
        if not enough:
            return
        # What one kind gave beyond its own need, as far as the other had not enough of its own.
        to_checkpoints = max(0, min(asked[1] - gave[1], gave[0] - asked[0]))
        to_pages = max(0, min(asked[0] - gave[0], gave[1] - asked[1]))
        self.rebalanced_frames += to_checkpoints + to_pages
        self._drift += to_checkpoints - to_pages
        if abs(self._drift) >= max(1, self.high - self.low):
            self._drift, self._last_move = 0, self.operations

    def report(self) -> dict[str, Any]:
        """The status, and how it came about; plain data."""
        return {"memory_status": self.status, "memory_log": [asdict(entry) for entry in self.log]}

    def stats(self) -> dict[str, int]:
        """Counts, and the watermarks in frames."""
        return {
            "memory_low_watermark": self.low,
            "memory_high_watermark": self.high,
            "memory_operations": self.operations,
            "memory_shortages": self.shortages,
            "evicted_page_frames": self.evicted_page_frames,
            "evicted_checkpoint_frames": self.evicted_checkpoint_frames,
            "rebalanced_frames": self.rebalanced_frames,
            "peak_live_frames": self.peak_frames,
            "memory_transitions": self.num_transitions,
        }

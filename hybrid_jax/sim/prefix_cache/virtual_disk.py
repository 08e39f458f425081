"""The tier on disk on virtual time: names, sizes and times of use in place of files.

What there is, what is to be written and read, and what goes when the disk is full, is decided by the classes of an
engine. Writing and reading take as long as a `DeviceModel` says, one job after the other, and neither holds up the
other.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_jax.byte_sizes import at_least
from hybrid_jax.costs import Costs
from hybrid_jax.geometry import Geometry
from hybrid_jax.sim.prefix_cache.timing import DeviceModel
from hybrid_jax.tiers import parcel
from hybrid_jax.tiers.chain import RUN_TOKENS, Chain, root_of, run_begin
from hybrid_jax.tiers.disk import Prefixes, Read, Save, checkpoint_name, pages_name
from hybrid_jax.tiers.folder import Parts, Stored, remove_oldest
from hybrid_jax.tiers.parcel import FramePlace, Frames

NOTHING: np.ndarray = np.zeros(0, np.uint32)  # in place of a frame


class VirtualFolder(Parts):
    """Parts of which only names, sizes and times of use are kept.

    Args:
        limit: bytes that all parts together may have.

    Attributes:
        now: virtual seconds.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(root_of(), limit)
        self.now = 0.0
        self._stored: dict[str, Stored] = {}

    def write(self, name: str, num_bytes: int) -> int:
        """Keeps a part, for which others go if there is no room; returns its bytes, 0 if it is there already."""
        if name in self:
            return 0
        self.make_room(num_bytes)
        self._stored[name] = Stored(Path(name), num_bytes, self._newest())
        self._add(name, num_bytes)
        return num_bytes

    def now_s(self) -> float:
        return self.now

    def _use(self, name: str, when: float) -> None:
        if name in self:
            self._stored[name] = self._stored[name]._replace(used=when)

    def _prune(self, limit: int) -> None:
        remove_oldest(self._stored.values(), limit, lambda stored: self._remove(stored.path.name))

    def _remove(self, name: str) -> None:
        del self._stored[name]
        self._forget(name)


@dataclass(eq=False)
class VirtualRead(Read):
    """A prefix on its way from the disk. Nobody waits for it: time goes on when there is nothing else to do."""

    def wait(self, timeout: float) -> bool:
        return self.done


class VirtualDisk(Prefixes):
    """The tier on disk of a simulated engine.

    A part has the bytes of its arrays; the header of a file, some hundred bytes, is left out.

    Args:
        geometry: the engine's.
        costs: bytes of a token and of a checkpoint, as the cache has them.
        limit: bytes that all parts together may have.
        device: rates of reading and writing.

    Attributes:
        read_s, written_s: seconds of reading and of writing so far.

    Raises:
        ValueError: there is not room for a checkpoint and a run of pages.
    """

    folder: VirtualFolder

    def __init__(self, geometry: Geometry, costs: Costs, limit: int, device: DeviceModel) -> None:
        least = costs.prefix_bytes(RUN_TOKENS)
        if limit < least:
            raise ValueError(
                f"simulate: disk memory must hold a checkpoint and {RUN_TOKENS} tokens, {at_least(least, limit)}"
            )
        super().__init__(VirtualFolder(limit), geometry)
        self._costs, self._device = costs, device
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []  # (when done, number, what)
        self._numbers = itertools.count()
        self._reads_until = self._writes_until = self.read_s = self.written_s = 0.0

    @property
    def next_s(self) -> float | None:
        """When the next job is done; None if there is none."""
        return self._jobs[0][0] if self._jobs else None

    def advance(self, now: float) -> None:
        """It is now so late: what is done by then is there."""
        while self._jobs and self._jobs[0][0] <= now:
            self.folder.now, _, job = heapq.heappop(self._jobs)
            job()
        self.folder.now = now

    def wait_for_room(self, timeout: float) -> None:
        """Does not wait, for a simulator moves the time."""

    def save(self, save: Save, copies: Sequence[Any]) -> None:
        chain, position, num_frames = save.chain, save.position, len(copies)
        parts = self._sizes(chain, save.ends, position)
        taken = self._device.write_seconds(sum(parts.values()))
        self.written_s += taken
        self._writes_until = max(self._writes_until, self.folder.now) + taken
        waiting_bytes = num_frames * self.geometry.frame_bytes
        self._hand_over(save, waiting_bytes)

        def done() -> None:
            written = sum(self.folder.write(name, size) for name, size in parts.items())
            self.touch(chain, position)
            self.counters.saves += 1
            self.counters.saved_bytes += written
            self._handed_over(save, waiting_bytes)

        heapq.heappush(self._jobs, (self._writes_until, next(self._numbers), done))

    def read(self, chain: Chain, position: int, places: Sequence[FramePlace]) -> Read:
        geometry, ends = self.geometry, self._ends_with(position, places)
        parts = self._sizes(chain, ends, position if parcel.needs_checkpoint(geometry) else None)
        states: np.ndarray = np.zeros((geometry.cached_state_frames, 0), np.uint32)
        frames = Frames(dict.fromkeys(places, NOTHING), states if geometry.has_state else None)
        found = VirtualRead(position, frames)
        taken = self._device.read_seconds(sum(parts.values()))
        self.read_s += taken
        self._reads_until = max(self._reads_until, self.folder.now) + taken

        def done() -> None:
            if all(name in self.folder for name in parts):
                found.add(sum(parts.values()))
                self.touch(chain, position)
            else:
                found.fail()
                self.counters.loads_failed += 1
            found.finish()
            found.seconds = taken

        heapq.heappush(self._jobs, (self._reads_until, next(self._numbers), done))
        return found

    def _sizes(self, chain: Chain, ends: Sequence[int], position: int | None) -> dict[str, int]:
        """Bytes by name of runs of pages, and of the checkpoint at `position`."""
        token = self._costs.kv_bytes
        sizes = {pages_name(chain, end): (end - run_begin(end)) * token for end in ends}
        if position is not None:
            sizes[checkpoint_name(chain, position)] = self._costs.checkpoint_bytes
        return sizes

"""Prefixes on their way from engines that compute prompts to engines that go on from them.

It is a tier like the one on disk, but in memory, and it has only what was promised. The engine that goes on waits for
what is promised to it, and takes it into its own cache. A prefix comes in the same parts as on disk, so the two engines
may differ in page size, rows, grain and number of devices. Pages come while later chunks are computed. The checkpoint
comes last. Until it is there nothing of the prefix is seen, so nobody half arrives.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_jax.geometry import Geometry
from hybrid_jax.tiers.chain import Chain, pages_are_in_runs, runs_to
from hybrid_jax.tiers.disk import (
    Disk,
    Read,
    Save,
    checkpoint_name,
    page_marks,
    pages_name,
    pages_of,
)
from hybrid_jax.tiers.folder import Parts
from hybrid_jax.tiers.form import Form
from hybrid_jax.tiers.parcel import FramePlace, Frames, Pieces
from hybrid_jax.tiers.part_file import Part


@dataclass(frozen=True, kw_only=True)
class FramesPart(Part):
    """A part on its way between arenas that are alike: its frames, as programs of the first one have copied them.

    Attributes:
        frames: arrays of jax, uint32[frame_words].
    """

    marks: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    frames: Frames

    @property
    def num_bytes(self) -> int:
        """Of its frames."""
        return sum(words.nbytes for words in self.frames.words(self.frames.pages))


class ArenaFrames(Frames):
    """Frames that go on as they are."""


# Bytes of frames on their way, which on a card are in pinned memory: more go as parts, which any memory of the host
# holds.
MOST_PINNED = 8 << 30
NO_LIMIT = 1 << 62  # bytes: parts are kept as long as somebody has promised them, and no longer


class MemoryParts(Parts):
    """Parts in memory, in place of a folder on disk.

    Args:
        root: of the parts.
        needs: whether somebody needs a part still. One that came too late is not kept.
        came: called with each part that has come.
    """

    path = Path("memory")

    def __init__(
        self,
        root: str,
        needs: Callable[[str], bool] = lambda name: True,
        came: Callable[[str, Part], object] = lambda name, part: None,
    ) -> None:
        super().__init__(root, NO_LIMIT)
        self._needs, self._came = needs, came
        self._parts: dict[str, Part] = {}

    def write(self, name: str, marks: Mapping[str, str], arrays: Mapping[str, Pieces]) -> int:
        """Keeps a part; returns its bytes, 0 if it is there already."""
        if name in self:
            return 0
        joined = {key: array.joined() for key, array in arrays.items()}
        return self.put(name, Part(marks=dict(marks), arrays=joined))

    def put(self, name: str, part: Part) -> int:
        """As `write`, of a part in one piece."""
        if name in self:
            return 0
        self._parts[name] = part
        num_bytes = part.num_bytes
        self._add(name, num_bytes)
        if not self._needs(name):  # looked at last, for it may be taken back meanwhile
            self.remove(name)
        try:
            self._came(name, part)
        except BaseException:  # it cannot go on
            self.remove(name)
            raise
        return num_bytes

    def read(self, name: str, marks: Mapping[str, str]) -> Part:
        """A part.

        Raises:
            OSError: it is gone.
        """
        part = self._parts.get(name)
        if part is None:
            raise FileNotFoundError(f"{name} is no longer handed over")
        return part

    def remove(self, name: str) -> None:
        """Removes a part that nobody needs any more."""
        self._parts.pop(name, None)
        self._forget(name)

    def _use(self, name: str, when: float) -> None:
        """Nothing goes by age."""


@dataclass(eq=False)
class Promise:
    """A prefix that one engine will bring and another waits for.

    Attributes:
        chain, position: which one. parts: names of all it consists of, those of its pages in order.
        state: "coming", "there" or "failed".
    """

    chain: Chain
    position: int
    parts: list[str]
    state: str = "coming"
    waiting: list[Callable[[], object]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its own."""
        return checkpoint_name(self.chain, self.position)


class HandOver:
    """What the engines of both sides share. Any thread may call it.

    Args:
        root: as of `Parts`; both sides must have the same, for it tells models apart.
        came: called with the name of each part that has come, and the part, in the thread that brings it.
        ended: called with the name of each promise that was kept or broken, and "there" or "failed".

    Attributes:
        folder: what has come and was not taken yet.
        sides: of the engines that share it.
    """

    def __init__(
        self,
        root: str,
        came: Callable[[str, Part], object] = lambda name, part: None,
        ended: Callable[[str, str], object] = lambda name, state: None,
    ) -> None:
        self.folder = MemoryParts(root, self.needs, came)
        self._told_of_ends = ended
        self.sides: list[_Side] = []
        self._promises: dict[str, Promise] = {}
        self._needed = Counter[str]()  # how many promises need each part
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Promises that were not kept and taken, or given up."""
        return len(self._promises)

    @functools.cached_property
    def is_direct(self) -> bool:
        """Whether frames of one arena can go into another as they are. It is asked once all sides are there.

        They can if both sides are in this process and have the same frames, and no page is in two runs.
        """
        kinds = {type(side) for side in self.sides}
        forms = {(side.form.geometry, side.form.whole, side.form.count) for side in self.sides}
        fit = all(pages_are_in_runs(side.geometry.page_tokens) for side in self.sides)
        return len(kinds) == 2 and len(forms) == 1 and fit

    def promise(self, tokens: np.ndarray, position: int) -> str:
        """Somebody will bring the first `position` tokens of a prompt, for an engine that waits for them.

        Args:
            tokens: int32[n], at least so many. position: a multiple of the grain of both engines.

        Returns:
            The name of the promise. It is an own one for every prefix; who promises the same again joins it.
        """
        chain = Chain(self.folder.root, np.asarray(tokens[:position], np.int32))
        parts = [pages_name(chain, end) for end in runs_to(position)]
        made = Promise(chain, position, [*parts, checkpoint_name(chain, position)])
        with self._lock:
            known = self._promises.get(made.name)
            if known is None or known.state == "failed":
                self._promises[made.name] = made
            self._needed.update(made.parts)
        return made.name

    def known(self, name: str) -> Promise | None:
        """A promise by its name, if it has neither failed nor been taken back."""
        found = self._promises.get(name)
        return None if found is None or found.state == "failed" else found

    def positions(self) -> list[int]:
        """Where promised prefixes end, the longest first."""
        with self._lock:
            return sorted({p.position for p in self._promises.values()}, reverse=True)

    def needs(self, part: str) -> bool:
        """Whether a promise has a part."""
        with self._lock:
            return self._needed[part] > 0

    def arrived(self, name: str) -> None:
        """All parts of a promised prefix are there."""
        self.end(name, "there")

    def fail(self, name: str) -> None:
        """A promise that was not kept yet will not be. Who waits for it computes the prefix."""
        self.end(name, "failed")

    def end(self, name: str, state: str, only: Promise | None = None) -> None:
        """A promise was kept ("there") or broken ("failed"), unless it has ended already.

        Args:
            only: which promise is meant; None for the one that has this name now.
        """
        with self._lock:
            promise = self._promises.get(name)
            if promise is None or promise.state != "coming" or only not in (None, promise):
                return
            promise.state = state
            waiting, promise.waiting = promise.waiting, []
        self._told_of_ends(name, state)
        for go_on in waiting:
            go_on()

    def wait(self, promise: Promise, go_on: Callable[[], object]) -> None:
        """Has something done once a promise is kept or broken, which may be now."""
        with self._lock:
            if promise.state == "coming":
                promise.waiting.append(go_on)
                return
        go_on()

    def take_back(self, name: str) -> None:
        """One who promised needs it no longer, because it was taken over, or nobody asks for it any more."""
        with self._lock:
            promise = self._promises.get(name)
            if promise is None:
                return
            self._needed.subtract(promise.parts)
            gone = [part for part in promise.parts if self._needed[part] <= 0]
            for part in gone:
                del self._needed[part]
            waiting: list[Callable[[], object]] = []
            if promise.parts[-1] in gone:
                del self._promises[name]
                waiting, promise.waiting = promise.waiting, []
                if promise.state == "coming":
                    promise.state = "failed"
        for part in gone:
            self.folder.remove(part)
        for go_on in waiting:
            go_on()


class _Side(Disk):
    """One engine's end."""

    is_disk = False
    folder: MemoryParts  # type: ignore[assignment]

    def __init__(self, shared: HandOver, geometry: Geometry, form: Form) -> None:
        super().__init__(shared.folder, geometry, form)  # type: ignore[arg-type]
        self.shared = shared
        shared.sides.append(self)

    def _windowed(self) -> set[int]:
        """The places in a page of frames of layers with a window."""
        return {
            column
            for group in self.geometry.windowed
            for column in range(group.first_frame, group.first_frame + group.num_frames)
        }

    def look_again(self) -> None:
        """Nobody else writes there."""

    def touch(self, chain: Chain, position: int) -> None:
        """Nothing goes by age."""

    def use(self, chain: Chain, position: int) -> None:
        """Nothing goes by age."""

    def stats(self) -> dict[str, int | float]:
        """What came from the other side, and what should have and did not."""
        counters = self.counters
        return {
            "prefixes": counters.loads,
            "bytes": counters.loaded_bytes,
            "tokens": counters.loaded_tokens,
            "failed": counters.loads_failed,
        }

    @property
    def about(self) -> str:
        """Nothing is kept."""
        return ""


class Sender(_Side):
    """The end of an engine that computes prompts: it gives copies of what was promised."""

    side = "prefill"

    def find(self, chain: Chain, above: int, most: int, *, held: int) -> int:
        """Nothing comes back."""
        return 0

    def wants(self, chain: Chain, position: int, named: Collection[str] = ()) -> Save | None:
        promise = self.shared.known(checkpoint_name(chain, position))
        if promise is not None:
            found = super().wants(chain, position, named)
            if found is None and promise.parts[-1] in self.folder:
                self.shared.arrived(promise.name)
            return found
        # The beginning of a longer one: its pages are final.
        with self._room:
            named = self._names_waiting.union(named)
        save = self._missing(chain, position, named, wanted=self.shared.needs)
        return save if save.ends else None

    def early(self, chain: Chain, position: int) -> bool:
        """Whether a prefix may be copied before its numbers are known to be finite: nobody sees it by itself."""
        return self.shared.known(checkpoint_name(chain, position)) is None

    def _write(self, save: Save, copies: Sequence[Any]) -> None:
        promise = self.shared.known(checkpoint_name(save.chain, save.position))
        if promise is not None:
            super()._write(save, copies)
            self.shared.arrived(promise.name)
            return
        frames = self._frames(save, copies)
        for end in save.ends:
            self.counters.saved_bytes += self._write_run(save, end, frames)

    def _frames(self, save: Save, copies: Sequence[Any]) -> Frames:
        if not self.shared.is_direct or self.folder.num_bytes > MOST_PINNED:
            return super()._frames(save, copies)
        for copy in copies:  # raises the error of a step that failed
            copy.block_until_ready()
        count = len(save.places)
        return ArenaFrames(dict(zip(save.places, copies, strict=False)), [*copies[count:]])

    def _write_run(self, save: Save, end: int, frames: Frames) -> int:
        if not isinstance(frames, ArenaFrames):
            return super()._write_run(save, end, frames)
        pages, windowed = pages_of(end, self.geometry.page_tokens), self._windowed()
        own = {
            (page, column): words
            for (page, column), words in frames.pages.items()
            if page in pages and column not in windowed
        }
        return self.folder.put(pages_name(save.chain, end), FramesPart(frames=Frames(own, None)))

    def _write_end(self, save: Save, frames: Frames) -> int:
        if not isinstance(frames, ArenaFrames):
            return super()._write_end(save, frames)
        windowed = self._windowed()
        own = {place: words for place, words in frames.pages.items() if place[1] in windowed}
        part = FramesPart(frames=Frames(own, frames.checkpoint))
        return self.folder.put(checkpoint_name(save.chain, save.position), part)

    def settle(self, name: str) -> None:
        """The prompt of a promise has ended: what was to come has been handed over, or will not come."""
        self._writer.do(functools.partial(self.shared.fail, name))


class Receiver(_Side):
    """The end of an engine that goes on from prompts: it writes nothing, and waits for what is promised.

    Attributes:
        bring: puts frames of another engine's device where programs of this one read them. The engine sets it.
    """

    side = "decode"

    def __init__(self, shared: HandOver, geometry: Geometry, form: Form) -> None:
        super().__init__(shared, geometry, form)
        self.writing = False
        self.bring: Callable[[list[Any]], list[Any]] = lambda words: words

    def find(self, chain: Chain, above: int, most: int, *, held: int) -> int:
        for position in self.shared.positions():
            fits = above < position <= most and position % self.geometry.grain == 0
            if fits and self.shared.known(checkpoint_name(chain, position)) is not None:
                return position
        return 0

    def read(self, chain: Chain, position: int, places: Sequence[FramePlace]) -> Read:
        found = Read(position, self.form.zeros(places))
        promise = self.shared.known(checkpoint_name(chain, position))

        def go_on() -> None:
            if promise is None or promise.state == "failed":
                self.counters.loads_failed += 1
                found.fail()
                found.finish()
            else:
                self._begin(found, chain, places)

        if promise is None:
            go_on()
        else:
            self.shared.wait(promise, go_on)
        return found

    def _read_run(self, found: Read, chain: Chain, end: int) -> None:
        part = self.folder.read(pages_name(chain, end), page_marks(end))
        if isinstance(part, FramesPart):
            self._bring(found, part.frames)
        else:
            super()._read_run(found, chain, end)

    def _read_end(self, found: Read, chain: Chain) -> None:
        part = self.folder.read(checkpoint_name(chain, found.position), {})
        if isinstance(part, FramesPart):
            found.frames = found.frames._replace(checkpoint=self._bring(found, part.frames))
        else:
            super()._read_end(found, chain)

    def _bring(self, found: Read, frames: Frames) -> list[Any] | None:
        """Brings frames that are wanted; returns those of the checkpoint."""
        places = [place for place in frames.pages if place in found.frames.pages]
        words = self.bring(frames.words(places))
        found.add(sum(one.nbytes for one in words))
        found.frames.pages.update(zip(places, words, strict=False))
        return words[len(places) :] or None


ENDS: dict[str, type[Sender] | type[Receiver]] = {end.side: end for end in (Sender, Receiver)}

"""Prefixes of one engine in a folder, written and read by threads of their own.

The engine's thread asks what is there, hands over copies of frames, and gets frames back. Everything that takes time
happens beside it. After an error of the system nothing more is written; the engine goes on without.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hybrid_jax.byte_sizes import format_size
from hybrid_jax.geometry import Geometry
from hybrid_jax.tiers import parcel
from hybrid_jax.tiers.chain import RUN_TOKENS, Chain, run_begin, runs_to
from hybrid_jax.tiers.folder import CHECKPOINT, ENDING, PAGES, Folder, Parts
from hybrid_jax.tiers.form import Form
from hybrid_jax.tiers.parcel import FramePlace, Frames
from hybrid_jax.tiers.part_file import Damaged, Part, check_shapes
from hybrid_jax.tiers.workers import Workers

LOG = logging.getLogger("hybrid_jax.disk")
READERS = 2
USED_S, MOST_USED = (
    60.0,
    1 << 16,
)  # a prefix that is hit above counts as used so often, and so many are known
WAITING_BYTES = 256 << 20  # of copies that the writer may have before it


@dataclass
class DiskCounters:
    """What went to the disk and came back since the engine began.

    Attributes:
        saves, saved_bytes: prefixes and bytes that were written.
        saves_dropped: prefixes that were evicted, or came too fast, before they were copied, or whose copies failed.
        saves_slower: prefixes that were not written, because to read them would take longer than to compute them.
        writes_failed: 1 once an error of the system has ended writing.
        loads, loaded_bytes, loaded_tokens: prefixes and bytes that were read and used, and the tokens that the arena
            had not.
        hit_tokens: how many of these tokens prompts skipped in the end.
        loads_failed: files that were damaged, gone or not readable.
        loads_without_room: prefixes that were read, but the cache had no room for them.
        loads_slower: prefixes that were computed, because that takes less time.
    """

    saves: int = 0
    saved_bytes: int = 0
    saves_dropped: int = 0
    saves_slower: int = 0
    writes_failed: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    loaded_tokens: int = 0
    hit_tokens: int = 0
    loads_failed: int = 0
    loads_without_room: int = 0
    loads_slower: int = 0


@dataclass(eq=False)
class Save:
    """A prefix on its way to the disk.

    Attributes:
        chain, position: which one.
        ends: where its runs of pages end that are to be written.
        places: what the copies are: frames of pages, in this order, then those of the checkpoint.
    """

    chain: Chain
    position: int
    ends: list[int]
    places: list[FramePlace]

    @property
    def names(self) -> set[str]:
        """Of the parts to write."""
        pages = {pages_name(self.chain, end) for end in self.ends}
        return pages | {checkpoint_name(self.chain, self.position)}


@dataclass(eq=False)
class Read:
    """A prefix on its way from the disk.

    Attributes:
        position: tokens of it.
        frames: those that were wanted, filled once it is done.
        num_bytes: that were read.
        seconds: that it took since a thread took up the first part of it; waiting behind other reads does not count.
        failed: it could not be read.
        told: its reader knows that it is done, and may go on.
    """

    position: int
    frames: Frames
    num_bytes: int = 0
    seconds: float = 0.0
    failed: bool = False
    told: bool = False
    _done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _parts_left: int = 0
    _began: float | None = None

    @property
    def done(self) -> bool:
        """Whether it has been read, or has failed."""
        return self._done.is_set()

    def wait(self, timeout: float) -> bool:
        """Waits until it is done; returns whether it is."""
        return self._done.wait(timeout)

    def begin(self, num_parts: int) -> None:
        """So many parts are to be read."""
        self._parts_left = num_parts
        if not num_parts:
            self._done.set()

    def part_begins(self) -> None:
        """A thread takes up a part."""
        with self._lock:
            if self._began is None:
                self._began = time.perf_counter()

    def add(self, num_bytes: int) -> None:
        """So many more bytes were read."""
        with self._lock:
            self.num_bytes += num_bytes

    def fail(self) -> bool:
        """It cannot be read; returns whether that is new."""
        with self._lock:
            failed, self.failed = self.failed, True
        return not failed

    def part_is_done(self) -> bool:
        """A part was read, or has failed; returns whether it was the last one."""
        with self._lock:
            self._parts_left -= 1
            return not self._parts_left

    def finish(self) -> None:
        """All parts are done."""
        if self._began is not None:
            self.seconds = time.perf_counter() - self._began
        self._done.set()


class Prefixes:
    """Which prefixes are there, by the names of their parts, and what is to be written and read of one.

    Args:
        folder: the parts. geometry: the engine's.

    Attributes:
        counters: what happened so far.
        writing: whether anything is written still; False after an error.
        is_disk: it is a tier. What is handed over between engines is none: all of it is wanted, however long it takes.
        side: of such a hand-over, "prefill" or "decode"; "" for none.
    """

    is_disk = True
    side = ""

    def __init__(self, folder: Parts, geometry: Geometry) -> None:
        self.folder, self.geometry = folder, geometry
        self.counters = DiskCounters()
        self.writing = folder.limit is not None
        self._waiting_bytes = 0
        self._room = threading.Condition()
        self._names_waiting: set[str] = set()
        self._used: dict[str, float] = {}  # when `use` was last told, by name

    def chain(self, tokens: np.ndarray) -> Chain:
        """Names of the prefixes of a prompt."""
        return Chain(self.folder.root, tokens)

    # --- looking --------------------------------------------------------------------------------

    def find(self, chain: Chain, above: int, most: int, *, held: int) -> int:
        """The longest prefix there, of more than `above` and at most `most` tokens, a multiple of grain; 0 if none.

        Args:
            held: of the first so many tokens no pages are needed.
        """
        self.look_again()
        grain = self.geometry.grain
        for position in range(most - most % grain, above, -grain):
            if self._resumes(chain, position) and not self._lacking(chain, position, held):
                return position
        return 0

    def is_coming(self, chain: Chain, position: int) -> bool:
        """Whether what a prompt needs to resume at a position is being written."""
        return checkpoint_name(chain, position) in self._names_waiting

    def _resumes(self, chain: Chain, position: int) -> bool:
        if checkpoint_name(chain, position) in self.folder:
            return True
        whole_run = position % RUN_TOKENS == 0 and not parcel.needs_checkpoint(self.geometry)
        return whole_run and pages_name(chain, position) in self.folder

    def _lacking(self, chain: Chain, position: int, held: int = 0) -> list[int]:
        """Where runs of a prefix end that are not there, of those with tokens after the first `held`."""
        if not self._has_runs:
            return []
        ends = [end for end in runs_to(position) if end > held]
        return [end for end in ends if pages_name(chain, end) not in self.folder]

    @property
    def _has_runs(self) -> bool:
        return any(group.window is None for group in self.geometry.page_groups)

    def look_again(self) -> None:
        """Notices what others have written and removed, if that may be."""

    # --- saving ---------------------------------------------------------------------------------

    def wants(self, chain: Chain, position: int, named: Collection[str] = ()) -> Save | None:
        """What is to be copied for a prefix; None if all of it is there, or is being written.

        Args:
            named: names of parts that will be handed over.
        """
        name = checkpoint_name(chain, position)
        with self._room:
            named = self._names_waiting.union(named)
        if not self.writing or name in named:
            return None
        save = self._missing(chain, position, named)
        return save if save.ends or name not in self.folder else None

    def _missing(
        self,
        chain: Chain,
        position: int,
        named: Collection[str],
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> Save:
        """The pages of a prefix that are not there, with its checkpoint.

        Args:
            named: names of parts that are on their way. wanted: whether somebody wants one of the others.
        """
        names = {end: pages_name(chain, end) for end in self._lacking(chain, position)}
        ends = [end for end, name in names.items() if name not in named and wanted(name)]
        size = self.geometry.page_tokens
        pages = sorted({page for end in ends for page in pages_of(end, size)})
        return Save(chain, position, ends, parcel.places_of(self.geometry, position, pages))

    def early(self, chain: Chain, position: int) -> bool:
        """Whether a prefix may be copied before its numbers are known to be finite."""
        return False

    @property
    def has_room(self) -> bool:
        """Whether the writer takes more copies."""
        return self._waiting_bytes < WAITING_BYTES

    def wait_for_room(self, timeout: float) -> None:
        """Waits until the writer takes more copies."""
        with self._room:
            self._room.wait_for(lambda: self.has_room, timeout)

    def save(self, save: Save, copies: Sequence[Any]) -> None:
        """Hands over the copies of a prefix, arrays uint32[frame_words] that may still be being computed."""
        raise NotImplementedError

    def _hand_over(self, save: Save, num_bytes: int) -> None:
        """The writer has so many bytes more before it."""
        with self._room:
            self._waiting_bytes += num_bytes
            self._names_waiting |= save.names

    def _handed_over(self, save: Save, num_bytes: int) -> None:
        """The writer is done with them."""
        with self._room:
            self._waiting_bytes -= num_bytes
            self._names_waiting -= save.names
            self._room.notify_all()

    def touch(self, chain: Chain, position: int) -> None:
        """Counts a prefix as just used."""
        runs = runs_to(position) if self._has_runs else []
        self.folder.touch(
            checkpoint_name(chain, position), [pages_name(chain, end) for end in runs]
        )

    def use(self, chain: Chain, position: int) -> None:
        """Counts a prefix as just used that a tier above has, once in a while."""
        name, now = checkpoint_name(chain, position), self.folder.now_s()
        if now - self._used.get(name, -USED_S) >= USED_S:
            if len(self._used) >= MOST_USED:
                self._used.clear()
            self._used[name] = now
            self._beside(functools.partial(self.touch, chain, position))

    def _beside(self, job: Callable[[], None]) -> None:
        """Does something that may take time."""
        job()

    # --- loading --------------------------------------------------------------------------------

    def read(self, chain: Chain, position: int, places: Sequence[FramePlace]) -> Read:
        """Begins to read a prefix.

        Args:
            places: the frames of pages that are wanted.
        """
        raise NotImplementedError

    def _ends_with(self, position: int, places: Sequence[FramePlace]) -> list[int]:
        """Where the runs of a prefix end that have some of these places."""
        wanted, size = {page for page, _ in places}, self.geometry.page_tokens
        ends = runs_to(position) if self._has_runs else []
        return [end for end in ends if not wanted.isdisjoint(pages_of(end, size))]

    # --- looking at it --------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float]:
        """Present numbers, and the counters."""
        return {
            "files": self.folder.num_files,
            "bytes": self.folder.num_bytes,
            **asdict(self.counters),
        }


class Disk(Prefixes):
    """The tier on disk of one engine.

    Args:
        folder: the files. geometry: the engine's. form: of its parcels; None for those of one device.
    """

    folder: Folder

    def __init__(self, folder: Folder, geometry: Geometry, form: Form | None = None) -> None:
        super().__init__(folder, geometry)
        self.form = form or Form(geometry)
        self._writer = Workers("hybrid_jax writer")
        self._readers = Workers("hybrid_jax reader", READERS)
        self._looking = False

    # --- looking --------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Has the folder scanned beside, once in a while."""
        if not self._looking:
            self._looking = True
            self._writer.do(self._look)

    def _beside(self, job: Callable[[], None]) -> None:
        self._writer.do(job)

    def _look(self) -> None:
        try:
            self.folder.look_again()
        except OSError as error:
            LOG.warning("%s could not be looked at: %s", self.folder.path, error)
        self._looking = False

    # --- saving ---------------------------------------------------------------------------------

    def save(self, save: Save, copies: Sequence[Any]) -> None:
        num_bytes = 4 * len(copies) * self.form.frame_words

        def job() -> None:
            try:
                if self.writing:
                    self._write(save, copies)
            except Exception as error:
                if self.is_disk and isinstance(error, OSError):  # the engine goes on without
                    self.writing, self.counters.writes_failed = False, 1
                    LOG.warning("nothing more is kept in %s: %s", self.folder.path, error)
                else:  # such as the error of a step that failed, raised by its copies
                    self.counters.saves_dropped += 1
                    LOG.info("a prefix of %d tokens is not written: %r", save.position, error)
            finally:
                self._handed_over(save, num_bytes)

        self._hand_over(save, num_bytes)
        try:
            self._writer.do(job)
        except BaseException:
            self._handed_over(save, num_bytes)
            raise

    def _write(self, save: Save, copies: Sequence[Any]) -> None:
        frames = self._frames(save, copies)
        for end in save.ends:
            self.counters.saved_bytes += self._write_run(save, end, frames)
        self.counters.saved_bytes += self._write_end(save, frames)
        self.touch(save.chain, save.position)
        self.counters.saves += 1

    def _frames(self, save: Save, copies: Sequence[Any]) -> Frames:
        """The frames of a prefix, once its copies are made."""
        return Frames.of(save.places, [np.asarray(copy) for copy in copies])

    def _write_run(self, save: Save, end: int, frames: Frames) -> int:
        """Writes the run of pages that ends there; returns its bytes, 0 if it is there already."""
        arrays = self.form.read_pages(run_begin(end), end, frames)
        return self.folder.write(pages_name(save.chain, end), page_marks(end), arrays)

    def _write_end(self, save: Save, frames: Frames) -> int:
        """Writes a checkpoint, with what windows see; returns as `_write_run`."""
        arrays, marks = self.form.read_end(save.position, frames), _checkpoint_marks(save.position)
        return self.folder.write(checkpoint_name(save.chain, save.position), marks, arrays)

    # --- loading --------------------------------------------------------------------------------

    def read(self, chain: Chain, position: int, places: Sequence[FramePlace]) -> Read:
        found = Read(position, self.form.zeros(places))
        self._begin(found, chain, places)
        return found

    def _begin(self, found: Read, chain: Chain, places: Sequence[FramePlace]) -> None:
        """Has the parts of a prefix read."""
        parts = [
            functools.partial(self._read_run, found, chain, end)
            for end in self._ends_with(found.position, places)
        ]
        if parcel.needs_checkpoint(self.geometry):
            parts.append(functools.partial(self._read_end, found, chain))
        found.begin(len(parts))
        for part in parts:
            self._readers.do(functools.partial(self._watched, found, chain, part))

    def _watched(self, found: Read, chain: Chain, part: Callable[[], None]) -> None:
        """Reads a part of a prefix; whatever goes wrong, the prefix is a miss."""
        found.part_begins()
        try:
            if not found.failed:
                part()
        except Exception as error:
            if found.fail():
                self.counters.loads_failed += 1
                expected = isinstance(error, OSError | Damaged)
                LOG.warning(
                    "a cached prefix is computed anew: %s", error if expected else repr(error)
                )
        finally:
            if found.part_is_done():
                if not found.failed:
                    self.touch(chain, found.position)
                found.finish()

    def _read_run(self, found: Read, chain: Chain, end: int) -> None:
        form, begin = self.form, run_begin(end)
        name, shapes = pages_name(chain, end), form.page_shapes(begin, end)
        part = self._part(found, name, page_marks(end), shapes)
        form.write_pages(begin, end, part.arrays, found.frames)

    def _read_end(self, found: Read, chain: Chain) -> None:
        position, shapes = found.position, self.form.end_shapes(found.position)
        name, marks = checkpoint_name(chain, position), _checkpoint_marks(position)
        part = self._part(found, name, marks, shapes)
        self.form.write_end(position, part.arrays, found.frames)

    def _part(self, found: Read, name: str, marks: dict[str, str], shapes: dict) -> Part:
        part = self.folder.read(name, marks)
        try:
            check_shapes(self.folder.path / name, part, shapes)
        except Damaged:
            self.folder.remove(name)
            raise
        found.add(sum(array.nbytes for array in part.arrays.values()))
        return part

    # --- around it ------------------------------------------------------------------------------

    def close(self) -> None:
        """Writes what waits, and ends the threads."""
        self._writer.close()
        self._readers.close()

    def flush(self) -> None:
        """Waits until all that was handed over is written."""
        with self._room:
            self._room.wait_for(lambda: not self._names_waiting)

    @property
    def about(self) -> str:
        """What the folder may hold, and holds, in words."""
        folder = self.folder
        limit = "only read, " if folder.limit is None else f"up to {format_size(folder.limit)} "
        return f"{limit}in {folder.path}; {format_size(folder.num_bytes)} are there"


def pages_of(end: int, page_tokens: int) -> range:
    """The pages that hold the run that ends there."""
    return range(run_begin(end) // page_tokens, -(-end // page_tokens))


def pages_name(chain: Chain, end: int) -> str:
    """The name of the run of pages that ends there."""
    return f"{PAGES}{chain.name(end)}{ENDING}"


def checkpoint_name(chain: Chain, position: int) -> str:
    """The name of the checkpoint there."""
    return f"{CHECKPOINT}{chain.name(position)}{ENDING}"


def page_marks(end: int) -> dict[str, str]:
    """What the run of pages that ends there is."""
    return {"kind": "pages", "begin": str(run_begin(end)), "end": str(end)}


def _checkpoint_marks(position: int) -> dict[str, str]:
    return {"kind": "checkpoint", "position": str(position)}

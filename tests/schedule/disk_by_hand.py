"""The real tier on disk without threads: jobs run when a test says so, beside plain sets of what was written.

Times and the question whether a folder has changed are the test's, too, so a run says the same each time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from hybrid_jax.geometry import Geometry
from hybrid_jax.schedule.tiers import on_disk
from hybrid_jax.tiers import chain as names
from hybrid_jax.tiers import disk as module
from hybrid_jax.tiers import folder as folders
from hybrid_jax.tiers import part_file
from hybrid_jax.tiers.chain import Chain, root_of, runs_to
from hybrid_jax.tiers.disk import Disk, Read, Save
from hybrid_jax.tiers.folder import Folder, files_of
from hybrid_jax.tiers.part_file import Damaged

ROOT = root_of("by hand")
RUN_TOKENS = 32  # shorter runs than the engine's, so that a short prompt has several
WAITING_BYTES = 8000
Prefix = tuple[int, ...]


@contextlib.contextmanager
def small_and_timeless() -> Iterator[None]:
    """Short runs, few copies before the writer, no waits, and a clock that moves on at each look."""
    ticks = itertools.count(1)
    clock = SimpleNamespace(time=lambda: 1e6 + next(ticks), monotonic=lambda: float(next(ticks)))
    with contextlib.ExitStack() as stack:
        for where, name, value in [
            *((part, "RUN_TOKENS", RUN_TOKENS) for part in (names, module)),
            (module, "WAITING_BYTES", WAITING_BYTES),
            (on_disk, "A_WHILE_S", 0.0),
            *((folders, name, 0.0) for name in ("LOOK_S", "LOOKS")),
            (folders, "time", clock),
        ]:
            stack.enter_context(mock.patch.object(where, name, value))
        yield


class Jobs:
    """Has the methods of `Workers`, and does nothing by itself."""

    def __init__(self) -> None:
        self.waiting: deque = deque()

    def do(self, job) -> None:
        self.waiting.append(job)

    def run(self, number: int) -> None:
        """Does so many of them, as far as there are so many."""
        for _ in range(min(number, len(self.waiting))):
            self.waiting.popleft()()

    def close(self) -> None:
        while self.waiting:
            self.run(1)


class Written:
    """The model of a folder, for all engines that use it.

    Attributes:
        prefixes: what each name was given for, and for good.
        whole: bytes of each file that was written completely; less what somebody has removed or damaged since.
        saved: prefixes that were written with all they need.
        version: changes when somebody else has changed the folder.
        others: somebody has since the last scan.
        wrong: what the threads of an engine would have seen and taken for a miss.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prefixes: dict[str, Prefix] = {}
        self.whole: dict[str, bytes] = {}
        self.saved: set[Prefix] = set()
        self.version, self.others = 0, False
        self.wrong: list[str] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what goes wrong, but for what may: errors of the system, and damage."""
        try:
            yield
        except (OSError, Damaged):
            raise
        except Exception as error:
            self.wrong.append(repr(error))
            raise

    @property
    def files(self) -> list[Path]:
        return sorted(file.path for file in files_of(self.path))

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in files_of(self.path))

    def change(self, file: Path, chosen: random.Random) -> None:
        """Somebody removes a file or changes it."""
        data = bytearray(file.read_bytes())
        match chosen.randrange(4):
            case 0:
                file.unlink()
            case 1:
                file.write_bytes(data[: chosen.randrange(len(data))])
            case 2:
                data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
                file.write_bytes(data)
            case 3:
                file.write_bytes(chosen.choice(self.files).read_bytes())
        self.look()

    def prune(self, limit: int) -> None:
        """Another process removes what was not used for longest."""
        folders.prune(self.path, limit)
        self.look()

    def look(self) -> None:
        """Somebody has changed the folder: forgets what is not whole any more."""
        self.version, self.others = self.version + 1, True
        for name, data in [*self.whole.items()]:
            file = self.path / ROOT / name
            if not file.exists() or file.read_bytes() != data:
                del self.whole[name]


class FolderByHand(Folder):
    """Says when it has changed by the model, and checks its bytes."""

    def __init__(self, written: Written, limit: int) -> None:
        self.written = written
        super().__init__(written.path, ROOT, limit=limit, about={})

    def _changes(self) -> dict[str, int]:
        return {"version": self.written.version}

    def scan(self) -> None:
        super().scan()
        self.written.others = False

    def write(self, name, marks, arrays) -> int:
        file = self._own / name
        num_bytes = super().write(name, marks, arrays)
        if num_bytes:
            when = folders.time.time()
            os.utime(file, (when, when))
            self.written.whole[name] = file.read_bytes()
            assert len(self.written.whole[name]) == num_bytes
            if not self.written.others:
                assert self.written.num_bytes <= self.limit, "more than the folder may have"
        return num_bytes

    def check_bytes(self) -> None:
        """Between scans it knows what itself has written and removed."""
        if not self.written.others:
            assert self.num_bytes == self.written.num_bytes
            assert {*self._sizes} == {file.name for file in self.written.files}


class DiskByHand(Disk):
    """A disk of jobs, which checks what is found and read against what was written."""

    def __init__(self, written: Written, geometry: Geometry, *, limit: int) -> None:
        super().__init__(FolderByHand(written, limit), geometry)
        self.written = written
        self._writer, self._readers = Jobs(), Jobs()  # ty: ignore
        self.writes, self.reads = self._writer, self._readers

    def find(self, chain: Chain, above: int, most: int, *, held: int) -> int:
        position = super().find(chain, above, most, held=held)
        if position:
            assert above < position <= most
            prefix, saved = prefix_of(chain, position), self.written.saved
            if _state_or_window(self.geometry):
                assert prefix in saved, f"{position} tokens were never saved whole"
            else:
                assert any(other[:position] == prefix for other in saved)
            ends = runs_to(position) if self._has_runs else []
            lacking = [
                end
                for end in ends
                if end > held and module.pages_name(chain, end) not in self.folder
            ]
            assert not lacking, f"found without its pages to {lacking}"
        return position

    def _write(self, save: Save, copies) -> None:
        with self.written.watched():
            for end in save.ends:
                self._name(module.pages_name(save.chain, end), save.chain, end)
            self._name(module.checkpoint_name(save.chain, save.position), save.chain, save.position)
            super()._write(save, copies)
        self.written.saved.add(prefix_of(save.chain, save.position))

    def _name(self, name: str, chain: Chain, end: int) -> None:
        prefix = prefix_of(chain, end)
        assert self.written.prefixes.setdefault(name, prefix) == prefix, "two prefixes of one name"

    def _read_run(self, found: Read, chain: Chain, end: int) -> None:
        with self.written.watched():
            super()._read_run(found, chain, end)
            self._was_whole(module.pages_name(chain, end), chain, end)

    def _read_end(self, found: Read, chain: Chain) -> None:
        with self.written.watched():
            super()._read_end(found, chain)
            self._was_whole(module.checkpoint_name(chain, found.position), chain, found.position)

    def _was_whole(self, name: str, chain: Chain, end: int) -> None:
        assert name in self.written.whole, f"{name} was read, but is not whole"
        assert self.written.prefixes[name] == prefix_of(chain, end)

    def write(self, number: int, refused: bool) -> None:
        """Does so many jobs of the writer; the system refuses to rename what they write if that is asked for."""
        if not refused:
            self.writes.run(number)
            return
        error = OSError(28, "No space left on device")
        with mock.patch.object(part_file.os, "replace", side_effect=error) as asked:
            self.writes.run(number)
        assert not (asked.called and self.writing), "it writes on after an error of the system"

    def run_all(self) -> None:
        self.writes.close()
        self.reads.close()


def prefix_of(chain: Chain, position: int) -> Prefix:
    return tuple(np.frombuffer(chain._bytes, "<i4")[:position].tolist())


def _state_or_window(geometry: Geometry) -> bool:
    return geometry.has_state or bool(geometry.windowed)

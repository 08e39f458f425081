"""A folder of parts on disk: what it has, how many bytes, and what goes when it is full.

There is a folder in it for each root, and in that a file for each part. The time of change of a file says when it was
last written or read. Files that were not used for longest go first. Parts of pages always count as used after the
checkpoints that need them, so a checkpoint goes before its pages. Nothing else is kept of that, so an index is made
from the files at any time, and several processes may share a folder.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hybrid_jax.byte_sizes import at_least
from hybrid_jax.tiers.parcel import Pieces
from hybrid_jax.tiers.part_file import (
    NEW,
    VERSION,
    Damaged,
    Part,
    part_bytes,
    read_part,
    replacing,
    write_part,
)

LOG = logging.getLogger("hybrid_jax.disk")
ABOUT = "hybrid_jax_cache.json"
ABOUT_ROOT = "about.json"
ENDING = ".safetensors"
PAGES, CHECKPOINT = "pages-", "checkpoint-"
OLD_S = 3600.0  # what a process that ended left half written may go after so long
RIGHTS = 0o700  # of a folder that is made, for its files tell what prompts were; roots below have the usual ones
DEFAULT_BYTES = 20 << 30
SPARE = 0.05  # when files go, so much more than is needed goes
LOOK_S, LOOKS = 1.0, 20  # from one scan to the next: so long, and so many times the last one
_ORDER_S = 1e-4  # pages count as used so much after their checkpoint


class CacheFolderError(ValueError):
    """A folder cannot be used; the message says why, and what helps."""


class Stored(NamedTuple):
    """A file of the folder.

    Attributes:
        path: of it. num_bytes: its size. used: when it was last used, seconds since 1970.
    """

    path: Path
    num_bytes: int
    used: float


class Parts:
    """Names and sizes of the parts of one root, and what goes when there are too many, of whatever root.

    Methods are called from several threads.

    Args:
        root: of the parts. limit: bytes that all parts together may have; None to write nothing.
    """

    def __init__(self, root: str, limit: int | None) -> None:
        self.root, self.limit = root, limit
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._all_bytes = 0
        self._latest = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    @property
    def num_files(self) -> int:
        """Parts of the own root, as far as known."""
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts, as far as known."""
        return self._all_bytes

    def touch(self, checkpoint: str, pages: Iterable[str]) -> None:
        """Counts parts as just used."""
        self._latest = now = self._newest()
        for name, when in [(checkpoint, now), *((name, now + _ORDER_S) for name in pages)]:
            self._use(name, when)

    def make_room(self, num_bytes: int) -> None:
        """Removes what was not used for longest, of whatever root, until so many bytes fit.

        What others write counts from the next scan on.
        """
        self.look_again()
        if self.limit is None or self._all_bytes + num_bytes <= self.limit:
            return
        self._prune(max(0, int(self.limit * (1 - SPARE)) - num_bytes))

    def look_again(self) -> None:
        """Notices what others have written and removed, if that may be."""

    def _newest(self) -> float:
        """A time after that of all that was used before, for a clock may have been set back."""
        return max(self.now_s(), self._latest + 2 * _ORDER_S)

    def now_s(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def _use(self, name: str, when: float) -> None:
        """Notes when a part was used, if it is there."""
        raise NotImplementedError

    def _prune(self, limit: int) -> None:
        """Removes parts as `remove_oldest` does."""
        raise NotImplementedError

    def _add(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self._sizes[name] = num_bytes
            self._all_bytes += num_bytes

    def _forget(self, name: str) -> None:
        with self._lock:
            self._all_bytes -= self._sizes.pop(name, 0)


class Folder(Parts):
    """The parts of one root, in a folder that may hold those of others too.

    Args:
        path: the folder, made if it is not there. root: of the engine's parts.
        limit: bytes that all files together may have; None to write nothing.
        about: what the root is of, in words.

    Attributes:
        limit: None, too, if there are parts, but the folder cannot be written; the log says so.

    Raises:
        CacheFolderError: it cannot be made or read, or has a newer form.
    """

    def __init__(
        self, path: Path, root: str, *, limit: int | None, about: Mapping[str, str]
    ) -> None:
        super().__init__(root, limit)
        self.path, self._own, self._about = path, path / root, dict(about)
        self._seen: dict[str, int] = {}  # when each root's folder had changed at the last scan
        self._next_look = 0.0
        try:
            check_form(path)
            self._make_or_read()
            self.scan()
        except OSError as error:
            raise CacheFolderError(
                f"{path} cannot be used ({error.strerror or error}); give a folder that may be "
                "written"
            ) from error

    def _make_or_read(self) -> None:
        """Makes what is not there. A folder of parts that cannot be written is read."""
        try:
            self._make()
        except OSError as error:
            if not (self.path / ABOUT).exists():
                raise
            self.limit = None
            LOG.warning(
                "%s is read, and nothing is kept in it, for it cannot be written: %s",
                self.path,
                error.strerror or error,
            )

    def _make(self) -> None:
        """Makes what is not there. The mark comes before all else, so that nobody takes the folder for another's."""
        self.path.mkdir(RIGHTS, parents=True, exist_ok=True)
        if not (self.path / ABOUT).exists():
            _write_json(self.path / ABOUT, {"version": VERSION})
        self._own.mkdir(exist_ok=True)
        _write_json(self._own / ABOUT_ROOT, self._about)

    # --- what there is --------------------------------------------------------------------------

    def scan(self) -> None:
        """Looks at all files, for others may write and remove some."""
        began, seen = time.monotonic(), self._changes()
        files = list(files_of(self.path))
        ended = time.monotonic()
        with self._lock:
            self._seen, self._next_look = seen, ended + max(LOOK_S, LOOKS * (ended - began))
            self._sizes = {f.path.name: f.num_bytes for f in files if f.path.parent == self._own}
            self._all_bytes = sum(file.num_bytes for file in files)
            self._latest = max((file.used for file in files), default=0.0)

    def look_again(self) -> None:
        """Scans if something has changed since the last scan, but not more than once a second."""
        if time.monotonic() >= self._next_look and self._changes() != self._seen:
            self.scan()

    def _changes(self) -> dict[str, int]:
        found = {}
        for entry in _entries(self.path):
            with suppress(FileNotFoundError):  # somebody has removed it just now
                found[entry.name] = entry.stat().st_mtime_ns
        return found

    # --- reading and writing --------------------------------------------------------------------

    def write(self, name: str, marks: Mapping[str, str], arrays: Mapping[str, Pieces]) -> int:
        """Writes a part, for which others go if the folder is full; returns its bytes, 0 if it is there already.

        A folder that somebody has removed is made again.

        Raises:
            OSError: of the system; or the others cannot be removed.
        """
        if self.limit is None or name in self._sizes:
            return 0
        marks = {"root": self.root, "name": name, **marks}
        num_bytes = part_bytes(marks, arrays)
        self.make_room(num_bytes)
        if self._all_bytes + num_bytes > self.limit:
            raise OSError(errno.ENOSPC, "it is full, and files in it cannot be removed")
        try:
            written = write_part(self._own / name, marks, arrays)
        except FileNotFoundError:  # somebody has removed the folder
            self._make()
            written = write_part(self._own / name, marks, arrays)
            self.scan()
        else:
            self._add(name, written)
        return written

    def read(self, name: str, marks: Mapping[str, str]) -> Part:
        """Reads a part, and checks that it is of this root and has these marks.

        Raises:
            Damaged: it is not; then it is removed. OSError: of the system, such as that it is gone.
        """
        file = self._own / name
        try:
            part = read_part(file)
            wanted = {"root": self.root, "name": name, **marks}
            if {key: part.marks.get(key) for key in wanted} != wanted:
                raise Damaged(f"{file} holds something else than its name says: {part.marks}")
        except Damaged:
            self.remove(name)
            raise
        except OSError:
            self._forget(name)
            raise
        return part

    def remove(self, name: str) -> None:
        """Removes a part that is of no use."""
        with suppress(OSError):
            (self._own / name).unlink(missing_ok=True)
        self._forget(name)

    def _use(self, name: str, when: float) -> None:
        with suppress(OSError):  # it is gone, and a look-up will find that
            os.utime(self._own / name, (when, when))

    def _prune(self, limit: int) -> None:
        prune(self.path, limit)
        self.scan()


# --- whole folders ----------------------------------------------------------------------------------


def check_form(path: Path) -> None:
    """Checks that a folder may hold parts, if it is there.

    Raises:
        CacheFolderError: it is a file, has something else in it, or has a newer form. OSError: of the system.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise CacheFolderError(f"{path} is a file; give a folder")
    about = path / ABOUT
    if not about.exists():
        others = [x for x in path.iterdir() if not x.name.startswith(f".{ABOUT}.")]
        if not others:
            return
        if not about.exists():  # otherwise an engine has made it just now
            raise CacheFolderError(
                f"{path} has other files in it, and no {ABOUT}; give an empty or a new folder"
            )
    try:
        version = json.loads(about.read_text(encoding="utf-8"))["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CacheFolderError(
            f"{about} cannot be read ({error!r}); remove the folder, or give another one"
        ) from error
    if not isinstance(version, int) or version > VERSION:
        raise CacheFolderError(
            f"{path} has version {version} of the form, and this program reads {VERSION}; use a newer "
            "hybrid_jax, or give another folder"
        )


def files_of(path: Path) -> Iterable[Stored]:
    """All parts in a folder, of every root; what was left half written is removed when it is old."""
    for root in _entries(path):
        if not root.is_dir(follow_symlinks=False):
            continue
        for entry in _entries(Path(root.path)):
            with suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                if entry.name.endswith(ENDING):
                    yield Stored(Path(entry.path), stat.st_size, stat.st_mtime)
                elif entry.name.endswith(NEW) and time.time() - stat.st_mtime > OLD_S:
                    os.unlink(entry.path)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(path) as found:
        return list(found)
    return []


def about_root(path: Path) -> Mapping[str, str]:
    """What a root's folder says of it, in words; nothing if that cannot be read."""
    try:
        found = json.loads((path / ABOUT_ROOT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


class Removed(NamedTuple):
    """What was removed of a folder.

    Attributes:
        num_files, num_bytes: files, and their bytes. failed: what could not be removed, with the error.
    """

    num_files: int
    num_bytes: int
    failed: list[tuple[Stored, OSError]]


def prune(path: Path, limit: int) -> Removed:
    """Removes what was not used for longest until a folder's files have at most `limit` bytes."""
    return remove_oldest(files_of(path), limit, lambda file: file.path.unlink())


def remove_oldest(
    files: Iterable[Stored], limit: int, remove: Callable[[Stored], object]
) -> Removed:
    """Removes what was not used for longest until at most `limit` bytes are left. Of equals the name decides.

    Args:
        remove: removes a file. One for which it raises OSError stays.
    """
    ordered = sorted(files, key=lambda file: (file.used, file.path.name))
    rest, removed, count = sum(file.num_bytes for file in ordered), 0, 0
    failed: list[tuple[Stored, OSError]] = []
    for file in ordered:
        if rest - removed <= limit:
            break
        try:
            remove(file)
        except FileNotFoundError:  # somebody else was first
            removed += file.num_bytes
        except OSError as error:
            failed.append((file, error))
        else:
            removed, count = removed + file.num_bytes, count + 1
    return Removed(count, removed, failed)


def _write_json(file: Path, value: object) -> None:
    with replacing(file) as opened:
        opened.write((json.dumps(value, indent=1) + "\n").encode())


def default_limit(path: Path) -> int:
    """What a folder may hold if nobody says how much: 20 GiB, at most half of what is free and its own."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        own = sum(file.num_bytes for file in files_of(path)) if path.is_dir() else 0
        return min(DEFAULT_BYTES, (shutil.disk_usage(there).free + own) // 2)
    except OSError as error:
        raise CacheFolderError(
            f"{path} cannot be used ({error.strerror or error}); give a folder that may be written"
        ) from error


def least_limit(path: Path, num_bytes: int, least: int) -> None:
    """Checks that a limit is enough for one prefix.

    Raises:
        CacheFolderError: it is not.
    """
    if num_bytes < least:
        raise CacheFolderError(
            f"{path} must have room for a checkpoint and a run of pages, {at_least(least, num_bytes)}; raise "
            "disk_memory, or make room on the disk"
        )

"""The output while it grows: a partial file beside it, what it belongs to, and going on after a kill.

Beside OUT lie, until it is finished, OUT.partial with the lines so far and OUT.partial.json with the input's
digest and the run's settings. The lines come in the order they are finished; the id of each tells its place. A
kill may tear the last line; everything before it is whole, since lines are only ever appended. In
the end OUT.partial is renamed to OUT if its lines happen to be in order. Otherwise OUT.partial.sorted is written from
it and renamed, and OUT.partial goes only when OUT is there.
"""

from __future__ import annotations

import json
import os
import re
import stat
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_jax.batch.errors import BatchStopped, shown
from hybrid_jax.batch.input_file import InputFile
from hybrid_jax.batch.responses import Names

try:
    import fcntl
except ImportError:  # Windows has no flock: there, nobody stops a second run of the same command
    fcntl = None

FORMAT = 2  # of the partial file and of how lines get their seeds
PARTS = {"custom_id", "response", "error"}  # of every line
WELL_FORMED = re.compile("batch_req_[0-9a-f]{32}")
HEAD = slice(10, 26)  # 64 of an id's 128 bits


def partial_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def sidecar_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial.json")


def sorted_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial.sorted")


class Places:
    """Finds the places of answers; quickly where they follow each other, and in any order.

    Args:
        digest: of the input.
        num_lines: of the input.

    Example:
        >>> places = Places("0123", 5)
        >>> [places.find(Names("0123", place).line_id) for place in (2, 3, 0, 7)], places.find("2")
        ([2, 3, 0, None], None)
    """

    def __init__(self, digest: str, num_lines: int) -> None:
        self._digest, self._num_lines = digest, num_lines
        self._next = 0  # place after the one found last

    def find(self, line_id: object) -> int | None:
        """The place of the line with that id; None when there is none."""
        if self._next < self._num_lines and self._id(self._next) == line_id:
            place = self._next
        else:
            place = self._search(line_id)
        if place is not None:
            self._next = place + 1
        return place

    def _search(self, line_id: object) -> int | None:
        if not isinstance(line_id, str) or not WELL_FORMED.fullmatch(line_id):
            return None
        head = int(line_id[HEAD], 16)
        heads, places = self._sorted_heads
        index = bisect_left(heads, head)
        while index < len(heads) and heads[index] == head:
            if self._id(places[index]) == line_id:
                return places[index]
            index += 1
        return None

    @cached_property
    def _sorted_heads(self) -> tuple[array, array]:
        """Beginnings of all ids, ascending, and their places: 16 bytes a line."""
        heads = (int(self._id(place)[HEAD], 16) for place in range(self._num_lines))
        heads = np.fromiter(heads, np.uint64, self._num_lines)
        places = np.argsort(heads)
        return array("Q", heads[places].tobytes()), array("q", places.tobytes())

    def _id(self, place: int) -> str:
        return Names(self._digest, place).line_id


@dataclass
class PartialOutput:
    """The partial file, locked while this lives; use in a `with` block.

    Attributes:
        output: what it becomes.
        source: whose lines it answers.
        num_lines: lines in it.
    """

    output: Path
    source: InputFile
    num_lines: int = field(default=0, init=False)
    _descriptor: int = field(default=-1, init=False)
    _size: int = field(default=0, init=False)
    _in_order: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        # Where the answer to each line of the input begins; -1 where there is none yet.
        self._offsets = array("q", [-1]) * self.source.num_lines

    @property
    def path(self) -> Path:
        return partial_path(self.output)

    def __enter__(self) -> PartialOutput:
        path = self.path
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                self._lock(path)
                if _is_still(self._descriptor, path):
                    return self
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # another run finished it a moment ago

    def _lock(self, path: Path) -> None:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise ValueError(f"run-batch: {path} must be a regular file; remove it")
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"run-batch: another run is writing {path}; wait for it") from error

    def __exit__(self, *_: object) -> None:
        """Closes it; an empty one leaves no trace."""
        path = self.path
        if os.fstat(self._descriptor).st_size == 0 and _is_still(self._descriptor, path):
            sidecar_path(self.output).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        os.close(self._descriptor)

    # --- going on -----------------------------------------------------------------------------------

    def __contains__(self, place: int) -> bool:
        """Whether the line of the input at that place is answered."""
        return self._offsets[place] >= 0

    def recover(self, identity: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the lines an earlier run left, then cuts off what a kill tore; begins one if there is none.

        Args:
            identity: of this run: what the lines depend on, as JSON.

        Raises:
            ValueError: they belong to another input or to other settings; nothing is changed then.
        """
        if os.fstat(self._descriptor).st_size == 0:
            self._write_sidecar(identity)
        else:
            self._check_sidecar(identity)
            yield from self._lines()
            os.ftruncate(self._descriptor, self._size)
        sorted_path(self.output).unlink(missing_ok=True)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The lines before the first one that is none."""
        places = Places(self.source.digest, self.source.num_lines)
        with open(self.path, "rb") as file:
            for data in file:
                line = read_answer(data)
                if line is None:
                    break
                self._note(self._place_of(line, places), len(data))
                yield line

    def _place_of(self, line: dict[str, Any], places: Places) -> int:
        place, remedy = places.find(line.get("id")), "delete the partial file to start over"
        if place is None:
            raise ValueError(
                f"run-batch: line {self.num_lines + 1} of {self.path} is not this run's answer to a "
                f"request of {self.source.path}; {remedy}"
            )
        if place in self:
            raise ValueError(
                f"run-batch: line {self.num_lines + 1} of {self.path} answers request {place + 1} of "
                f"{self.source.path} a second time; {remedy}"
            )
        return place

    def _note(self, place: int, num_bytes: int) -> None:
        """The next line answers that place."""
        self._in_order &= place == self.num_lines
        self._offsets[place] = self._size
        self._size += num_bytes
        self.num_lines += 1

    def _check_sidecar(self, identity: dict[str, Any]) -> None:
        path, sidecar = self.path, sidecar_path(self.output)
        again = f"repeat the run it is from, or delete {path.name} to start over"
        try:
            known = json.loads(sidecar.read_bytes())
        except FileNotFoundError:
            raise ValueError(
                f"run-batch: {path} is there without {sidecar.name}, so it may be anything; "
                "delete it to start over"
            ) from None
        except ValueError:
            known = None
        if not isinstance(known, dict) or known.get("format") != FORMAT:
            raise ValueError(f"run-batch: {sidecar} is not of this version; {again}")
        if known.get("input") != identity["input"]:
            raise ValueError(
                f"run-batch: {path} belongs to another input, or the input was changed; {again}"
            )
        for name, value in identity["settings"].items():
            if (earlier := known.get("settings", {}).get(name)) != value:
                raise ValueError(
                    f"run-batch: {path} was begun with {name}={shown(earlier)}, "
                    f"now it is {shown(value)}; {again}"
                )

    def _write_sidecar(self, identity: dict[str, Any]) -> None:
        sidecar = sidecar_path(self.output)
        new = sidecar.with_name(sidecar.name + ".new")
        try:
            new.write_text(json.dumps({"format": FORMAT} | identity, indent=1) + "\n")
            os.replace(new, sidecar)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise self._stopped(error, sidecar) from error

    # --- growing ------------------------------------------------------------------------------------

    def append(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Appends whole lines, each with its place; when this returns, no kill of the program loses them.

        Raises:
            BatchStopped: they cannot be written, the disk being full say.
        """
        lines = list(lines)
        data = memoryview(b"".join(line for _, line in lines))
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise self._stopped(error, self.path) from error
        for place, line in lines:
            self._note(place, len(line))

    def finish(self) -> None:
        """Makes it the output, in the order of the input, all of it or nothing.

        Raises:
            BatchStopped: it cannot be written; the partial file is as it was.
        """
        try:
            if self._in_order:
                os.fsync(self._descriptor)
                os.replace(self.path, self.output)
            else:
                self._write_sorted()
                _sync_folder(self.output.parent)  # before what it was made of goes
        except OSError as error:
            raise self._stopped(error, self.output) from error
        if _is_still(self._descriptor, self.path):
            self.path.unlink(missing_ok=True)
        sidecar_path(self.output).unlink(missing_ok=True)

    def _write_sorted(self) -> None:
        path = sorted_path(self.output)
        try:
            with open(self.path, "rb") as given, open(path, "wb") as file:
                for offset in self._offsets:
                    given.seek(offset)
                    file.write(given.readline())
                file.flush()
                os.fsync(file.fileno())
            os.replace(path, self.output)
        except OSError:
            path.unlink(missing_ok=True)  # the disk may be full of it
            raise

    def _stopped(self, error: OSError, path: Path) -> BatchStopped:
        return BatchStopped(
            f"run-batch: {error.strerror}: {path}; the {self.num_lines} lines written before are "
            "kept, the same command goes on from there"
        )


def read_answer(data: bytes) -> dict[str, Any] | None:
    """A line of an earlier run; None when it is none, or not whole."""
    if not data.endswith(b"\n"):
        return None
    try:
        line = json.loads(data)
    except ValueError:
        return None
    return line if isinstance(line, dict) and line.keys() >= PARTS else None


def remove_rest(output: Path, source: InputFile) -> None:
    """Removes what a kill after the rename left beside a finished output; not what another run left unfinished."""
    sidecar, path = sidecar_path(output), partial_path(output)
    if path.exists():
        try:
            known = json.loads(sidecar.read_bytes())["input"]
        except (OSError, ValueError, LookupError, TypeError):
            return
        # The output is the same lines in another order, so as long.
        if known != source.identity or path.stat().st_size != output.stat().st_size:
            return
        path.unlink(missing_ok=True)
    sidecar.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes a new name as lasting as the file."""
    if fcntl is None:  # Windows cannot open folders
        return
    with suppress(OSError):  # some file systems do not know this
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether the path leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False

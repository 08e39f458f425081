"""The output while it grows, and how a run goes on after it was killed.

Until OUT is finished, there are two files beside it: OUT.partial with the lines so far, and OUT.partial.json with the
input's digest and the run's settings. Lines come in the order in which they are finished, and the id of each tells
which line of the input it answers. A kill may leave the last line incomplete. Everything before it is whole, because
lines are only ever appended. At the end OUT.partial is renamed to OUT if its lines happen to be in order. Otherwise
OUT.partial.sorted is written from it and renamed, and OUT.partial is deleted only after that.
"""

from __future__ import annotations

import json
import os
import stat
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybrid_jax.batch.input_file import InputFile
from hybrid_jax.batch.responses import AnswerIds
from hybrid_jax.openai.errors import brief

try:
    import fcntl
except ImportError:  # Windows has no flock, so nothing stops a second run of the same command there
    fcntl = None  # type: ignore[assignment]  # a module elsewhere

FORMAT = 2  # version of the partial file, and of how lines get their seeds
PARTS = {"custom_id", "response", "error"}  # keys of every line


class BatchStopped(RuntimeError):
    """The run cannot go on, for example because the disk is full. What is written is kept."""


def partial_path(output: Path) -> Path:
    """The file that holds the lines so far."""
    return output.with_name(output.name + ".partial")


def sidecar_path(output: Path) -> Path:
    """The file that says which input and which settings the lines belong to."""
    return output.with_name(output.name + ".partial.json")


def sorted_path(output: Path) -> Path:
    """The file in which the lines are put in order at the end."""
    return output.with_name(output.name + ".partial.sorted")


class PartialOutput:
    """The partial file. Use it in a `with` block, which also keeps it locked.

    Args:
        output: the file that it becomes.
        source: the input that it answers.

    Attributes:
        path: of the partial file.
        num_lines: lines in it so far.
    """

    def __init__(self, output: Path, source: InputFile) -> None:
        self.output, self.source, self.path = output, source, partial_path(output)
        self.num_lines, self._size, self._in_order = 0, 0, True
        # Where in the file the answer to each line of the input begins; -1 if there is none yet.
        self._offsets = array("q", [-1]) * source.num_lines

    def __enter__(self) -> PartialOutput:
        while True:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                self._lock()
                if _is_still(self._descriptor, self.path):
                    return self
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # another run finished it a moment ago

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise ValueError(f"run-batch: {self.path} must be a regular file; remove it")
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"run-batch: another run is writing {self.path}; wait for it"
            ) from error

    def __exit__(self, *_: object) -> None:
        """Closes the file, and deletes it if it is empty."""
        if os.fstat(self._descriptor).st_size == 0 and _is_still(self._descriptor, self.path):
            sidecar_path(self.output).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    # --- going on -----------------------------------------------------------------------------------

    def __contains__(self, index: int) -> bool:
        """Whether that line of the input is answered."""
        return self._offsets[index] >= 0

    def recover(self, identity: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the lines that an earlier run left, then cuts off an incomplete last one. Begins a new file.

        Args:
            identity: what the lines of this run depend on, as JSON.

        Raises:
            ValueError: the lines belong to another input or to other settings. Nothing is changed then.
        """
        if os.fstat(self._descriptor).st_size == 0:
            self._write_sidecar(identity)
        else:
            self._check_sidecar(identity)
            yield from self._lines()
            os.ftruncate(self._descriptor, self._size)
        sorted_path(self.output).unlink(missing_ok=True)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The lines before the first one that is incomplete."""
        indices = range(self.source.num_lines)
        by_id = {AnswerIds(self.source.digest, index).line_id: index for index in indices}
        with open(self.path, "rb") as file:
            for data in file:
                line = read_answer(data)
                if line is None:
                    break
                self._note(self._index_of(line, by_id), len(data))
                yield line

    def _index_of(self, line: dict[str, Any], by_id: dict[str, int]) -> int:
        """The line of the input that a line of the file answers."""
        index, remedy = by_id.get(str(line.get("id"))), "delete the partial file to start over"
        if index is None:
            raise ValueError(
                f"run-batch: line {self.num_lines + 1} of {self.path} is not this run's answer to a "
                f"request of {self.source.path}; {remedy}"
            )
        if index in self:
            raise ValueError(
                f"run-batch: line {self.num_lines + 1} of {self.path} answers request {index + 1} of "
                f"{self.source.path} a second time; {remedy}"
            )
        return index

    def _note(self, index: int, num_bytes: int) -> None:
        """Notes that the next line of the file answers that line of the input."""
        self._in_order &= index == self.num_lines
        self._offsets[index] = self._size
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
                    f"run-batch: {path} was begun with {name}={brief(earlier)}, "
                    f"now it is {brief(value)}; {again}"
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
        """Appends whole lines. Once this returns, they are kept even if the program is killed.

        Args:
            lines: (index of the line of the input, its answer) each.

        Raises:
            BatchStopped: they cannot be written, for example because the disk is full.
        """
        lines = list(lines)
        data = memoryview(b"".join(line for _, line in lines))
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise self._stopped(error, self.path) from error
        for index, line in lines:
            self._note(index, len(line))

    def finish(self) -> None:
        """Turns it into the output, in the order of the input.

        Raises:
            BatchStopped: the output cannot be written. The partial file is left as it was.
        """
        try:
            if self._in_order:
                os.fsync(self._descriptor)
                os.replace(self.path, self.output)
            else:
                self._write_sorted()
                _sync_folder(self.output.parent)  # before the partial file is deleted
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
            path.unlink(missing_ok=True)  # it may be what fills the disk
            raise

    def _stopped(self, error: OSError, path: Path) -> BatchStopped:
        return BatchStopped(
            f"run-batch: {error.strerror}: {path}; the {self.num_lines} lines written before are "
            "kept, the same command goes on from there"
        )


def read_answer(data: bytes) -> dict[str, Any] | None:
    """A line that an earlier run wrote; None if it is not one, or incomplete."""
    if not data.endswith(b"\n"):
        return None
    try:
        line = json.loads(data)
    except ValueError:
        return None
    return line if isinstance(line, dict) and line.keys() >= PARTS else None


def remove_rest(output: Path, source: InputFile) -> None:
    """Removes the files that a kill after the rename left beside a finished output, but not another run's."""
    sidecar, path = sidecar_path(output), partial_path(output)
    if path.exists():
        try:
            known = json.loads(sidecar.read_bytes())["input"]
        except (OSError, ValueError, LookupError, TypeError):
            return
        # The output has the same lines in another order, so the same length.
        if known != source.identity or path.stat().st_size != output.stat().st_size:
            return
        path.unlink(missing_ok=True)
    sidecar.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Has the disk keep a new name in a folder."""
    if fcntl is None:  # Windows cannot open folders
        return
    with suppress(OSError):  # some file systems cannot do this
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False

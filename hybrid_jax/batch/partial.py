"""The output while it grows: a partial file beside it, what it belongs to, and going on after a kill.

Beside OUT lie, until it is finished, OUT.partial with the lines so far and OUT.partial.json with the input's
digest and the run's settings. A kill may tear the last line; everything before it is whole, since
lines are appended in order. The last act is to rename OUT.partial to OUT.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_jax.batch.errors import BatchStopped, shown

try:
    import fcntl
except ImportError:  # Windows has no flock: there, nobody stops a second run of the same command
    fcntl = None

FORMAT = 1  # of the partial file and of how lines get their seeds


def partial_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def sidecar_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial.json")


@dataclass
class PartialOutput:
    """The partial file, locked while this lives; use in a `with` block.

    Attributes:
        output: what it becomes.
        num_lines: lines in it.
    """

    output: Path
    num_lines: int = 0
    _descriptor: int = field(default=-1, init=False)

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

    def recover(self, identity: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the lines an earlier run left, then cuts off what a kill tore; begins one if there is none.

        Args:
            identity: of this run: what the lines depend on, as JSON.

        Raises:
            ValueError: they belong to another input or to other settings; nothing is changed then.
        """
        path = self.path
        if os.fstat(self._descriptor).st_size == 0:
            self._write_sidecar(identity)
            return
        self._check_sidecar(identity)
        size = 0
        with open(path, "rb") as file:
            for data in file:
                line = read_answer(data)
                if line is None:
                    break
                size += len(data)
                self.num_lines += 1
                yield line
        os.ftruncate(self._descriptor, size)

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

    def append(self, lines: list[bytes]) -> None:
        """Appends whole lines; when this returns, no kill of the program loses them.

        Raises:
            BatchStopped: they cannot be written, the disk being full say.
        """
        data = memoryview(b"".join(lines))
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise self._stopped(error, self.path) from error
        self.num_lines += len(lines)

    def finish(self) -> None:
        """Makes it the output, all of it or nothing."""
        try:
            os.fsync(self._descriptor)
            os.replace(self.path, self.output)
        except OSError as error:
            raise self._stopped(error, self.output) from error
        sidecar_path(self.output).unlink(missing_ok=True)

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
    return line if isinstance(line, dict) and "custom_id" in line and "response" in line else None


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether the path leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False

"""The input of a batch run: its lines, one at a time, whatever is in them."""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAX_LINE_BYTES = 64 << 20  # longer ones become error lines without being held in memory
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # UTF-32's little-endian one begins alike


@dataclass(frozen=True)
class Line:
    """One line that is not blank.

    Attributes:
        index: among the lines that are not blank, from 0.
        number: in the file, from 1, with blank lines counted.
        data: its bytes without the end of the line; None if there are more than `MAX_LINE_BYTES`.
    """

    index: int
    number: int
    data: bytes | None


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """The input as it was when the run began.

    Attributes:
        path: of the file.
        digest: of all its bytes.
        num_lines: lines that are not blank. The output will have as many.
    """

    path: Path
    digest: str
    num_lines: int

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes it from other inputs, as JSON."""
        return {"digest": self.digest, "num_lines": self.num_lines}

    @classmethod
    def look_at(cls, path: Path) -> InputFile:
        """Reads the file once from end to end.

        Raises:
            ValueError: it is not a regular file, has no requests, or is not UTF-8.
            OSError: it cannot be read.
        """
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(
                "run-batch: the input must be a regular file, because it is read again after an "
                f"interruption, got {path}"
            )
        with open(path, "rb") as file:
            if file.read(2) in WIDE_MARKS:
                raise ValueError(f"run-batch: {path} is UTF-16 or UTF-32 text; save it as UTF-8")
        digest = hashlib.blake2b(digest_size=16)
        num_lines = sum(1 for _ in read_lines(path, digest))
        if num_lines == 0:
            raise ValueError(f"run-batch: {path} holds no requests, one JSON object a line")
        return cls(path=path, digest=digest.hexdigest(), num_lines=num_lines)


def read_lines(path: Path, digest: hashlib.blake2b) -> Iterator[Line]:
    """The lines that are not blank. When they end, `digest` has taken in every byte of the file.

    Lines end with LF or CRLF. A byte-order mark before the first is dropped.
    """
    index = 0
    with open(path, "rb") as file:
        for number, data in enumerate(_raw_lines(file, digest), start=1):
            if data is None or data.strip():
                yield Line(index, number, data)
                index += 1


def _raw_lines(file: BinaryIO, digest: hashlib.blake2b) -> Iterator[bytes | None]:
    """Every line without its end; None for one that is too long."""
    mark = codecs.BOM_UTF8
    while data := file.readline(MAX_LINE_BYTES + len(b"\r\n")):
        digest.update(data)
        text: bytes | None = data.removeprefix(mark).removesuffix(b"\n").removesuffix(b"\r")
        mark = b""
        while not data.endswith(b"\n") and (data := file.readline(1 << 20)):
            digest.update(data)
            text = None
        yield None if text is None or len(text) > MAX_LINE_BYTES else text

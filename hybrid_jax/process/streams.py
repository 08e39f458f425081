"""The standard streams of a program that is not ours: they may be missing, closed, replaced or broken.

Messages of this package must never disturb the caller. So nothing here raises.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import Any, TextIO, cast


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal. It may be None, closed, or an object that can only write."""
    try:
        return bool(stream.isatty())
    except Exception:  # whatever such an object raises
        return False


def encoding_of(stream: Any) -> str:
    """What a stream turns characters into; "utf-8" if it does not say."""
    encoding = getattr(stream, "encoding", None)
    return encoding if isinstance(encoding, str) and encoding else "utf-8"


class Forgiving(io.TextIOBase):
    """A stream on which writing never fails: characters that it lacks become "?", and errors are dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute elsewhere
        return encoding_of(self._stream)

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("there is no stream")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        with suppress(Exception):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self.encoding
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(Exception):
            self._stream.flush()

    def close(self) -> None:
        """Leaves the caller's stream open."""


def forgiving(stream: Any) -> TextIO:
    """A stream for libraries that write on it."""
    return cast(TextIO, Forgiving(stream))


def say(text: str, *, end: str = "\n", to: Any = None) -> None:
    """Writes on a stream, stderr unless one is given, and flushes, if that is possible."""
    out = Forgiving(sys.stderr if to is None else to)
    out.write(text + end)
    out.flush()

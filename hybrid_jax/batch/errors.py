"""What can be wrong with one line of a batch file, and with the run of a whole one."""

from __future__ import annotations

import reprlib
from typing import Any


class LineError(ValueError):
    """One line cannot be answered; it becomes an error line, and the others go on.

    Args:
        message: names the field, the value and the remedy.
        code: what kind of mistake, in one word for programs.
        param: the field of the body it is about, or None.
    """

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


class BatchStopped(RuntimeError):
    """The run cannot go on for a reason outside of it, a full disk say; what is written is kept."""


def shown(value: Any) -> str:
    """A JSON value in a message: short, whatever was given.

    Example:
        >>> shown(True), shown(None), shown([1, "two"]), len(shown("x" * 1000))
        ('true', 'null', "[1, 'two']", 30)
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return reprlib.repr(value)


def unsupported(name: str, value: Any, remedy: str) -> LineError:
    """What a field says is valid, and not done here.

    Example:
        >>> unsupported("stream", True, "leave it out")
        LineError('stream=true is not supported by this engine; leave it out')
    """
    return LineError(
        f"{name}={shown(value)} is not supported by this engine; {remedy}",
        code="unsupported_parameter",
        param=name,
    )

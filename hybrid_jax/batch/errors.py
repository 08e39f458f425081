"""What can be wrong with one line of a batch file, and with a whole run."""

from __future__ import annotations

import json
import reprlib
from typing import Any


class LineError(ValueError):
    """One line cannot be answered. It gets an error line, and the others go on.

    Args:
        message: names the field and the value, and says what to do.
        code: the kind of mistake, as one word for programs.
        param: the field of the line or its body that is wrong, or None.
    """

    def __init__(
        self, message: str, *, code: str = "invalid_value", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class BatchStopped(RuntimeError):
    """The run cannot go on, for example because the disk is full. What is written is kept."""


def brief(value: Any) -> str:
    """A JSON value as messages show it: never long.

    Example:
        >>> brief(True), brief(None), brief([1, "two"]), len(brief("x" * 1000))
        ('true', 'null', "[1, 'two']", 30)
    """
    return json.dumps(value) if value is None or isinstance(value, bool) else reprlib.repr(value)


def require(
    condition: bool, name: str, what: str, value: Any, *, code: str = "invalid_value"
) -> None:
    """LineError unless the condition holds: "`name` must be `what`, got `value`"."""
    if not condition:
        raise LineError(f"{name} must be {what}, got {brief(value)}", code=code, param=name)


def unsupported(name: str, value: Any, remedy: str) -> LineError:
    """The error for a value that is valid but not supported here.

    Example:
        >>> unsupported("stream", True, "leave it out")
        LineError('stream=true is not supported by this engine; leave it out')
    """
    return LineError(
        f"{name}={brief(value)} is not supported by this engine; {remedy}",
        code="unsupported_parameter",
        param=name,
    )

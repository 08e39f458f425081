"""What a caller of the API is told when a request cannot be answered."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from hybrid_jax.text.prompts import TooLong


class RequestError(ValueError):
    """One request cannot be answered. Others are not affected.

    Args:
        message: names the field and the value, and says what to do.
        code: the kind of mistake, as one word for programs.
        param: the field of the request that is wrong, or None.
        status: of HTTP; from 500 on the mistake is not the caller's.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.status = code, param, status


def as_request_error(error: Exception) -> RequestError:
    """Any error as what a caller is told of it. What is unexpected counts as a bug here.

    Example:
        >>> error = as_request_error(KeyError("x"))
        >>> str(error), error.code, error.status
        ("KeyError: 'x'", 'internal_error', 500)
    """
    match error:
        case RequestError():
            return error
        case TooLong():
            return RequestError(str(error), code="context_length_exceeded")
        case ValueError():
            return RequestError(str(error))
        case FloatingPointError():
            return RequestError(str(error), code="not_finite", status=500)
    return RequestError(f"{type(error).__name__}: {error}", code="internal_error", status=500)


def error_object(error: RequestError, message: str) -> dict[str, Any]:
    """The object `error` in the body of an answer.

    Args:
        error: what is wrong.
        message: the error's own, or with words in front.
    """
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"message": message, "type": kind, "param": error.param, "code": error.code}


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
    """RequestError unless the condition holds: "`name` must be `what`, got `value`"."""
    if not condition:
        raise RequestError(f"{name} must be {what}, got {brief(value)}", code=code, param=name)


def unsupported(name: str, value: Any, remedy: str) -> RequestError:
    """The error for a value that is valid but not supported here.

    Example:
        >>> unsupported("stream", True, "leave it out")
        RequestError('stream=true is not supported by this engine; leave it out')
    """
    return RequestError(
        f"{name}={brief(value)} is not supported by this engine; {remedy}",
        code="unsupported_parameter",
        param=name,
    )

"""Output lines: those of OpenAI's batch API, with the body of an answer inside."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_jax.openai.errors import RequestError, error_object

# Allowed inside JSON strings, but some readers end a line at them. Half a surrogate pair has no UTF-8.
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True)
class AnswerIds:
    """The ids in the answer to one line. They are the same whenever that line of that file is answered.

    Attributes:
        digest: of the input.
        index: of the line among those that are not blank, from 0.
    """

    digest: str
    index: int

    @property
    def line_id(self) -> str:
        """The id of the output line."""
        return self.id("batch_req_")

    def id(self, prefix: str) -> str:
        """The id of another object in the answer, which begins with the given prefix."""
        data = f"{prefix}{self.index}/{self.digest}".encode()
        return prefix + hashlib.blake2b(data, digest_size=16).hexdigest()


def success(
    ids: AnswerIds, custom_id: str | None, body: Mapping[str, Any], *, status_code: int = 200
) -> dict[str, Any]:
    """The line of a request that was answered."""
    return {
        "id": ids.line_id,
        "custom_id": custom_id,
        "response": {"status_code": status_code, "request_id": ids.id("req_"), "body": body},
        "error": None,
    }


def failure(
    ids: AnswerIds, custom_id: str | None, error: RequestError, *, number: int
) -> dict[str, Any]:
    """The line of a request that cannot be answered; `number` is the number of its line in the file, from 1."""
    message = f"line {number}: {error}"
    body = {"error": error_object(error, message)}
    line = success(ids, custom_id, body, status_code=error.status)
    return line | {"error": {"code": error.code, "message": message}}


def as_line(value: Mapping[str, Any]) -> bytes:
    """A line of JSON in UTF-8, with its line end."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode() + b"\n"

"""Traces of requests: when each came, and its prompt and output as token ids.

Three forms are read, one request per line of JSON, gzipped where the name ends in .gz:

- segments: {"session_id", "turn_id", "ts", "in": [[seg, len], ...], "out": [...]}, an entry maybe [seg, len, off];
  token i of segment s is 3 + splitmix64(s * 2**20 + off + i) mod (vocab - 3);
- tokens, as Marconi's public artifact has them: {"session_id", "turn_id", "ts", "input_tokens", "output_tokens"};
- Mooncake's: {"timestamp" in ms, "input_length", "output_length", "hash_ids" of 512-token blocks}; a block's id
  stands for its tokens, outputs are taken to be unique.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_jax.config.checks import natural

VOCAB = 32_000
BLOCK_TOKENS = 512  # of a Mooncake hash
SEGMENT_TOKENS = 1 << 20  # room for one segment among the seeds of its tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceRequest:
    """One request of a trace.

    Attributes:
        session_id, turn_id: which conversation, and which turn of it.
        arrival_s: when it arrived.
        prompt, output: int32 token ids; the prompt holds the whole history.
    """

    session_id: int | str
    turn_id: int
    arrival_s: float
    prompt: np.ndarray
    output: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        """Prompt and output."""
        return np.concatenate((self.prompt, self.output))


class BadTrace(ValueError):
    """A line of a trace has the wrong form; the message names the line."""


def read_trace(path: Path | str, *, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a file, in its order.

    Args:
        path: a .jsonl or .jsonl.gz file in one of the forms above.
        limit: at most so many requests.

    Raises:
        FileNotFoundError: no such file. BadTrace: a line that is not a request, or a file without requests.
    """
    path = Path(path)
    requests: list[TraceRequest] = []
    segments = Segments()
    for number, line in enumerate(_lines(path), start=1):
        if limit is not None and len(requests) >= limit:
            break
        if line.strip():
            try:
                requests.append(_request(json.loads(line.rstrip()), len(requests), segments))
            except (ValueError, KeyError, RecursionError) as error:
                raise BadTrace(f"{path}, line {number}: {_reason(error)}") from error
    if not requests:
        raise BadTrace(f"{path}: a trace must hold at least one request, got none")
    return requests


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            yield from file
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path}: cannot be read as text: {error}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"must be one JSON object, {error.msg} at column {error.colno}"
    if isinstance(error, KeyError):
        return f"must have the key {error.args[0]!r}"
    if isinstance(error, RecursionError):
        return "must be one JSON object, got one that is nested too deep"
    return str(error)


def _request(entry: Any, index: int, segments: Segments) -> TraceRequest:
    if not isinstance(entry, dict):
        raise ValueError(f"must be one JSON object, got {type(entry).__name__}")
    if "hash_ids" in entry:
        return _mooncake(entry, index, segments)
    if "in" in entry:
        prompt, output = segments.tokens(entry["in"], "in"), segments.tokens(entry["out"], "out")
    elif "input_tokens" in entry:
        prompt = _token_ids(entry["input_tokens"], "input_tokens")
        output = _token_ids(entry["output_tokens"], "output_tokens")
    else:
        raise ValueError(
            f"must have 'in' (segments), 'input_tokens' (tokens) or 'hash_ids' (blocks), got "
            f"{sorted(entry)[:8]}"
        )
    if not prompt.size:
        raise ValueError("a prompt must hold at least one token, got none")
    session = entry["session_id"]
    if isinstance(session, bool) or not isinstance(session, int | str):
        raise ValueError(f"session_id must be a number or a name, got {session!r}")
    return TraceRequest(
        session_id=session,
        turn_id=natural(entry["turn_id"], "turn_id"),
        arrival_s=_seconds(entry["ts"], "ts"),
        prompt=prompt,
        output=output,
    )


def _mooncake(entry: dict, index: int, segments: Segments) -> TraceRequest:
    length = natural(entry["input_length"], "input_length", least=1)
    blocks = entry["hash_ids"]
    if not isinstance(blocks, list):
        raise ValueError(f"hash_ids must be a list of block ids, got {blocks!r}")
    blocks = [natural(block, "hash_ids") for block in blocks]
    if len(blocks) != -(-length // BLOCK_TOKENS):
        raise ValueError(
            f"input_length {length} takes {-(-length // BLOCK_TOKENS)} blocks of {BLOCK_TOKENS} tokens, "
            f"got {len(blocks)} hash_ids"
        )
    sizes = [min(BLOCK_TOKENS, length - BLOCK_TOKENS * i) for i in range(len(blocks))]
    spans = [[2 * block, size] for block, size in zip(blocks, sizes, strict=True)]
    output = natural(entry["output_length"], "output_length")
    return TraceRequest(
        session_id=index,
        turn_id=0,
        arrival_s=_seconds(entry["timestamp"], "timestamp") / 1000,
        prompt=segments.tokens(spans, "hash_ids"),
        output=segments.tokens([[2 * index + 1, output]], "output_length"),
    )


def _seconds(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ValueError(f"{name} must be a time of at least 0, got {value!r}")
    return float(value)


def _token_ids(values: Any, name: str) -> np.ndarray:
    try:
        ids = np.array(values)
    except ValueError:  # lists of unequal lengths
        ids = np.zeros((0, 0))
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, np.int32)
    good = ids.ndim == 1 and ids.dtype.kind == "i" and bool not in set(map(type, values))
    if not good or ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError(f"{name} must be a list of token ids, got {str(values)[:60]}")
    return ids.astype(np.int32)


class Segments:
    """Token ids of segments. Each id is computed once, when it is first asked for."""

    def __init__(self) -> None:
        self._known: dict[int, np.ndarray] = {}

    def tokens(self, spans: Any, name: str) -> np.ndarray:
        """int32 ids of [[segment, length], ...] or [[segment, length, offset], ...]."""
        if not isinstance(spans, list):
            raise ValueError(f"{name} must be a list of segments, got {spans!r}")
        parts = [self._span(span, name) for span in spans]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _span(self, span: Any, name: str) -> np.ndarray:
        if not isinstance(span, list) or len(span) not in (2, 3):
            raise ValueError(f"{name}: a segment is [id, length] or with an offset, got {span!r}")
        segment, length = natural(span[0], f"{name}: id"), natural(span[1], f"{name}: length")
        start = natural(span[2], f"{name}: offset") if len(span) == 3 else 0
        if start + length > SEGMENT_TOKENS:
            raise ValueError(
                f"{name}: a segment has at most {SEGMENT_TOKENS} tokens, got {start + length}"
            )
        ids = self._known.get(segment)
        if ids is None or len(ids) < start + length:
            ids = self._known[segment] = self._expand(segment, start + length)
        return ids[start : start + length]

    def _expand(self, segment: int, length: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            first = np.uint64(segment * SEGMENT_TOKENS & (1 << 64) - 1)
            x = np.arange(length, dtype=np.uint64) + first + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
        return (3 + x % np.uint64(VOCAB - 3)).astype(np.int32)

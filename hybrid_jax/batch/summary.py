"""What became of a batch file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BatchSummary:
    """What `run_batch` returns: counts of the whole file, times of this run.

    Attributes:
        input, output: the files.
        num_lines: lines of the output.
        num_errors: those of them that are error lines.
        num_resumed: lines that an earlier, interrupted run had written.
        prompt_tokens, cached_tokens, completion_tokens: of all lines: tokens of prompts, those the prefix cache
            spared, and new ones.
        seconds: of this run, without loading the model.
        tokens_per_s: new tokens per second of this run.
        peak_memory_bytes: as in `RequestMetrics`, up to the end of this run.
        already_finished: the output was there and was left as it is; the other counts are 0 then.

    Example:
        >>> summary = BatchSummary(
        ...     input="in.jsonl", output="out.jsonl", num_lines=3, prompt_tokens=40, cached_tokens=10
        ... )
        >>> summary.hit_rate
        0.25
    """

    input: str
    output: str
    num_lines: int
    num_errors: int = 0
    num_resumed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    peak_memory_bytes: int | None = None
    already_finished: bool = False

    @property
    def hit_rate(self) -> float:
        """The part of the prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"hit_rate": self.hit_rate}

    def __str__(self) -> str:
        if self.already_finished:
            return (
                f"{self.output} is finished already and was left as it is; delete it to run again"
            )
        earlier = f" ({self.num_resumed:,} from an earlier run)" if self.num_resumed else ""
        return (
            f"{self.output}: {self.num_lines:,} lines{earlier}, {self.num_errors:,} errors; "
            f"{self.completion_tokens:,} new tokens, {self.tokens_per_s:,.0f}/s; "
            f"{self.hit_rate:.0%} of {self.prompt_tokens:,} prompt tokens from the cache"
        )


@dataclass(frozen=True, kw_only=True)
class LineCounts:
    """What one output line adds to the counts of a file; the names are those of `BatchSummary`."""

    num_errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> LineCounts:
        if line["error"] is not None:
            return cls(num_errors=1)
        usage = line["response"]["body"]["usage"]
        return cls(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=usage["completion_tokens"],
        )


class Tally:
    """Counts lines as they are written, or found."""

    def __init__(self) -> None:
        self.num_lines = self.num_errors = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    def add(self, counts: LineCounts) -> None:
        self.num_lines += 1
        self.num_errors += counts.num_errors
        self.prompt_tokens += counts.prompt_tokens
        self.cached_tokens += counts.cached_tokens
        self.completion_tokens += counts.completion_tokens

"""What became of a batch file, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BatchSummary:
    """What `run_batch` returns: counts of the whole file, and times of this run.

    Attributes:
        input, output: the files.
        num_lines: lines of the output.
        num_requests: output lines that answer a request, even if only with an error. A line of the input is a request
            if its custom_id can be read.
        num_errors: error lines of the output.
        num_resumed: lines that an earlier, interrupted run had written.
        prompt_tokens, cached_tokens, completion_tokens: tokens of all prompts, those of them that came from the prefix
            cache, and new tokens.
        seconds: of this run, without loading the model.
        compile_s: how many of these seconds the run waited for programs to be compiled.
        tokens_per_s: new tokens of this run per second of the others.
        peak_memory_bytes: as in `RequestMetrics`, up to the end of this run.
        default_temperature: of lines that give none; None if the output was finished already, because no model was
            loaded then.
        already_finished: the output existed and was left as it is. The counts are then those of its lines, and
            times and rates are 0.

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
    num_requests: int = 0
    num_errors: int = 0
    num_resumed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    compile_s: float = 0.0
    tokens_per_s: float = 0.0
    peak_memory_bytes: int | None = None
    default_temperature: float | None = None
    already_finished: bool = False

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"hit_rate": self.hit_rate}

    def __str__(self) -> str:
        if self.already_finished:
            return (
                f"{self.output} is finished already, {self.num_lines:,} lines, {self.num_errors:,} errors, and was "
                "left as it is; delete it to run again"
            )
        earlier = f" ({self.num_resumed:,} from an earlier run)" if self.num_resumed else ""
        compiled = self.compile_s >= 0.05
        compiling = f", {self.compile_s:,.1f} s of them compiling" if compiled else ""
        apart = " without compiling" if compiled else ""
        return (
            f"{self.output}: {self.num_lines:,} lines{earlier}, {self.num_errors:,} errors; "
            f"{self.completion_tokens:,} new tokens, {self.tokens_per_s:,.0f}/s{apart}; "
            f"{self.seconds:,.1f} s{compiling}; "
            f"{self.hit_rate:.0%} of {self.prompt_tokens:,} prompt tokens from the cache; "
            f"temperature {self.default_temperature:g} where a line gives none"
        )


def line_counts(line: Mapping[str, Any]) -> Counter[str]:
    """What one output line adds to the counts of a file, by the names that `BatchSummary` has for them."""
    if line["error"] is not None:
        is_request = line["custom_id"] is not None
        return Counter(num_lines=1, num_requests=int(is_request), num_errors=1)
    usage = line["response"]["body"]["usage"]
    return Counter(
        num_lines=1,
        num_requests=1,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
    )

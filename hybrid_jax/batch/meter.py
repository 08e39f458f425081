"""What a batch run measures of itself, and the bar that shows it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class Meter(ProgressColumn):
    """Measures a run from now on. In a bar it is the column that shows the rate and the cache hits.

    Args:
        counts: of the lines written so far, which the run goes on to count. Those that are there already come from an
            earlier run.
        compile_seconds: returns how long calls have waited for the compiler so far; any thread may ask.

    Attributes:
        num_live_tokens: counts the tokens of lines under way.
    """

    def __init__(self, counts: Counter[str], compile_seconds: Callable[[], float]) -> None:
        super().__init__()
        self.num_live_tokens: Callable[[], int] = lambda: 0
        self._counts, self._earlier = counts, counts["completion_tokens"]
        self._compile_seconds, self._compiled_before = compile_seconds, compile_seconds()
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def compile_s(self) -> float:
        """How many of these seconds went into waiting for the compiler."""
        # A replica in the place of one that has ended counts from 0 again.
        return min(max(0.0, self._compile_seconds() - self._compiled_before), self.seconds)

    @property
    def rate(self) -> float:
        """New tokens of this run per second without compiling."""
        num_tokens = self._counts["completion_tokens"] + self.num_live_tokens()
        return (num_tokens - self._earlier) / max(self.seconds - self.compile_s, 1e-9)

    def render(self, task: Task) -> Text:
        hits = self._counts["cached_tokens"] / max(self._counts["prompt_tokens"], 1)
        return Text(f"{self.rate:,.0f} tokens/s {hits:.0%} cached")

    def columns(self) -> tuple[ProgressColumn, ...]:
        """All columns of the bar."""
        return (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            self,
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )

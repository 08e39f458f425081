"""The bar of a batch run: lines, rates, cache hits and the time that is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hybrid_jax.api.progress_bar import ProgressOption, bar_on_stderr

REFRESH_S = 0.1  # counting tokens takes a moment, so it is not done after every turn


class Meter:
    """Measures a run, and shows how far it is.

    Args:
        total: lines of the input.
        report: called with (lines done, lines in all) whenever that has changed; None if nobody asked.
        update: sets the fields of a bar; None without a bar.
    """

    def __init__(
        self,
        total: int,
        *,
        report: Callable[[int, int], None] | None = None,
        update: Callable[..., None] | None = None,
    ) -> None:
        self._total, self._report, self._update = total, report, update
        self._told, self._next = -1, 0.0
        self._start, self._earlier = time.perf_counter(), 0

    def begin(self, counts: Counter[str]) -> None:
        """Starts the clock; what is counted already comes from an earlier run."""
        self._start, self._earlier = time.perf_counter(), counts["completion_tokens"]
        if self._update is not None:
            self._update(completed=counts["num_lines"])

    @property
    def seconds(self) -> float:
        """Seconds since `begin`."""
        return time.perf_counter() - self._start

    def rate(self, num_tokens: int) -> float:
        """New tokens per second of this run, if there are `num_tokens` together with an earlier run's."""
        return (num_tokens - self._earlier) / max(self.seconds, 1e-9)

    def show(self, counts: Counter[str], num_live_tokens: Callable[[], int]) -> None:
        """Shows how far the run is; `num_live_tokens` counts the tokens of lines under way, if the bar needs them."""
        done = counts["num_lines"]
        if self._report is not None and done != self._told:
            self._told = done
            self._report(done, self._total)
        now = time.perf_counter()
        if self._update is None or (now < self._next and done < self._total):
            return
        self._next = now + REFRESH_S
        hits = counts["cached_tokens"] / max(counts["prompt_tokens"], 1)
        rate = self.rate(counts["completion_tokens"] + num_live_tokens())
        self._update(completed=done, rate=f"{rate:,.0f} tokens/s", hits=f"{hits:.0%} cached")


@contextmanager
def meter(progress: ProgressOption, total: int) -> Iterator[Meter]:
    """A meter that shows a bar on stderr, calls the caller's own function, or does neither."""
    if callable(progress):
        yield Meter(total, report=progress)
    elif not progress:
        yield Meter(total)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[hits]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with bar_on_stderr("lines", *columns, total=total, rate="", hits="") as update:
            yield Meter(total, update=update)

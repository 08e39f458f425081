"""The bar of a batch run: lines, rates, cache hits and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hybrid_jax.api.progress_bar import Shown, on_screen
from hybrid_jax.batch.summary import Tally

WHAT = "lines"
REFRESH_S = 0.1  # counting is cheap, but not free


class Meter:
    """What a run tells those who watch.

    Args:
        progress: as in `run_batch`.
        total: lines of the input.
        bar, task: to draw on; None for none.
    """

    def __init__(
        self, progress: Shown, total: int, bar: Progress | None = None, task: TaskID | None = None
    ) -> None:
        self._progress, self._total, self._bar, self._task = progress, total, bar, task
        self._told, self._next = -1, 0.0
        self._start, self._earlier = time.perf_counter(), 0

    def begin(self, tally: Tally) -> None:
        """The clock starts here; what the tally holds is an earlier run's."""
        self._start, self._earlier = time.perf_counter(), tally.completion_tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=tally.num_lines)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def rate(self, num_tokens: int) -> float:
        """New tokens per second of this run, when there are `num_tokens` in all."""
        return (num_tokens - self._earlier) / max(self.seconds, 1e-9)

    def show(self, tally: Tally, num_live_tokens: Callable[[], int]) -> None:
        """Shows how far it is; `num_live_tokens` counts those of lines under way, when they are shown."""
        if callable(self._progress):
            if tally.num_lines != self._told:
                self._told = tally.num_lines
                self._progress(tally.num_lines, self._total)
            return
        now = time.perf_counter()
        if self._bar is None or (now < self._next and tally.num_lines < self._total):
            return
        self._next = now + REFRESH_S
        hits = tally.cached_tokens / tally.prompt_tokens if tally.prompt_tokens else 0.0
        self._bar.update(
            self._task,
            completed=tally.num_lines,
            rate=f"{self.rate(tally.completion_tokens + num_live_tokens()):,.0f} tokens/s",
            hits=f"{hits:.0%} cached",
        )


@contextmanager
def meter(progress: Shown, total: int) -> Iterator[Meter]:
    """A bar on stderr, the caller's own function, or nothing."""
    if callable(progress) or not progress:
        yield Meter(progress, total)
        return
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(WHAT, total=total, rate="", hits="")
        with on_screen(bar, task, WHAT):
            yield Meter(progress, total, bar, task)

"""Progress of a training: a bar on a terminal, log lines elsewhere, nothing when not asked."""

from __future__ import annotations

import time

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hybrid_jax.train.data import Corpus
from hybrid_jax.train.state import TrainProgress

LOG_EVERY = 20  # steps


class Report:
    """Shows step, bytes, bits per byte, rate and time left; a context manager."""

    def __init__(self, enabled: bool, steps: int | None, minutes: float | None) -> None:
        self.enabled, self.steps, self.minutes = enabled, steps, minutes
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self.bar: Progress | None = None
        self.held_out = "-"
        self.recent: list[float] = []
        self.clock = (time.monotonic(), 0)

    def __enter__(self) -> Report:
        if self.enabled and self.console.is_terminal:
            columns = (BarColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=self.console)
            self.bar.start()
            self.task = self.bar.add_task("compiling", total=1.0)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self.enabled:
            self.console.print(line)

    def start(self, corpus: Corpus, params: dict, at: TrainProgress) -> None:
        """Says what is trained on what, and starts the clock."""
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        train, held_out = (sum(len(d.content) for d in p) for p in (corpus.train, corpus.held_out))
        self.say(
            f"{size / 1e6:.2f} M parameters; training on {len(corpus.train)} files, {train / 1e6:.1f} MB; "
            f"held out {len(corpus.held_out)} files, {held_out / 1e6:.2f} MB; from step {at.step}"
        )
        self.clock = (time.monotonic(), at.step)

    def step(self, at: TrainProgress, bits: float, step_tokens: int, done: float) -> None:
        """After each step; `done` is the progress from 0 to 1."""
        if not self.enabled:
            return
        self.recent = [*self.recent[-(LOG_EVERY - 1) :], bits]
        if at.step % LOG_EVERY and self.bar is None:
            return
        now, (then, before) = time.monotonic(), self.clock
        rate = (at.step - before) * step_tokens / max(now - then, 1e-9)
        left = at.seconds * (1 - done) / done / 60 if done else float("nan")
        line = (
            f"step {at.step}  {at.step * step_tokens / 1e6:.2f} MB seen  rows of {at.row_len}  "
            f"loss {sum(self.recent) / len(self.recent):.3f}  held out {self.held_out} bits/byte  "
            f"{rate:.0f} bytes/s  {left:.0f} min left"
        )
        if at.step % LOG_EVERY == 0:
            self.clock = (now, at.step)
        if self.bar is None:
            self.say(line)
        else:
            self.bar.update(self.task, completed=done, description=line)

    def measured(self, at: TrainProgress, bits: float) -> None:
        """Shows a held-out measurement."""
        self.held_out = f"{bits:.3f}"
        self.say(f"step {at.step}  held-out sample {bits:.4f} bits/byte")

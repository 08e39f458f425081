"""Progress of long calls: the caller's own function, a bar on stderr, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

Shown = bool | Callable[[int, int], None]


@contextmanager
def shown(progress: Shown, what: str, *, unit: float = 1) -> Iterator[Callable[[int, int], None]]:
    """What to call with (done, total): the caller's own function, a bar on stderr, or nothing."""
    if callable(progress):
        yield progress
        return
    if not progress:
        yield lambda done, total: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done * unit, total=total * unit)

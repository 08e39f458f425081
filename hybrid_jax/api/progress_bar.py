"""Progress of long calls: the caller's own function, a bar on stderr, or nothing; and a word while it compiles."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, TaskID

Shown = bool | Callable[[int, int], None]
WIDTH = 32  # characters of "compiling ...", so that spaces hide it again
# The bars on the screen, the one begun last at the end. They are the process's, since so is its stderr.
_bars: list[tuple[Progress, TaskID, str]] = []
_told: list[
    Callable[[], None]
] = []  # what takes back that something is compiled, from where it was said


@contextmanager
def on_screen(bar: Progress, task: TaskID, what: str) -> Iterator[None]:
    """While it runs, the bar says so instead of `what` when something is compiled."""
    entry = bar, task, what
    _bars.append(entry)
    try:
        yield
    finally:
        _bars.remove(entry)


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
        with on_screen(bar, task, what):
            yield lambda done, total: bar.update(task, completed=done * unit, total=total * unit)


def show_compiling(number: int, total: int) -> None:
    """Says in the bar, or on a terminal or in a notebook, which program is compiled; 0 takes it back there."""
    with suppress(Exception):  # a terminal that went away is no business of the engine's
        while _told:
            _told.pop()()
        if not number:
            return
        text = f"compiling {number} of {total} ..."
        if _bars:
            bar, task, what = _bars[-1]
            bar.update(task, description=text)
            _told.append(lambda: bar.update(task, description=what))
        elif sys.stderr.isatty() or type(sys.stderr).__module__ == "ipykernel.iostream":
            _write(sys.stderr, f"\r{text:<{WIDTH}}")
            _told.append(functools.partial(_write, sys.stderr, f"\r{'':<{WIDTH}}\r"))


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()

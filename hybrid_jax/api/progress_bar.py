"""Progress of long calls: the caller's own function, a bar on stderr, or nothing; and a word while it compiles."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from hybrid_jax.process.streams import forgiving, is_terminal, say

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

# What callers pass as `progress=`. None is for a bar where someone looks at it, if the call takes longer than a moment.
ProgressOption = bool | Callable[[int, int], None] | None
PATIENCE = 1.0  # seconds before such a bar appears
WIDTH = 32  # characters of "compiling ...", so that spaces can cover it
# For each bar on the screen: what updates it, and what it normally says. The one begun last is at the end. The list
# belongs to the process, as stderr does.
_bars: list[tuple[Callable[..., None], str]] = []
# Calls that remove the words about compiling from wherever they were written.
_told: list[Callable[[], object]] = []


def someone_looks() -> bool:
    """Whether stderr is a terminal or a notebook."""
    return is_terminal(sys.stderr) or type(sys.stderr).__module__ == "ipykernel.iostream"


@contextmanager
def progress_of(
    progress: ProgressOption, what: str, *columns: ProgressColumn, unit: float = 1
) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (done, total): the caller's own, one that moves a bar, or one that does nothing.

    Args:
        progress: what the caller wants.
        what: the bar says this, or in its place which program is being compiled.
        columns: of the bar; none for rich's own.
        unit: of the bar, in units of done and total.
    """
    if callable(progress):
        yield progress
        return
    if not (someone_looks() if progress is None else progress):
        yield lambda done, total: None
        return
    begins = time.monotonic() + (PATIENCE if progress is None else 0.0)
    with ExitStack() as shown:
        update: Callable[..., None] | None = None

        def report(done: int, total: int) -> None:
            nonlocal update
            if update is None:
                if done == total or time.monotonic() < begins:
                    return  # at the end it would only flash up
                update = shown.enter_context(_bar(what, columns))
            update(completed=done * unit, total=total * unit)

        if progress:
            update = shown.enter_context(_bar(what, columns))
        yield report


@contextmanager
def _bar(what: str, columns: Sequence[ProgressColumn]) -> Iterator[Callable[..., None]]:
    """A bar on stderr, and what updates it."""
    from rich.console import Console
    from rich.progress import Progress

    # A file that cannot be written would have rich end the process.
    console = Console(file=forgiving(sys.stderr))
    with Progress(*columns, console=console, transient=True) as bar:
        update = functools.partial(bar.update, bar.add_task(what, total=None))
        entry = update, what
        _bars.append(entry)
        try:
            yield update
        finally:
            _bars.remove(entry)


def show_compiling(number: int, total: int) -> None:
    """Says in the bar, or on a terminal or in a notebook, which program is being compiled; 0 removes the words."""
    with suppress(Exception):  # a terminal that went away must not disturb the engine
        while _told:
            _told.pop()()
        if not number:
            return
        text = f"compiling {number} of {total} ..."
        if _bars:
            update, what = _bars[-1]
            update(description=text)
            _told.append(functools.partial(update, description=what))
        elif someone_looks():
            write = functools.partial(say, end="", to=sys.stderr)  # a bar may put its own there
            write(f"\r{text:<{WIDTH}}")
            _told.append(functools.partial(write, f"\r{'':<{WIDTH}}\r"))

"""Progress of long calls: the caller's own function, a bar on stderr, lines there, or nothing; and what is compiled.

A bar and the words about compiling are one display. On a terminal the words are a line below the bar, or a line of
their own. In a notebook both are one output, which is updated and in the end cleared. Elsewhere, as in a file, both are
plain lines, and few of them.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybrid_jax.api.plain_lines import LONG_COMPILING, SPARSE, PlainLines
from hybrid_jax.process.streams import forgiving, is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

# What callers pass as `progress=`. None is for a bar where someone looks at it, if the call takes longer than a moment,
# and elsewhere for plain lines, if it takes long.
ProgressOption = bool | Callable[[int, int], None] | None
PATIENCE = 1.0  # seconds before such a bar appears
EVERY = 0.5  # seconds between two looks at the clock
HTML_WIDTH = 100  # characters of a line in a notebook
KEPT = "; kept for next time"
COMPILING = "compiling"  # what a call does that only compiles


@dataclass(frozen=True)
class Compiling:
    """A program that is being compiled.

    Attributes:
        what: what it does, such as "reading prompts".
        count: tells which of how many programs that are needed now it is.
        kept: the next process will have it.
        since: when it began, by `time.monotonic`.
    """

    what: str
    count: Callable[[], tuple[int, int]]
    kept: bool = True
    since: float = field(default_factory=lambda: time.monotonic())

    def __str__(self) -> str:
        number, total = self.count()
        which = f", {number} of {total}" if total > 1 else ""
        seconds = time.monotonic() - self.since
        return f"compiling the program for {self.what}{which}: {seconds:.0f} s{KEPT * self.kept}"


# These belong to the process, as stderr does: the bars on the screen, the latest one last; calls that show the bars
# still waiting; what is being compiled; calls that remove the words about it where no bar shows them; and whether the
# process is a command of ours.
_bars: list[object] = []
_waiting: list[Callable[[], object]] = []
_compiling: Compiling | None = None
_alone: list[Callable[[], object]] = []
_of_a_command = False
_lines = PlainLines(lambda look: _again_and_again(look, lambda: None))


@contextmanager
def as_a_command() -> Iterator[None]:
    """Inside, the process is a command of ours, so what it shows on a terminal surprises nobody."""
    global _of_a_command
    _of_a_command = True
    try:
        yield
    finally:
        _of_a_command = False


def unasked(progress: ProgressOption, *, quiet: bool) -> ProgressOption:
    """False in place of None if nothing may be printed unasked."""
    return False if progress is None and quiet and not _of_a_command else progress


def someone_looks() -> bool:
    """Whether stderr is a terminal or a notebook."""
    return is_terminal(sys.stderr) or _in_notebook()


def _in_notebook() -> bool:
    return type(sys.stderr).__module__ == "ipykernel.iostream"


@contextmanager
def progress_of(
    progress: ProgressOption,
    what: str,
    *columns: ProgressColumn,
    unit: float = 1,
    done: int = 0,
    total: int | None = None,
) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (done, total): the caller's own, one that moves a bar or writes lines, or one of no effect.

    Args:
        progress: what the caller wants. With None the bar comes after a moment, or when something is compiled.
        what: the bar and the lines say this.
        columns: of the bar; none for rich's own.
        unit: of the bar and the lines, in units of done and total.
        done, total: at the beginning, for the lines.
    """
    if callable(progress):
        yield progress
        return
    if progress is False:
        yield lambda done, total: None
        return
    # Rich draws a bar into a file or a pipe if that variable is set.
    if not (someone_looks() or (progress and os.environ.get("FORCE_COLOR"))):
        after = LONG_COMPILING if what == COMPILING else SPARSE
        with _lines.about(what, done=done * unit, total=total, after=after) as work:
            yield lambda done, total: work.report(done * unit, total * unit)
        return
    begins = time.monotonic() + PATIENCE
    with ExitStack() as shown:
        update: Callable[..., None] | None = None
        once = threading.Lock()

        def show() -> Callable[..., None]:
            nonlocal update
            with once:
                if update is None:
                    update = shown.enter_context(_bar(what, columns))
                return update

        def report(done: int, total: int) -> None:
            # At the end it would only flash up.
            if update is None and (done == total or time.monotonic() < begins):
                return
            show()(completed=done * unit, total=total * unit)

        if progress:
            show()
        else:
            _waiting.append(show)
            shown.callback(_waiting.remove, show)
        yield report


@contextmanager
def _bar(what: str, columns: Sequence[ProgressColumn]) -> Iterator[Callable[..., None]]:
    """A bar on stderr, and what updates it. Below it stands what is being compiled."""
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.text import Text

    class Bar(Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            if _compiling is not None and _bars and _bars[-1] is self:
                yield Text(str(_compiling), style="dim")

    # A file that cannot be written would have rich end the process.
    console = Console(file=forgiving(sys.stderr))
    bar = Bar(*columns, console=console, transient=True)
    update = functools.partial(bar.update, bar.add_task(what, total=None))
    with ExitStack() as shown:
        if _in_notebook():
            shown.callback(_in_one_output(lambda: _html(bar)))
        else:
            shown.enter_context(bar)
        _bars.append(bar)
        shown.callback(_bars.remove, bar)
        yield update


def show_compiling(
    what: str,
    count: Callable[[], tuple[int, int]] | None,
    *,
    kept: bool = True,
    quiet: bool = False,
) -> None:
    """Says in the bar, on a terminal, in a notebook or in a line now and then, which program is being compiled.

    Args:
        what: what the program does. count: tells which of how many it is; None removes the words.
        kept: the next process will have it.
        quiet: it is said only where a bar or lines tell of the call.
    """
    global _compiling
    with suppress(Exception):  # a terminal that went away must not disturb the engine
        while _alone:
            _alone.pop()()
        _compiling = None if count is None else Compiling(what, count, kept)
        if _compiling is None:
            return
        if _waiting and not _bars:
            _waiting[-1]()
        if _bars or (unasked(None, quiet=quiet) is False and not _lines.used):
            return
        if not someone_looks():
            _alone.append(_lines.show(_compiling, LONG_COMPILING))
        else:
            show = functools.partial(_in_one_output, _words_as_html)
            _alone.append(show() if _in_notebook() else _in_one_line(_words))


def _words() -> str:
    """What is being compiled; empty if nothing is, or if a bar says it."""
    return "" if _compiling is None or _bars else str(_compiling)


def _words_as_html() -> str:
    return f"<small>{_words()}</small>" if _words() else ""


def _in_one_line(words: Callable[[], str]) -> Callable[[], object]:
    """Keeps writing words over the terminal's last line; returns what ends that and leaves the line empty."""
    # A bar that comes later puts another stream in the place of stderr.
    written, stream = "", forgiving(sys.stderr)

    def put(text: str) -> None:
        stream.write(text)
        stream.flush()

    def write() -> None:
        nonlocal written
        text = words()
        put(f"\r{text:<{len(written)}}")
        written = text

    def wipe() -> None:
        put(f"\r{'':<{len(written)}}\r")

    return _again_and_again(write, wipe)


def _in_one_output(html: Callable[[], str]) -> Callable[[], object]:
    """Keeps one output of a notebook up to date; returns what ends that and clears it."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(html()), display_id=True)
    return _again_and_again(lambda: handle.update(HTML(html())), lambda: handle.update(HTML("")))


def _again_and_again(show: Callable[[], object], end: Callable[[], object]) -> Callable[[], object]:
    """Calls `show` now and then again and again in a thread; returns what stops that and calls `end`."""
    over = threading.Event()

    def run() -> None:
        with suppress(Exception):  # whoever looked has gone
            while not over.wait(EVERY):
                show()

    show()
    thread = threading.Thread(target=run, name="hybrid_jax-progress", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()
        end()

    return stop


def _html(bar: Progress) -> str:
    """A bar as a notebook shows it."""
    from rich.console import Console

    # In a notebook rich would show what is printed, in an output of its own each time.
    console = Console(
        file=io.StringIO(), record=True, width=HTML_WIDTH, force_terminal=True, force_jupyter=False
    )
    console.print(bar.get_renderable())
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

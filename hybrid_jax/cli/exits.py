"""How a command writes and ends: results on stdout, one line for a mistake of the caller, an exit code."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid_jax.api.workers.link import WorkerLost
from hybrid_jax.cli.words import flags_of, flags_of_command, hint, shell_words
from hybrid_jax.display import text_rows
from hybrid_jax.process.ending import INTERRUPTED
from hybrid_jax.process.extras import MissingExtra
from hybrid_jax.process.streams import encoding_of, is_terminal, say

PACKAGE = Path(__file__).resolve().parents[1]
POOLS = PACKAGE.parent / "benchmarks" / "pools"  # of a clone: what `pool-sim` runs
# How typer words the message about a wrong value.
VALID = re.compile(
    r"Input should be a valid (integer|number)(?:, unable to parse string as an? \w+)?"
)
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line ends
KEPT_BYTES = re.compile("[\udc80-\udcff]")
A = {"integer": "an integer", "number": "a number"}
UTF_8 = ("utf-8", "utf8")  # how Python writes it
CALLERS_MISTAKES = (ValueError, NotImplementedError, OSError, MissingExtra, WorkerLost)

JsonOption = Annotated[
    bool, typer.Option("--json", help="One machine-readable object on stdout instead of text.")
]


class Interrupted(Exception):
    """Ctrl-C, with what there is to say about it."""


class StdoutError(Exception):
    """Results cannot be written to stdout."""


def write(text: str = "", *, end: str = "\n", flush: bool = False) -> None:
    """Prints a result.

    Raises:
        StdoutError: stdout is closed or full. BrokenPipeError: its reader has gone.
    """
    if sys.stdout is None:
        raise StdoutError("stdout is closed")
    with _writing():
        print(text, end=end, flush=flush)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(f"cannot write to stdout: {error.strerror}") from error


class _Stdout:
    """stdout for libraries that write on it, such as the one that writes help: they raise what `write` raises."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _writing():
            return self._stream.write(text)

    def flush(self) -> None:
        with _writing():
            self._stream.flush()


def for_terminal(text: str) -> str:
    """What a model wrote; on a terminal, without characters that would move the cursor or change colours."""
    return CONTROLS.sub("\ufffd", text) if is_terminal(sys.stdout) else text


def write_json(value: dict[str, Any]) -> None:
    """Prints an object as a result."""
    write(json.dumps(value, indent=2, ensure_ascii=encoding_of(sys.stdout).lower() not in UTF_8))


def write_rows(rows: dict[str, str]) -> None:
    """Writes names and values, the values below each other."""
    for line in text_rows(rows):
        write(line)


def note(text: str) -> None:
    """One line on stderr."""
    say(f"hybrid-jax: {' '.join(text.split())}")


def read_stdin(where: str) -> str:
    """All of stdin. Bytes that are not UTF-8 stay in it as surrogates, which the check of prompts will find."""
    if sys.stdin is None:
        raise ValueError(f"{where}: stdin is closed, but a prompt should be read from it")
    return sys.stdin.read()


def typed(text: str) -> str:
    """A text that was typed as an argument: UTF-8, also in a locale without it, where Python keeps its bytes."""
    return os.fsencode(text).decode(errors="surrogateescape") if KEPT_BYTES.search(text) else text


def text_of(option: str, path: Path) -> str:
    """The text of the file that an option names.

    Raises:
        ValueError: it is not UTF-8. OSError: it cannot be read.
    """
    from hybrid_jax.text.prompts import check_unicode

    text = path.read_bytes().decode(errors="surrogateescape")
    check_unicode(f"{option} {path}", text)
    return text


def run(app: typer.Typer, arguments: list[str]) -> None:
    """Runs one command and exits with its code."""
    if sys.stderr is None:  # print(file=None) would go to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    # Generated text must not fail on a terminal that cannot show all characters.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    given, words = sys.stdout, "interrupted"
    sys.stdout = given and _Stdout(given)
    warned = _Warned(logging.WARNING)
    logging.getLogger("hybrid_jax").addHandler(warned)
    try:
        code: Any = app(args=arguments, prog_name="hybrid-jax", standalone_mode=False)
        # Help is written by a library, which says nothing.
        if sys.stdout is not None or "--help" in arguments:
            write(end="", flush=True)
    except (BrokenPipeError, StdoutError) as error:
        if isinstance(error, StdoutError):  # otherwise the reader has gone, as `head` goes
            note(str(error))
        _forget_stdout()
        code = 1
    except Interrupted as error:
        code, words = INTERRUPTED, str(error)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        code = _report(error, flags_of(app, arguments), arguments)
    finally:
        sys.stdout = given
        logging.getLogger("hybrid_jax").removeHandler(warned)
    if code == INTERRUPTED:  # also what typer makes of Ctrl-C
        with suppress(ValueError):  # this is not the main thread
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        note(words)
    sys.exit(code if isinstance(code, int) else 0)


class _Warned(logging.Handler):
    """Writes what the library warns of, such as a folder that is full."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def _forget_stdout() -> None:
    """Drops what is still in stdout's buffer, so that Python does not fail on it when it ends."""
    with suppress(OSError, AttributeError):  # there is no stream, or it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception, flags: dict[str, str], arguments: list[str]) -> int:
    """Says what went wrong, and returns the exit code: one line for a caller's mistake, a traceback for a bug here."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's usage errors
        note(_usage_message(error))
        return error.exit_code
    if isinstance(error, OSError) and error.filename is not None:  # a file that was named
        file = str(error.filename)
        pairs = zip(arguments, arguments[1:], strict=False)
        option = next((o for o, value in pairs if value == file and o.startswith("-")), None)
        note(f"{option} {file}: {error.strerror}" if option else f"{error.strerror}: {file}")
        return 2
    if isinstance(error, CALLERS_MISTAKES) and _raised_by_us(error):
        note(shell_words(str(error), flags))
        return 2
    traceback.print_exception(error)
    return 1


def _usage_message(error: Any) -> str:
    """typer's own message, with the wrong value, which some versions give only in the cause."""
    if (option := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        flags = flags_of_command(error.ctx.command)
        return f"No such option: {option}; {hint(option, flags, error.ctx.command_path)}"
    text = VALID.sub(lambda found: f"must be {A[found[1]]}", error.format_message())
    details = getattr(error.__cause__, "errors", None)
    for detail in details() if callable(details) else ():
        if repr(detail.get("input")) not in text:
            text += f", got {detail.get('input')!r}"
    return text


def _raised_by_us(error: Exception) -> bool:
    """Whether the innermost frame is in this package. Errors raised by libraries are not the caller's mistakes."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    last = Path(frames[-1].filename).resolve()
    return last.is_relative_to(PACKAGE) or last.is_relative_to(POOLS)

"""How a command writes and how it ends: results to stdout, one line for a caller's mistake, an exit code."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import typer

from hybrid_jax.cli.words import Options, shell_words

PACKAGE = Path(__file__).resolve().parents[1]
# How typer's checker of values says it.
VALID = re.compile(
    r"Input should be a valid (integer|number)(?:, unable to parse string as an? \w+)?"
)
A = {"integer": "an integer", "number": "a number"}
CALLERS_MISTAKES = (ValueError, NotImplementedError, OSError)


class StdoutError(Exception):
    """Results could not be written."""


def write(text: str = "", *, end: str = "\n", flush: bool = False) -> None:
    """Prints a result.

    Raises:
        StdoutError: stdout is closed or full. BrokenPipeError: its reader went away.
    """
    if sys.stdout is None:
        raise StdoutError("stdout is closed")
    try:
        print(text, end=end, flush=flush)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(f"cannot write to stdout: {error.strerror}") from error


def write_json(value: dict) -> None:
    """Prints an object as a result."""
    write(json.dumps(value, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """One line on stderr."""
    print(f"hybrid-jax: {' '.join(text.split())}", file=sys.stderr)


def read_stdin(where: str) -> str:
    """All of stdin; bytes that are no UTF-8 come as Python carries them, for the prompt's own check."""
    if sys.stdin is None:
        raise ValueError(f"{where}: stdin is closed, and a prompt is to be read from it")
    return sys.stdin.read()


def run(app: Callable, arguments: list[str]) -> None:
    """Runs one command and exits with its code."""
    if sys.stderr is None:  # print(file=None) would go to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # generated text must not fail on a narrow terminal
            stream.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        code = app(args=arguments, prog_name="hybrid-jax", standalone_mode=False)
        if sys.stdout is not None:
            write(end="", flush=True)
    except BrokenPipeError:  # the reader went away, as `head` does
        _forget_stdout()
        code = 1
    except StdoutError as error:
        note(str(error))
        _forget_stdout()
        code = 1
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        code = _report(error, Options.of(app, arguments))
    sys.exit(code if isinstance(code, int) else 0)


def _forget_stdout() -> None:
    """What is still in stdout's buffer goes nowhere, so that Python does not fail on it at its exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception, options: Options) -> int:
    """One line for a caller's mistake, in words of the shell; all there is for a mistake of ours. Returns the code."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's usage errors
        note(_usage_message(error))
        return error.exit_code
    if isinstance(error, OSError) and error.filename is not None:  # a file that was named
        note(f"{error.strerror}: {error.filename}")
        return 2
    if isinstance(error, CALLERS_MISTAKES) and _raised_by_us(error):
        note(shell_words(str(error), options))
        return 2
    traceback.print_exception(error)
    return 1


# Options that older versions had, and what to do without them.
GONE = {"--kv-quota": "one order of value over pages and checkpoints does as well; leave it out"}


def _usage_message(error: Exception) -> str:
    """typer's own, and the value that was wrong, which some versions leave to the cause."""
    text = VALID.sub(lambda found: f"must be {A[found[1]]}", error.format_message())
    gone = GONE.get(getattr(error, "option_name", ""))
    if gone is not None:
        return f"{text}: {gone}"
    details = getattr(error.__cause__, "errors", None)
    for detail in details() if callable(details) else ():
        if repr(detail.get("input")) not in text:
            text += f", got {detail.get('input')!r}"
    return text


def _raised_by_us(error: Exception) -> bool:
    """Whether the innermost frame is this package's: errors of libraries are not the caller's."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)

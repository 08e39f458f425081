"""What this package says on streams that are missing, closed, narrow or broken."""

from __future__ import annotations

import io
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_jax.api.progress_bar import progress_of, show_compiling, someone_looks
from hybrid_jax.process.importing import undisturbed
from hybrid_jax.process.streams import Forgiving, encoding_of, is_terminal, say


class Broken:
    """A stream that fails at everything."""

    encoding = None

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    flush = isatty = fileno = write


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {
    "none": lambda: None,
    "closed": closed,
    "broken": Broken,
    "bare": lambda: SimpleNamespace(write=len),
    "nothing": object,
}


@pytest.fixture(params=STREAMS)
def stream(request, monkeypatch):
    made = STREAMS[request.param]()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_no_stream_is_a_terminal_unless_it_says_so(stream):
    assert not is_terminal(stream) and not someone_looks()
    assert is_terminal(SimpleNamespace(isatty=lambda: True))
    assert encoding_of(stream) == "utf-8"


def test_nothing_that_is_said_raises(stream):
    say("a word")
    show_compiling("reading prompts", lambda: (1, 2))
    show_compiling("", None)


def test_a_bar_that_cannot_be_shown_is_left_out(stream):
    with progress_of(True, "loading") as report:
        report(1, 2)
        show_compiling("reading prompts", lambda: (1, 2))
        show_compiling("", None)


def test_a_terminal_that_goes_away_does_not_end_the_process(monkeypatch):
    terminal = Broken()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_of(True, "loading") as report:
        report(1, 2)
    show_compiling("reading prompts", lambda: (1, 2))
    show_compiling("", None)


def test_what_a_stream_has_no_character_for_is_a_question_mark():
    raw = io.BytesIO()
    out = Forgiving(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    assert out.encoding == "ascii" and out.write("1 \N{EURO SIGN}, please") == 11
    assert raw.getvalue() == b"1 ?, please"
    out.close()
    out.write(".")
    assert raw.getvalue().endswith(b"please.")


def test_what_is_said_never_goes_to_stdout(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    say("a word")
    assert capsys.readouterr().out == ""


def test_imports_draw_no_number_of_the_callers_and_close_nothing(monkeypatch):
    random.seed(1)
    np.random.seed(1)
    wanted = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    stdout = Broken()
    monkeypatch.setattr(sys, "stdout", stdout)
    with undisturbed():
        assert sys.stdout.isatty() is False
        print("a library speaks", random.random(), np.random.random())
    assert sys.stdout is stdout
    monkeypatch.undo()
    assert (random.random(), np.random.random()) == wanted

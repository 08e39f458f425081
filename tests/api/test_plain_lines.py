"""Progress where stderr is a file or a pipe: few lines, and none where none is wanted."""

from __future__ import annotations

import re
import time

import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.api import progress_bar
from hybrid_jax.api.plain_lines import PlainLines, duration
from hybrid_jax.api.progress_bar import progress_of, show_compiling


class Clock:
    """A clock that stands still, and the lines that are written by it."""

    def __init__(self):
        self.now, self.lines, self.watched = 1000.0, [], 0
        self.plain = PlainLines(self.watch, clock=lambda: self.now, write=self.lines.append)

    def watch(self, look):
        self.watched += 1
        return lambda: setattr(self, "watched", self.watched - 1)

    def pass_by(self, seconds):
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.plain.look()


@pytest.fixture
def clock(monkeypatch):
    """The lines of the process, by a clock that stands still."""
    found = Clock()
    monkeypatch.setattr(progress_bar, "_lines", found.plain)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: found.now)
    return found


def test_a_short_call_writes_nothing(clock):
    with progress_of(None, "generating", total=3) as report:
        clock.pass_by(29)
        report(3, 3)
    clock.pass_by(100)
    assert clock.lines == [] and not clock.watched


def test_a_long_call_writes_a_line_every_half_minute(clock):
    with progress_of(None, "generating", total=200) as report:
        clock.pass_by(30)
        report(20, 200)
        clock.pass_by(570)
    assert len(clock.lines) == 20
    assert clock.lines[:2] == [
        "generating: 0/200, 0:30 elapsed",
        "generating: 20/200, 0.333/s, 1:00 elapsed, 9:00 left",
    ]
    assert not clock.watched


def test_what_an_earlier_run_did_is_not_in_the_rate(clock):
    with progress_of(None, "lines", done=100, total=200) as report:
        clock.pass_by(29.5)
        report(130, 200)
        clock.pass_by(0.5)
    assert clock.lines == ["lines: 130/200, 1/s, 0:30 elapsed, 1:10 left"]


def test_compiling_begins_with_a_line_that_has_the_total(clock):
    number = 1
    show_compiling("reading prompts", lambda: (number, 4))
    clock.pass_by(0.5)
    assert clock.lines == []  # a program on the disk takes no longer
    clock.pass_by(1)
    number = 3
    clock.pass_by(35)
    show_compiling("", None)
    show_compiling("writing tokens", lambda: (4, 4))
    clock.pass_by(10)
    show_compiling("", None)
    assert clock.lines == [
        "compiling the program for reading prompts, 1 of 4: 1 s; kept for next time",
        "compiling the program for reading prompts, 3 of 4: 31 s; kept for next time",
    ]
    assert not clock.watched


def test_a_line_tells_of_the_call_and_of_what_it_compiles(clock):
    with progress_of(None, "generating", total=5):
        clock.pass_by(29)
        show_compiling("writing tokens", lambda: (1, 1), kept=False)
        clock.pass_by(1)
        show_compiling("", None)
    assert clock.lines == [
        "generating: 0/5, 0:30 elapsed; compiling the program for writing tokens: 1 s"
    ]


def test_a_warm_up_says_at_once_what_it_does(clock):
    with progress_of(None, "compiling") as report:
        report(0, 40)
        clock.pass_by(2)
    assert clock.lines == ["compiling: 0/40, 0:01 elapsed"]


def test_calls_after_one_another_share_the_half_minute(clock):
    """A program that makes many calls gets no more lines than one with a long call."""
    for _ in range(100):
        show_compiling("writing tokens", lambda: (1, 1))
        clock.pass_by(3)
        show_compiling("", None)
    assert len(clock.lines) == 10


def test_who_wants_no_bar_gets_no_line(clock):
    with progress_of(False, "generating", total=5):
        show_compiling("writing tokens", lambda: (1, 2), quiet=True)
        clock.pass_by(100)
        show_compiling("", None)
    assert clock.lines == []
    with progress_of(True, "generating", total=5):
        show_compiling("writing tokens", lambda: (1, 2), quiet=True)
        clock.pass_by(2)
        show_compiling("", None)
    assert len(clock.lines) == 1


@pytest.mark.parametrize(
    ("quiet", "options", "lines"),
    [
        (False, {}, 1),
        (True, {}, 0),
        (False, {"use_tqdm": False}, 0),
        (False, {"progress": False}, 0),
        (True, {"use_tqdm": True}, 1),
        (True, {"progress": True}, 1),
    ],
)
def test_each_way_to_ask(make_llm, clock, monkeypatch, quiet, options, lines):
    llm = make_llm(quiet=quiet)
    step = type(llm._engine).step

    def slow(engine):
        if not clock.lines and clock.now < 1040:
            clock.pass_by(40)
        return step(engine)

    monkeypatch.setattr(type(llm._engine), "step", slow)
    llm.generate(["ab", "cd"], SamplingParams(max_tokens=8), **options)
    assert len(clock.lines) == lines, clock.lines
    assert all(line.startswith("generating: 0/2") for line in clock.lines)


def test_lines_go_to_stderr_from_a_thread_of_their_own(monkeypatch, capfd):
    monkeypatch.setattr(progress_bar, "EVERY", 0.01)
    lines = PlainLines(lambda look: progress_bar._again_and_again(look, lambda: None))
    lines._last = time.monotonic()
    with lines.about("generating", total=2, after=0.0):
        lines._last = None  # from now on a line may come
        while lines._last is None:
            time.sleep(0.01)
    assert re.fullmatch(r"generating: 0/2, 0:0\d elapsed\n", capfd.readouterr().err)


def test_long_times_have_hours():
    assert [duration(s) for s in (0.4, 59.7, 3599.6, 90_000)] == [
        "0:00",
        "1:00",
        "1:00:00",
        "25:00:00",
    ]

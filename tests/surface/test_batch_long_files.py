"""Long batch files: what is held stays bounded, the engine never waits, and progress is told."""

from __future__ import annotations

import gc

import pytest

from hybrid_jax import llm as llm_module
from hybrid_jax import run_batch
from hybrid_jax.batch import run as run_module
from hybrid_jax.completions import Job
from hybrid_jax.feed import Ticket
from tests.surface.batch_files import SeededEngine, ids, line, write
from tests.surface.fake_engine import FakeEngine


class Watched(SeededEngine):
    """Notes how much is held at each step."""

    most_requests = most_jobs = 0

    def step(self):
        Watched.most_requests = max(Watched.most_requests, len(self.requests))
        if self.num_steps % 50 == 0:
            jobs = sum(isinstance(thing, Job) for thing in gc.get_objects())
            Watched.most_jobs = max(Watched.most_jobs, jobs)
        return super().step()


@pytest.mark.parametrize("slow_first", [False, True])
def test_what_is_held_does_not_grow_with_the_file(make_llm, monkeypatch, files, slow_first):
    monkeypatch.setattr(llm_module, "Engine", Watched)
    monkeypatch.setattr(run_module, "MAX_HELD_LINES", 100)
    Watched.most_requests = Watched.most_jobs = 0
    source, output = files
    lines = [line(f"{index}", max_tokens=2) for index in range(3000)]
    lines[0]["body"]["max_tokens"] = 150 if slow_first else 2
    write(source, lines)
    llm, held = make_llm(max_rows=4, steps_per_dispatch=1), []
    append = run_module.PartialOutput.append

    def watching(self, lines):
        held.append(len(lines))
        append(self, lines)

    monkeypatch.setattr(run_module.PartialOutput, "append", watching)
    run_batch(source, output, llm)
    assert ids(output) == [f"{index}" for index in range(3000)]
    assert Watched.most_requests == 4 * run_module.LIVE_PER_ROW
    assert Watched.most_jobs <= 4 * run_module.LIVE_PER_ROW + 1  # one was answered just now
    assert max(held) <= 100
    assert (max(held) == 100) == slow_first  # answers waited for the first line, up to the limit


def test_every_choice_counts_and_each_is_looked_at_a_few_times_only(make_llm, monkeypatch, files):
    monkeypatch.setattr(llm_module, "Engine", Watched)
    Watched.most_requests = 0
    source, output = files
    write(source, [line(f"{index}", n=3, max_tokens=2) for index in range(600)])
    looks, count = [], Ticket.num_unfinished.fget
    monkeypatch.setattr(
        Ticket, "num_unfinished", property(lambda t: (looks.append(t), count(t))[1])
    )
    run_batch(source, output, make_llm(max_rows=16, steps_per_dispatch=1))
    most = 16 * run_module.LIVE_PER_ROW
    assert most <= Watched.most_requests < most + 3
    assert len(looks) <= 20 * 600  # in two passes a turn; one for each line would make it 43


def test_the_engine_does_not_wait_for_a_file_of_mistakes(make_llm, monkeypatch, files):
    source, output = files
    write(source, [line("long", max_tokens=150)])
    with open(source, "a") as file:
        file.write("{}\n" * 3000)
    events, step, start = [], FakeEngine.step, run_module.Run._start
    monkeypatch.setattr(FakeEngine, "step", lambda e: (events.append("step"), step(e))[1])
    monkeypatch.setattr(run_module.Run, "_start", lambda *a: (events.append("line"), start(*a))[1])
    run_batch(source, output, make_llm(max_rows=2, steps_per_dispatch=1))
    between = "".join(event[0] for event in events).split("s")
    assert max(map(len, between[:-1])) == 2 * run_module.LIVE_PER_ROW


def test_held_bytes_are_bounded_too(make_llm, monkeypatch, files):
    source, output = files
    monkeypatch.setattr(run_module, "MAX_HELD_BYTES", 10_000)
    sizes, append = [], run_module.PartialOutput.append

    def watching(self, lines):
        sizes.append(sum(map(len, lines)))
        append(self, lines)

    monkeypatch.setattr(run_module.PartialOutput, "append", watching)
    lines = [line(f"{index}", max_tokens=1) for index in range(300)]
    lines[0]["body"]["max_tokens"] = 190
    write(source, lines)
    run_batch(source, output, make_llm(max_rows=2, steps_per_dispatch=1))
    assert len(ids(output)) == 300
    assert 10_000 < max(sizes) < 10_000 + 20 * 500


def test_progress_is_told_as_lines_are_written(llm, files):
    source, output = files
    write(source, [line(f"{index}", max_tokens=1 + 9 * (index == 7)) for index in range(40)])
    told = []
    run_batch(source, output, llm, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (40, 40)
    assert told == sorted(set(told))
    assert {total for _, total in told} == {40}


def test_the_bar_shows_rates_and_hits(llm, files, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    source, output = files
    write(source, [line("a"), line("b", prompt="x" * 100), line("c", prompt="x" * 100)])
    run_batch(source, output, llm, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in ("3/3", "tokens/s", "cached", "left"):
        assert part in captured.err

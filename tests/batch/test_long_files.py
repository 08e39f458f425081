"""Long batch files: what is held stays bounded, the engine never waits, and progress is told."""

from __future__ import annotations

import gc

import pytest

from hybrid_jax import run_batch
from hybrid_jax.api import starting
from hybrid_jax.api.completions import Job
from hybrid_jax.api.feed import Ticket
from hybrid_jax.batch import run as run_module
from hybrid_jax.batch.run import Entry
from tests.api.fake_engine import FakeEngine
from tests.batch.batch_files import SeededEngine, ids, line, write

LINES = 1000


class Watched(SeededEngine):
    """Notes how much is held at each step."""

    most_requests = most_jobs = most_entries = 0

    def step(self):
        Watched.most_requests = max(Watched.most_requests, len(self.requests))
        if self.num_steps % 50 == 0:
            kinds = [type(thing) for thing in gc.get_objects()]
            Watched.most_jobs = max(Watched.most_jobs, kinds.count(Job))
            Watched.most_entries = max(Watched.most_entries, kinds.count(Entry))
        return super().step()


@pytest.mark.parametrize("slow_first", [False, True])
def test_what_is_held_does_not_grow_with_the_file(make_llm, monkeypatch, files, slow_first):
    monkeypatch.setattr(starting, "Engine", Watched)
    monkeypatch.setattr(run_module, "MAX_LINES", 100)
    Watched.most_requests = Watched.most_jobs = Watched.most_entries = 0
    source, output = files
    lines = [line(f"{index}", max_tokens=2) for index in range(LINES)]
    lines[0]["body"]["max_tokens"] = 150 if slow_first else 2
    write(source, lines)
    llm, written = make_llm(max_rows=4, steps_per_dispatch=1), []
    append = run_module.PartialOutput.append

    def watching(self, lines):
        written.append(list(lines))
        append(self, written[-1])

    monkeypatch.setattr(run_module.PartialOutput, "append", watching)
    gc.collect()  # what other tests left
    run_batch(source, output, llm)
    assert ids(output) == [f"{index}" for index in range(LINES)]
    most_live = 4 * run_module.LIVE_PER_ROW
    assert Watched.most_requests == most_live
    assert Watched.most_jobs <= most_live + 1  # one was answered just now
    assert 100 < Watched.most_entries <= 100 + most_live + 1
    assert max(map(len, written)) <= 4  # nobody waits for the first line
    places = [place for lines in written for place, _ in lines]
    assert (places == sorted(places)) == (not slow_first)


def test_every_choice_counts_and_each_is_looked_at_a_few_times_only(make_llm, monkeypatch, files):
    monkeypatch.setattr(starting, "Engine", Watched)
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


@pytest.fixture
def between_turns(monkeypatch):
    """Lines read before each turn of the engine that had something to do, filled in while a run goes on."""
    counts, step, read = [0], FakeEngine.step, run_module.Run._read
    monkeypatch.setattr(FakeEngine, "step", lambda engine: (counts.append(0), step(engine))[1])

    def counting(run, line, feed):
        counts[-1] += 1
        read(run, line, feed)

    monkeypatch.setattr(run_module.Run, "_read", counting)
    return counts


def test_the_engine_does_not_wait_for_a_file_of_mistakes(make_llm, between_turns, files):
    source, output = files
    write(source, [line("long", max_tokens=150)])
    with open(source, "a") as file:
        file.write("{}\n" * 3000)
    run_batch(source, output, make_llm(max_rows=2, steps_per_dispatch=1))
    assert max(between_turns) == run_module.READ_LINES
    assert sum(between_turns) == 3001


def test_the_engine_does_not_wait_for_long_lines(make_llm, between_turns, files):
    source, output = files
    write(source, [line(f"{index}", user="u" * 60_000) for index in range(40)])
    run_batch(source, output, make_llm(max_rows=1, steps_per_dispatch=1))
    assert max(between_turns) == run_module.READ_BYTES // 60_000 + 1
    assert sum(between_turns) == 40


def test_nothing_is_read_ahead_beyond_the_limit_of_bytes(make_llm, monkeypatch, files):
    source, output = files
    monkeypatch.setattr(run_module, "MAX_BYTES", 10_000)
    lines = [line(f"{index}", user="u" * (index % 500), max_tokens=1) for index in range(300)]
    lines[7]["body"]["prompt"] = "x" * 150
    write(source, lines)
    sizes, add = [], run_module.Ahead.add
    monkeypatch.setattr(
        run_module.Ahead, "add", lambda a, e: (add(a, e), sizes.append(a._num_bytes))
    )
    run_batch(source, output, make_llm(max_rows=2, steps_per_dispatch=1))
    assert len(ids(output)) == 300
    longest = max(map(len, source.read_bytes().splitlines()))
    assert 10_000 <= max(sizes) < 10_000 + longest


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

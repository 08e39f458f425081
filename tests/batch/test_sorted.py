"""Answers lie in the partial file as they came, and in the output in the order of the input, whatever happens."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path

import pytest

from hybrid_jax import run_batch
from hybrid_jax.api import starting
from hybrid_jax.batch import BatchStopped, partial_path
from hybrid_jax.batch import partial as partial_module
from hybrid_jax.batch import run as run_module
from hybrid_jax.batch.partial import sidecar_path, sorted_path
from tests.batch.batch_files import (
    SeededEngine,
    Stop,
    answers,
    ids,
    line,
    mixed_lines,
    read,
    stop_at,
    write,
)

NUM_LINES = 60


@pytest.fixture
def make_seeded(make_llm, monkeypatch):
    monkeypatch.setattr(starting, "Engine", SeededEngine)
    return make_llm


@pytest.fixture
def files(files):
    """The same paths, with lines of all kinds in the input."""
    return write(files[0], mixed_lines(NUM_LINES)), files[1]


@pytest.fixture
def expected(files, make_seeded):
    """What an undisturbed run answers; nothing else is left of it."""
    run_batch(*files, make_seeded())
    found = answers(files[1])
    files[1].unlink()
    return found


def interrupted(files, llm, at=NUM_LINES // 3):
    """Stops a run when about `at` lines are written; returns the partial file."""
    with pytest.raises(Stop):
        run_batch(*files, llm, progress=stop_at(at))
    return partial_path(files[1])


def names_in(folder):
    return sorted(os.listdir(folder))


def in_order(path, files):
    """Whether the answers of a file follow the input's order."""
    order = {entry["custom_id"]: place for place, entry in reversed([*enumerate(read(files[0]))])}
    places = [order[name] for name in ids(path)]
    return places == sorted(places)


def test_answers_lie_as_they_come_until_all_are_there(make_seeded, files, expected):
    path = interrupted(files, make_seeded(), 40)
    assert not in_order(path, files)
    run_batch(*files, make_seeded())
    assert answers(files[1]) == expected
    assert names_in(path.parent) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("at", [1, 7, 30, 59, 60])
@pytest.mark.parametrize("seed", [0, 1])
def test_lines_in_any_order_are_taken_over_and_the_missing_ones_computed(
    make_seeded, files, expected, monkeypatch, at, seed
):
    with monkeypatch.context() as patch:
        patch.setattr(partial_module.PartialOutput, "finish", lambda self: stop_at(0)(1, 1))
        path = interrupted(files, make_seeded(), NUM_LINES + 1)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == NUM_LINES
    random.Random(seed).shuffle(lines)
    path.write_bytes(b"".join(lines[:at]) + lines[0][:50])
    read_lines, real = [], run_module.Run._read
    monkeypatch.setattr(
        run_module.Run,
        "_read",
        lambda run, line, feed: (read_lines.append(line), real(run, line, feed)),
    )
    summary = run_batch(*files, make_seeded())
    assert summary.num_resumed == at
    assert len(read_lines) == NUM_LINES - at
    assert answers(files[1]) == expected


def test_a_run_stopped_after_every_few_lines_gets_there(make_seeded, files, expected):
    path, stops = partial_path(files[1]), 0
    while not files[1].exists():
        known = path.read_bytes().count(b"\n") if path.exists() else 0
        try:
            run_batch(*files, make_seeded(max_rows=3), progress=stop_at(known + 5))
        except Stop:
            stops += 1
    assert stops > 4
    assert answers(files[1]) == expected


# --- the last steps -------------------------------------------------------------------------------

LAST_STEPS = ["open", "half", "sync", "rename", "folder", "partial", "sidecar"]


def kill_before(step, output, patch, error=Stop):
    """Makes one of the last steps of a run fail."""

    def failing_if(real, condition):
        def failing(*arguments, **options):
            if condition(*arguments):
                raise error
            return real(*arguments, **options)

        return failing

    def is_path(path):
        return lambda *arguments: path in arguments

    class Half(io.BufferedWriter):
        num_lines = 0

        def write(self, data):
            self.num_lines += 1
            if self.num_lines > NUM_LINES // 2:
                raise error
            return super().write(data)

    if step == "open":
        patch.setattr("builtins.open", failing_if(open, is_path(sorted_path(output))))
    elif step == "half":
        real, path = open, sorted_path(output)
        patch.setattr(
            "builtins.open", lambda p, *a: Half(io.FileIO(p, "w")) if p == path else real(p, *a)
        )
    elif step == "sync":
        patch.setattr(partial_module.os, "fsync", failing_if(os.fsync, lambda _: True))
    elif step == "rename":
        patch.setattr(partial_module.os, "replace", failing_if(os.replace, is_path(output)))
    elif step == "folder":
        patch.setattr(
            partial_module, "_sync_folder", failing_if(partial_module._sync_folder, lambda _: True)
        )
    else:
        path = {"partial": partial_path, "sidecar": sidecar_path}[step](output)
        patch.setattr(Path, "unlink", failing_if(Path.unlink, is_path(path)))


@pytest.mark.parametrize("step", LAST_STEPS)
def test_a_kill_before_any_of_the_last_steps_costs_nothing(
    make_seeded, files, expected, monkeypatch, step
):
    source, output = files
    with monkeypatch.context() as patch:
        kill_before(step, output, patch)
        with pytest.raises(Stop):
            run_batch(*files, make_seeded())
    renamed = step in LAST_STEPS[4:]
    assert output.exists() == renamed
    if renamed:
        assert answers(output) == expected
    else:
        assert len(read(partial_path(output))) == NUM_LINES
    assert sorted_path(output).exists() == (step in ("half", "sync", "rename"))
    assert sidecar_path(output).exists()
    summary = run_batch(*files, make_seeded())
    assert (summary.already_finished, summary.num_resumed) == (
        renamed,
        0 if renamed else NUM_LINES,
    )
    assert answers(output) == expected
    assert names_in(source.parent) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("step", ["open", "half", "sync", "rename"])
def test_a_disk_that_is_full_at_the_end_costs_nothing(
    make_seeded, files, expected, monkeypatch, step
):
    source, output = files
    with monkeypatch.context() as patch:
        kill_before(step, output, patch, OSError(28, "No space left on device"))
        with pytest.raises(
            BatchStopped, match="No space left on device: .*; the 60 lines written before are kept"
        ):
            run_batch(*files, make_seeded())
    assert names_in(source.parent) == ["in.jsonl", "out.jsonl.partial", "out.jsonl.partial.json"]
    assert run_batch(*files, make_seeded()).num_resumed == NUM_LINES
    assert answers(output) == expected


def test_what_a_killed_sort_left_is_no_output(make_seeded, files, expected):
    interrupted(files, make_seeded())
    sorted_path(files[1]).write_bytes(b"x" * 10_000_000)
    run_batch(*files, make_seeded())
    assert answers(files[1]) == expected
    assert not sorted_path(files[1]).exists()


def test_what_a_killed_sort_left_goes_also_when_there_is_nothing_to_sort(make_seeded, files):
    source, output = files
    write(source, [line("a")])
    sorted_path(output).write_bytes(b"x")
    run_batch(source, output, make_seeded())
    assert names_in(source.parent) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("in_order", [True, False])
def test_answers_are_copied_only_where_their_order_is_another(make_seeded, files, in_order):
    source, output = files
    write(source, [line("a", max_tokens=9), line("b", max_tokens=9 if in_order else 1)])
    path = interrupted(files, make_seeded(steps_per_dispatch=1), 1)
    inode = os.stat(path).st_ino
    run_batch(source, output, make_seeded())
    assert ids(output) == ["a", "b"]
    assert (os.stat(output).st_ino == inode) == in_order


@pytest.mark.parametrize("beside", ["other", "seed", None, "{", "[]"])
def test_a_partial_file_that_is_not_of_the_finished_output_stays(make_seeded, files, beside):
    source, output = files
    run_batch(source, output, make_seeded())
    finished = output.read_bytes()
    output.unlink()
    before = source.read_bytes()
    if beside != "seed":
        write(source, mixed_lines(NUM_LINES, seed=1))
    path = interrupted(files, make_seeded(seed=1))
    if beside is None:
        sidecar_path(output).unlink()
    elif beside not in ("other", "seed"):
        sidecar_path(output).write_text(beside)
    kept = path.read_bytes()
    source.write_bytes(before)
    output.write_bytes(finished)
    assert run_batch(source, output, make_seeded()).already_finished
    assert path.read_bytes() == kept
    assert sidecar_path(output).exists() == (beside is not None)


def test_the_input_is_not_overwritten_by_the_sort(make_seeded, files):
    source, output = files
    os.rename(source, sorted_path(output))
    with pytest.raises(ValueError, match="would be overwritten as out.jsonl.partial.sorted"):
        run_batch(sorted_path(output), output, make_seeded())


# --- errors and duplicates ------------------------------------------------------------------------


def test_a_file_of_mistakes_is_answered_in_order(make_seeded, files):
    source, output = files
    source.write_text("".join(f'{{"custom_id": "{index}"}}\n' for index in range(1500)))
    summary = run_batch(source, output, make_seeded())
    assert (summary.num_lines, summary.num_errors) == (1500, 1500)
    assert ids(output) == [f"{index}" for index in range(1500)]
    messages = [entry["error"]["message"] for entry in read(output)]
    assert messages == [
        f"line {number}: has no method; a line needs custom_id, method, url, body"
        for number in range(1, 1501)
    ]


def test_mistakes_do_not_wait_for_the_answers_around_them(make_seeded, files):
    source, output = files
    lines = [line(f"{index}", max_tokens=40) for index in range(NUM_LINES)]
    for index in range(0, NUM_LINES, 3):
        lines[index]["body"]["max_tokens"] = -1
    lines[4]["body"]["prompt"] = "x" * 300  # found when it is started
    write(source, lines)
    path = interrupted(files, make_seeded(max_rows=1), 21)
    assert [entry["error"] is not None for entry in read(path)] == [True] * 21
    run_batch(*files, make_seeded())
    assert ids(output) == [f"{index}" for index in range(NUM_LINES)]
    wrong = [place for place, entry in enumerate(read(output)) if entry["error"]]
    assert wrong == sorted({*range(0, NUM_LINES, 3), 4})


@pytest.mark.parametrize("read_lines", [3, 1000])
def test_the_later_of_two_equal_ids_is_refused(make_seeded, files, monkeypatch, read_lines):
    """Whatever is computed first, and in whichever block."""
    source, output = files
    monkeypatch.setattr(run_module, "READ_LINES", read_lines)
    lines = [line(f"{index}", prompt=f"{index % 4}" * 64) for index in range(NUM_LINES)]
    lines[50]["custom_id"] = "7"  # begins like line 2, line 7 begins like line 3
    lines[59]["custom_id"] = "7"
    write(source, lines)
    run_batch(source, output, make_seeded(max_rows=1))
    found = {place: entry["error"] for place, entry in enumerate(read(output)) if entry["error"]}
    assert {place: error["code"] for place, error in found.items()} == {
        50: "duplicate_custom_id",
        59: "duplicate_custom_id",
    }


def test_the_earlier_of_two_equal_ids_is_answered_after_the_later_was_refused(
    make_seeded, files, monkeypatch
):
    source, output = files
    lines = [line(f"{index}") for index in range(5)]
    lines[3]["custom_id"] = "1"
    write(source, lines)
    run_batch(source, output.with_name("whole.jsonl"), make_seeded())
    path = interrupted(files, make_seeded(), 1)
    assert [entry["error"] is None for entry in read(path)] == [False]
    run_batch(source, output, make_seeded())
    assert answers(output) == answers(output.with_name("whole.jsonl"))
    assert [entry["error"] is None for entry in read(output)] == [True, True, True, False, True]


def test_an_id_answered_before_an_interruption_is_taken(make_seeded, files):
    source, output = files
    lines = [line(f"{index}", max_tokens=1 + 30 * (index != 1)) for index in range(5)]
    lines[3]["body"]["temperature"] = -1
    lines[4]["custom_id"] = "1"
    write(source, lines)
    run_batch(source, output.with_name("whole.jsonl"), make_seeded())
    path = interrupted(files, make_seeded(), 3)
    kept = [data for data in path.read_bytes().splitlines(keepends=True) if b'"duplic' not in data]
    path.write_bytes(b"".join(kept))
    assert ids(path) == ["3", "1"]
    run_batch(source, output, make_seeded())
    assert answers(output) == answers(output.with_name("whole.jsonl"))

"""Batch runs go on where they were interrupted, with the same answers, or say why they do not."""

from __future__ import annotations

import errno
import json
import os
import re

import pytest

from hybrid_jax import run_batch
from hybrid_jax.api import llm as llm_module
from hybrid_jax.api import starting
from hybrid_jax.batch import BatchStopped, partial_path
from hybrid_jax.batch import partial as partial_module
from hybrid_jax.batch.input_file import InputFile
from hybrid_jax.batch.partial import PartialOutput, sidecar_path
from tests.batch.batch_files import (
    SeededEngine,
    Stop,
    answers,
    line,
    mixed_lines,
    read,
    stop_at,
    write,
)


@pytest.fixture
def make_seeded(make_llm, monkeypatch):
    monkeypatch.setattr(starting, "Engine", SeededEngine)
    return make_llm


@pytest.fixture
def files(files):
    """The same paths, with 60 lines of all kinds in the input."""
    return write(files[0], mixed_lines(60)), files[1]


def interrupted(files, llm, at=20):
    """Stops a run when about `at` lines are written; returns the partial file."""
    with pytest.raises(Stop):
        run_batch(*files, llm, progress=stop_at(at))
    path = partial_path(files[1])
    assert at <= len(read(path)) < 60
    assert not files[1].exists()
    return path


def whole(files, llm):
    """What an undisturbed run answers."""
    output = files[1].with_name("whole.jsonl")
    run_batch(files[0], output, llm)
    return answers(output)


@pytest.mark.parametrize("at", [1, 20, 45])
def test_an_interrupted_run_goes_on_with_the_same_answers(make_seeded, files, at):
    expected = whole(files, make_seeded())
    kept = interrupted(files, make_seeded(), at).read_bytes()
    summary = run_batch(*files, make_seeded(max_rows=3, steps_per_dispatch=2))
    assert set(kept.splitlines()) <= set(files[1].read_bytes().splitlines())
    assert answers(files[1]) == expected
    assert summary.num_resumed == kept.count(b"\n")
    assert not partial_path(files[1]).exists()
    assert not sidecar_path(files[1]).exists()


def test_the_summary_of_a_resumed_run_counts_the_whole_file(make_seeded, files):
    undisturbed = run_batch(files[0], files[1].with_name("whole.jsonl"), make_seeded())
    interrupted(files, make_seeded())
    summary = run_batch(*files, make_seeded())
    for name in ("num_lines", "num_errors", "prompt_tokens", "completion_tokens"):
        assert getattr(summary, name) == getattr(undisturbed, name)
    assert 20 <= summary.num_resumed < 60
    assert "60 lines (" in str(summary)
    assert "from an earlier run), " in str(summary)


@pytest.mark.parametrize(
    "torn", [b'{"id": "batch_req_', b"\x00" * 50, b"{}\n", b'"\xff\n', b"[1]\n"]
)
def test_a_torn_end_is_cut_off(make_seeded, files, torn):
    expected = whole(files, make_seeded())
    path = interrupted(files, make_seeded())
    with open(path, "ab") as file:
        file.write(torn)
    run_batch(*files, make_seeded())
    assert answers(files[1]) == expected


def test_every_cut_of_the_partial_file_is_made_good(make_seeded, files):
    expected = whole(files, make_seeded())
    path = interrupted(files, make_seeded())
    data, beside = path.read_bytes(), sidecar_path(files[1]).read_bytes()
    ends = [match.end() for match in re.finditer(b"\n", data)][:3]
    for size in sorted({0, 1, *ends, *(end - 1 for end in ends), *(end + 1 for end in ends)}):
        files[1].unlink(missing_ok=True)
        path.write_bytes(data[:size])
        sidecar_path(files[1]).write_bytes(beside)
        summary = run_batch(*files, make_seeded())
        assert summary.num_resumed == data[:size].count(b"\n")
        assert answers(files[1]) == expected


def test_a_kill_between_the_last_line_and_the_new_name_costs_nothing(
    make_seeded, files, monkeypatch
):
    def killed(self):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(PartialOutput, "finish", killed)
        with pytest.raises(Stop):
            run_batch(*files, make_seeded())
    assert len(read(partial_path(files[1]))) == 60
    summary = run_batch(*files, make_seeded())
    assert summary.num_resumed == 60
    assert answers(files[1]) == whole(files, make_seeded())


def test_a_kill_before_the_sidecar_is_removed_costs_nothing(make_seeded, files, monkeypatch):
    run_batch(*files, make_seeded())
    before = files[1].read_bytes()
    sidecar_path(files[1]).write_text("{}")
    assert run_batch(*files, make_seeded()).already_finished
    assert not sidecar_path(files[1]).exists()
    assert files[1].read_bytes() == before


def test_duplicates_of_lines_written_before_are_still_seen(make_seeded, files):
    lines = [line(f"{index}") for index in range(60)]
    lines[59]["custom_id"] = "0"
    write(files[0], lines)
    interrupted(files, make_seeded())
    run_batch(*files, make_seeded())
    [error] = [entry["error"] for entry in read(files[1]) if entry["error"]]
    assert error["message"].startswith("line 60: custom_id '0' was used by an earlier line")


def test_a_partial_file_of_another_input_is_refused(make_seeded, files):
    path = interrupted(files, make_seeded())
    before = path.read_bytes()
    source = files[0].read_text()
    files[0].write_text(source.replace("ab", "ba", 1))
    with pytest.raises(ValueError, match="belongs to another input, or the input was changed"):
        run_batch(*files, make_seeded())
    assert path.read_bytes() == before
    files[0].write_text(source)
    os.utime(files[0], (1, 1))  # times do not matter
    run_batch(*files, make_seeded())
    assert len(read(files[1])) == 60


@pytest.mark.parametrize(
    "options, message",
    [
        ({"seed": 7}, "was begun with seed=0, now it is 7"),
        ({"dtype": "bfloat16"}, "was begun with dtype='float32', now it is 'bfloat16'"),
        ({"max_model_len": 150}, "was begun with max_model_len=200, now it is 150"),
        ({"exact": True}, "was begun with exact=false, now it is true"),
        ({"tokenizer": None}, "was begun with model="),
    ],
)
def test_a_partial_file_of_other_settings_is_refused(make_seeded, files, options, message):
    path = interrupted(files, make_seeded())
    before = path.read_bytes()
    with pytest.raises(ValueError) as error:
        run_batch(*files, make_seeded(**options))
    assert message in str(error.value)
    assert "repeat the run it is from, or delete out.jsonl.partial to start over" in str(
        error.value
    )
    assert path.read_bytes() == before


def test_another_template_is_another_run(make_seeded, files):
    interrupted(files, make_seeded())
    with pytest.raises(ValueError, match="was begun with chat_template=null, now it is 'x'"):
        run_batch(*files, make_seeded(), chat_template="x")


def test_other_sampling_defaults_are_another_run(make_seeded, files):
    interrupted(files, make_seeded())
    llm = make_seeded()
    llm._intake.defaults = llm_module.SamplingParams(top_k=3)
    with pytest.raises(ValueError, match="was begun with sampling_defaults="):
        run_batch(*files, llm)


def test_a_temperature_of_one_is_the_same_run_whoever_says_it(make_seeded, files):
    interrupted(files, make_seeded())
    llm = make_seeded()
    llm._intake.defaults = llm_module.SamplingParams(temperature=1.0)
    assert run_batch(*files, llm).num_resumed


@pytest.mark.parametrize("beside", [None, "{", "[]", '{"format": 1}'])
def test_a_partial_file_nobody_vouches_for_is_refused(make_seeded, files, beside):
    path = partial_path(files[1])
    path.write_text("precious\n")
    if beside is not None:
        sidecar_path(files[1]).write_text(beside)
    message = (
        "without out.jsonl.partial.json, so it may" if beside is None else "not of this version"
    )
    with pytest.raises(ValueError, match=message):
        run_batch(*files, make_seeded())
    assert path.read_text() == "precious\n"


@pytest.mark.parametrize("change", ["double", "again", "strange", "short", "odd"])
def test_lines_that_answer_nothing_new_are_refused(make_seeded, files, change):
    path = interrupted(files, make_seeded())
    lines = path.read_bytes().splitlines(keepends=True)
    if change in ("double", "again"):
        lines.insert(4, lines[{"double": 3, "again": 1}[change]])
        message = f"line 5 of {path} answers request [0-9]+ of {files[0]} a second time"
    else:
        entry = json.loads(lines[4])
        short = entry["id"][:-1]
        entry["id"] = {"strange": "batch_req_" + "0" * 32, "short": short, "odd": {}}[change]
        lines[4] = json.dumps(entry).encode() + b"\n"
        message = f"line 5 of {path} is not this run's answer to a request of {files[0]}"
    before = b"".join(lines)
    path.write_bytes(before)
    with pytest.raises(ValueError, match=message):
        run_batch(*files, make_seeded())
    assert path.read_bytes() == before


def test_two_runs_do_not_write_one_file(make_seeded, files):
    with PartialOutput(files[1], InputFile.look_at(files[0])):
        with pytest.raises(ValueError, match="another run is writing .*out.jsonl.partial; wait"):
            run_batch(*files, make_seeded())
    assert not run_batch(*files, make_seeded()).already_finished


@pytest.mark.parametrize("change", ["input", "first", "last", "torn", "garbage"])
def test_a_finished_output_of_another_input_is_refused(make_seeded, files, change):
    run_batch(*files, make_seeded())
    lines = files[1].read_bytes().splitlines(keepends=True)
    if change == "input":
        files[0].write_text(files[0].read_text().replace("ab", "ba", 1))
    elif change == "torn":
        lines[-1] = lines[-1][:-1]
    elif change == "garbage":
        lines[0] = b"\xff\n"
    else:
        lines[{"first": 0, "last": -1}[change]] = lines[7]
    before = b"".join(lines)
    files[1].write_bytes(before)
    place = 60 if change in ("last", "torn") else 1
    message = (
        f"line {place} of {files[1]} is not the answer to request {place} of {files[0]}; delete"
    )
    with pytest.raises(ValueError, match=message):
        run_batch(*files, make_seeded())
    assert files[1].read_bytes() == before


def test_a_run_that_waited_for_a_finished_one_starts_anew(make_seeded, files, monkeypatch):
    whole(files, make_seeded())
    real, calls = partial_module._is_still, []

    def finished_meanwhile(descriptor, path):
        calls.append(path)
        if len(calls) == 1:  # another run renamed it between our opening and locking it
            path.unlink()
            os.rename(files[1].with_name("whole.jsonl"), files[1])
        return real(descriptor, path)

    monkeypatch.setattr(partial_module, "_is_still", finished_meanwhile)
    assert run_batch(*files, make_seeded()).already_finished
    assert sorted(os.listdir(files[1].parent)) == ["in.jsonl", "out.jsonl"]


def test_a_partial_output_that_is_no_file_is_named(make_seeded, files):
    os.mkfifo(partial_path(files[1]))
    message = f"{partial_path(files[1])} must be a regular file; remove it"
    with pytest.raises(ValueError, match=message):
        run_batch(*files, make_seeded())


def test_settings_that_cannot_be_written_stop_the_run(make_seeded, files, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(partial_module.os, "replace", full)
        message = f"No space left on device: {sidecar_path(files[1])}; the 0 lines written before"
        with pytest.raises(BatchStopped, match=message):
            run_batch(*files, make_seeded())
    assert os.listdir(files[1].parent) == ["in.jsonl"]
    assert not run_batch(*files, make_seeded()).already_finished

"""Batch runs over several processes: nothing is lost or doubled, whichever of them is killed."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from hybrid_jax.batch import partial_path
from tests.batch.batch_files import answers, finish, line, mixed_lines, read, start, write
from tests.drawing import left_to_all

NUM_LINES = 120
PAUSED = {"HYBRID_JAX_TEST_PAUSE": "0.01"}


def workers_of(process):
    """The processes that a program has started to compute."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(") ")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if parent == process.pid and b"worker_program" in command:
            found.append(int(stat.parent.name))
    return sorted(found)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def written(files):
    path = partial_path(files[1])
    return path.stat().st_size if path.exists() else 0


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The input, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("whole")
    files = write(folder / "in.jsonl", mixed_lines(NUM_LINES)), folder / "out.jsonl"
    code, _, err = finish(start(files))
    assert code == 0, err
    return files


def test_the_answers_are_those_of_one_process(expected, tmp_path):
    files = expected[0], tmp_path / "out.jsonl"
    process = start(files, "--replicas", "3", "--json", **PAUSED)
    wait_until(lambda: len(workers_of(process)) == 3)
    started = workers_of(process)
    code, out, err = finish(process)
    assert code == 0, err
    assert answers(files[1]) == answers(expected[1])
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl"]
    assert not any(map(is_there, started))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=left_to_all) for n in range(1, 5))])
def test_workers_that_are_killed_lose_and_double_nothing(expected, tmp_path, seed):
    """Four kills of any of three workers, at any time: while they start, compute, and end."""
    draw = random.Random(seed)
    files = expected[0], tmp_path / "out.jsonl"
    process, size = start(files, "--replicas", "3", **PAUSED), expected[1].stat().st_size
    wait_until(lambda: written(files) > 0 or process.poll() is not None)
    kills = 0
    for share in sorted(draw.uniform(0.02, 0.9) for _ in range(4)):
        wait_until(lambda point=share * size: written(files) >= point or process.poll() is not None)
        if process.poll() is None and (there := workers_of(process)):
            os.kill(draw.choice(there), signal.SIGKILL)
            kills += 1
    code, _, err = finish(process)
    assert code == 0, err
    assert kills >= 3 and "was ended by SIGKILL" in err and "is started again" in err
    assert answers(files[1]) == answers(expected[1])
    assert len(read(files[1])) == NUM_LINES


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=left_to_all) for n in range(1, 5))])
def test_a_driver_that_is_killed_goes_on_and_leaves_no_worker_behind(expected, tmp_path, seed):
    draw = random.Random(seed)
    files = expected[0], tmp_path / "out.jsonl"
    size, known = expected[1].stat().st_size, 0
    for _ in range(4):
        process = start(files, "--replicas", "2", **PAUSED)
        point = known + draw.uniform(0.05, 0.3) * (size - known)
        wait_until(lambda p=process, at=point: written(files) >= at or p.poll() is not None)
        there = workers_of(process)
        process.kill()
        process.communicate()
        known = written(files)
        assert len(there) == 2 and not files[1].exists()
        wait_until(lambda there=there: not any(map(is_there, there)))
    code, _, err = finish(start(files, "--replicas", "3"))
    assert code == 0 and "from an earlier run" in err
    assert answers(files[1]) == answers(expected[1])


def test_ctrl_c_ends_the_workers_too(expected, tmp_path):
    files = expected[0], tmp_path / "out.jsonl"
    process = start(files, "--replicas", "2", HYBRID_JAX_TEST_PAUSE="0.05")
    wait_until(lambda: written(files) > 500 or process.poll() is not None)
    there = workers_of(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on from there" in err
    wait_until(lambda: not any(map(is_there, there)))
    assert len(there) == 2


def test_a_line_that_ends_workers_gets_an_error_and_the_others_do_not(tmp_path):
    lines = [line(f"id-{n}", prompt="ab" * (n % 5 + 1)) for n in range(40)]
    lines[7] = line("bad", prompt="this one kills")
    files = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    code, _, err = finish(start(files, "--replicas", "2", HYBRID_JAX_TEST_KILLS="kills"))
    assert code == 0, err
    found = {entry["custom_id"]: entry["error"] for entry in read(files[1])}
    message = found.pop("bad")["message"]
    assert "3 replicas have ended" in message and "the process was ended by SIGKILL" in message
    assert set(found.values()) == {None} and len(found) == 39


@pytest.mark.parametrize("replicas", ["0", "-1", "two", "prefill=1", "prefill=1,decode=1,tp=2"])
def test_a_number_of_replicas_that_makes_no_sense(expected, tmp_path, replicas):
    code, out, err = finish(start((expected[0], tmp_path / "out.jsonl"), "--replicas", replicas))
    assert code == 2 and out == ""
    said = " ".join(err.replace("│", " ").split())
    assert "replicas must be an integer of at least 1, or like 'prefill=1,decode=2', got" in said
    assert os.listdir(tmp_path) == []


def test_more_replicas_than_a_machine_has_time_for_start_nothing(expected, tmp_path):
    code, out, err = finish(start((expected[0], tmp_path / "out.jsonl"), "--replicas", "10" * 10))
    said = " ".join(err.replace("│", " ").split())
    assert (
        code == 2
        and out == ""
        and re.search("at most [0-9]+ on this machine, which has .* got 10101", said)
    )

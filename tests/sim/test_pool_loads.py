"""Loads of pool studies: the published draws, files of the same form, and files that are wrong."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pools.loads import (
    COLUMNS,
    COUNTS,
    WORKLOADS,
    BadLoad,
    make_load,
    pick_load,
    read_loads,
)

PUBLISHED = Path(__file__).parent / "data" / "avmp_traces.csv.gz"
HEADER = ",".join(COLUMNS)
GOOD = ["short,1,0,5,6,0", "short,1,1,7,8,2", "short,4,0,9,1,0", "long,1,0,50,60,3"]


def lists(load):
    return [array.tolist() for array in (load.prompt_lens, load.gen_lens, load.arrivals)]


@pytest.fixture(scope="module")
def published():
    return read_loads(PUBLISHED)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_generator_draws_what_was_published(published, workload, seed):
    seed += WORKLOADS[workload].seed
    drawn = make_load(workload, seed)
    assert lists(drawn) == lists(published[workload, seed])
    assert (drawn.workload, drawn.seed, len(drawn)) == (
        workload, seed, WORKLOADS[workload].num_requests,
    )  # fmt: skip


def test_twelve_loads_were_published(published):
    assert len(published) == 12


def test_without_a_seed_the_first_published_one_is_drawn():
    assert lists(make_load("mixed_long")) == lists(make_load("mixed_long", 2))
    assert lists(make_load("mixed_long")) != lists(make_load("mixed_long", 3))


def test_the_counts_have_the_known_moments():
    counts = np.array(json.loads(COUNTS.read_text()))
    assert (len(counts), counts.min(), np.median(counts), counts.max()) == (5000, 1, 25, 6708)
    assert round(counts.mean()) == 146 and (counts < 16).mean() == pytest.approx(0.334, abs=5e-4)


def test_the_counts_have_their_notice_beside_them():
    assert "Copyright (c) 2026 codepawl" in (COUNTS.parent / "README.md").read_text()


def test_an_unknown_workload_is_an_error_that_lists_the_known():
    message = "pool-sim: no workload 'chat'; known are uniform_short, mixed_long, agentic_burst, sharegpt_replay"
    with pytest.raises(ValueError, match=f"^{message}"):
        make_load("chat")


def test_a_seed_below_0_is_an_error():
    with pytest.raises(ValueError, match="^--seed must be a whole number of at least 0, got -3$"):
        make_load("mixed_long", -3)


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    def write(*lines, header=HEADER):
        path = tmp_path / "loads.csv"
        path.write_text("\n".join((header, *lines)) + "\n")
        return path

    return write


def test_a_file_holds_loads_by_workload_and_seed(write):
    loads = read_loads(write(*GOOD[:1], "", *GOOD[1:], ""))
    assert list(loads) == [("short", 1), ("short", 4), ("long", 1)]
    assert lists(loads["short", 1]) == [[5, 7], [6, 8], [0, 2]]


def test_a_load_is_picked_by_workload_and_seed(write):
    loads = read_loads(write(*GOOD))
    assert lists(pick_load(loads, "short", 4, "f")) == [[9], [1], [0]]
    assert pick_load(loads, "short", None, "f").seed == 1
    with pytest.raises(
        ValueError, match=r"^pool-sim: no workload 'x' in f; known are long, short$"
    ):
        pick_load(loads, "x", 1, "f")
    with pytest.raises(ValueError, match=r"^--seed: no seed 2 of short in f; known are 1, 4$"):
        pick_load(loads, "short", 2, "f")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("short,1,1,7,8", "must have 6 columns, got 5"),
        ("short,1,1,7,8,2,3", "must have 6 columns, got 7"),
        (",1,1,7,8,2", "workload must be a name, got ''"),
        ("short,x,1,7,8,2", "seed must be a whole number from 0 to 1000000000000000, got 'x'"),
        ("short,1,1,0,8,2", "prompt_len must be a whole number from 1 to 4194304, got '0'"),
        ("short,1,1,7,-8,2", "gen_len must be a whole number from 1 to 4194304, got '-8'"),
        ("short,1,1,7,8000000,2", "gen_len must be a whole number from 1 to 4194304, got '8000000'"),
        ("short,1,1,7.5,8,2", "prompt_len must be a whole number from 1 to 4194304, got '7.5'"),
        ("short,1,1,²,8,2", "prompt_len must be a whole number from 1 to 4194304, got '²'"),
        ("short,1,1,7,8," + "9" * 50, f"arrival_tick must be a whole number from 0 to {10**15}, got '{'9' * 40}'"),
        ("short,1,2,7,8,2", "request_id must be 1, the next of short seed 1, got 2"),
        ("short,1,0,7,8,2", "request_id must be 1, the next of short seed 1, got 0"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_number_and_reason(write, line, reason):
    path = write(GOOD[0], "", line, *GOOD[1:])
    with pytest.raises(BadLoad) as error:
        read_loads(path)
    assert str(error.value) == f"{path}, line 4: {reason}"


def test_other_columns_are_an_error_that_names_them(write):
    message = f"loads.csv, line 1: columns must be {HEADER}, got 'workload,seed'"
    with pytest.raises(BadLoad, match=f"/{message}$"):
        read_loads(write(header="workload,seed"))


@pytest.mark.parametrize("text", ["", HEADER, HEADER + "\n\n"])
def test_a_file_without_requests_is_an_error(tmp_path, text):
    path = tmp_path / "none.csv"
    path.write_text(text)
    with pytest.raises(
        BadLoad, match=r"/none\.csv: a trace must hold at least one request, got none$"
    ):
        read_loads(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("image.csv", b"\x89PNG\r\n"),
        ("plain.csv.gz", b"workload"),
        ("cut.csv.gz", gzip.compress("\n".join((HEADER, *GOOD)).encode(), mtime=0)[:40]),
    ],
)
def test_a_file_that_is_no_text_is_an_error_that_names_it(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadLoad, match=f"/{re.escape(name)}: cannot be read as text: "):
        read_loads(path)

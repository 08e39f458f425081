"""`benchmarks/allocators.py`: a smoke run fills all tables, is gone on with, and its interval is a bootstrap's."""

from __future__ import annotations

import json

import pytest

from benchmarks import allocators
from benchmarks.allocator_studies import runs, tables
from benchmarks.allocator_studies.runs import Cell


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("allocators")
    assert allocators.main(["--smoke", "--out", str(folder)]) == 0
    return folder


def table(folder, name: str) -> dict[str, dict]:
    """Rows by their first column."""
    found = json.loads((folder / "tables.json").read_text())["tables"][name]["rows"]
    return {str(next(iter(row.values()))): row for row in found}


def test_a_smoke_run_fills_every_table(smoke):
    found = json.loads((smoke / "tables.json").read_text())["tables"]
    assert {"oom", "sharegpt", "batches", "thresholds", "intervals", "memory", "speed"} <= set(
        found
    )
    assert all(entry["rows"] for entry in found.values())
    text = (smoke / "tables.md").read_text()
    assert all(f"## {entry['title']}" in text for entry in found.values())


def test_honest_numbers_hold_what_they_must(smoke):
    rows = table(smoke, "honest")
    assert rows["frames"]["of ideal"] >= 0.995 and rows["ideal"]["of ideal"] == 1
    assert rows["frames"]["infeasible"] == rows["ideal"]["infeasible"]
    assert all(row["hollow"] == row["leaked"] == 0 for row in rows.values())
    assert rows["avmp_dynamic_b128"]["footprint"] == 2
    assert rows["two_ended"]["GiB copied"] > 0 == rows["frames"]["GiB copied"]


def test_thresholds_change_the_log_alone(smoke):
    found = json.loads((smoke / "tables.json").read_text())["tables"]["thresholds"]["rows"]
    assert len(found) == len(runs.THRESHOLDS)
    assert (
        len({(row["failed calls"], row["rebalances"], row["migrated bytes"]) for row in found}) == 1
    )
    assert len({row["transitions"] for row in found}) > 1


def test_a_file_is_gone_on_with(tmp_path, monkeypatch):
    cells = [
        Cell(mode="honest", allocator=name, workload="own", model="m", gib=1, seed=0)
        for name in "ab"
    ]
    monkeypatch.setattr(runs, "cells", lambda smoke: iter(cells))
    asked = []
    monkeypatch.setattr(runs, "run_cell", lambda cell: asked.append(cell.allocator) or {"x": 1})
    path = tmp_path / "runs.json"
    runs.save(path, {cells[0].key: {"x": 5}})
    found = runs.run_all(path, smoke=False, say=print)
    assert asked == ["b"] and list(found.values()) == [{"x": 5}, {"x": 1}]
    runs.run_all(path, smoke=False, say=print)
    assert asked == ["b"]


def test_an_interval_of_equal_differences_is_a_point():
    assert tables.bootstrap([3.0] * 12) == (3.0, 3.0)
    low, high = tables.bootstrap([0.0, 10.0] * 6)
    assert 0 < low < 5 < high < 10


def test_rows_whose_rings_leave_no_room_are_left_out():
    cell = Cell(
        mode="honest",
        allocator="frames:128",
        workload="uniform_short",
        model="jamba_1_5_mini",
        gib=1,
        seed=1,
    )
    assert runs.run_cell(cell) is None

"""The script `memory/allocators.py`: a smoke run fills all tables, is gone on with, its interval is a bootstrap's."""

from __future__ import annotations

import json

import pytest

from benchmarks.memory import allocators
from benchmarks.memory.studies import runs, tables
from benchmarks.memory.studies.rings import climb
from benchmarks.memory.studies.runs import Cell
from tests.drawing import left_to_all


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("allocators")
    assert allocators.main(["--smoke", "--out", str(folder)]) == 0
    return folder


def table(folder, name: str) -> dict[str, dict]:
    """Rows by their first column."""
    found = json.loads((folder / "tables.json").read_text())["tables"][name]["rows"]
    return {str(next(iter(row.values()))): row for row in found}


@left_to_all
def test_a_smoke_run_fills_every_table(smoke):
    found = json.loads((smoke / "tables.json").read_text())["tables"]
    assert {"oom", "sharegpt", "batches", "intervals", "memory", "speed"} <= set(found)
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


@left_to_all
@pytest.mark.slow
def test_a_smoke_run_of_rings_goes_on_with_the_same_file(smoke):
    before = json.loads((smoke / "runs.json").read_text())["runs"]
    assert allocators.main(["--rings", "--smoke", "--out", str(smoke)]) == 0
    assert before.items() <= json.loads((smoke / "runs.json").read_text())["runs"].items()
    found = json.loads((smoke / "rings.json").read_text())["tables"]
    rows = {row["allocator"]: row for row in found["rings"]["rows"]}
    assert {row["engine"] for row in rows.values()} == {"built", "not built"}
    assert rows["frames:N @8"]["engine"] == "built" and rows["frames:N @1"]["engine"] == "not built"
    assert rows["frames @8"]["footprint"] > 1.1 and rows["frames_raw @8"]["footprint"] <= 1
    order = ("frames:N @8", "frames_rings @8", "frames_records @8", "frames_raw @8", "frames @8")
    values = [rows[name]["least"] for name in order]
    assert values == sorted(values)
    assert all(row["footprint"] <= 1.01 for row in found["rings_spare"]["rows"])
    assert (smoke / "rings.md").read_text().count("\n## ") == len(found) == 4


def test_a_climb_ends_where_both_neighbours_are_worse():
    values = [1, 2, 5, 3, 4, 9, 8, 7, 6, 5]
    asked = []
    score = lambda index: asked.append(index) or values[index]
    assert climb(score, len(values), None) == 5
    assert climb(score, len(values), 9) == 5
    assert climb(lambda index: -index, 3, 2) == 0 and climb(lambda index: index, 1, None) == 0
    assert set(asked) <= set(range(10))


def test_a_spare_pool_refuses_what_the_ideal_refuses():
    where = {"workload": "mixed_long", "model": "jamba_1_5_mini", "gib": 1, "seed": 2}
    ideal = runs.run_cell(Cell(mode="honest", allocator="ideal", **where))
    spare = Cell(mode="spare", allocator="frames_raw@4", options=(1.01,), **where)
    found = runs.run_cell(spare)
    assert ideal["infeasible"] == found["infeasible"] > 0
    assert 1 < found["peak_footprint"] <= 1.01


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

"""Every counter of the published allocators: 240 runs, nine batch sizes of the sweep, and the totals of the tables."""

from __future__ import annotations

import csv
import statistics
from functools import cache
from pathlib import Path

import pytest

from benchmarks.pools.loads import WORKLOADS, make_load
from benchmarks.pools.model_sizes import PUBLISHED
from benchmarks.pools.names import make_published
from benchmarks.pools.paper_mode import PaperResult, run_paper
from benchmarks.pools.published import KV, STATE
from tests.drawing import left_to_all

DATA = Path(__file__).parent / "data"
GIB = 1 << 30
SEEDS = {name: range(kind.seed, kind.seed + 3) for name, kind in WORKLOADS.items()}
THREE = ("uniform_short", "mixed_long", "agentic_burst")  # the paper's first table
TOTALS = {
    "padded_unified": 1567.7,
    "fixed_dual_mr05": 552.0,
    "fixed_dual_mr09": 1221.3,
    "avmp_static_mr05": 552.0,
    "avmp_dynamic_b128": 510.0,
}
load = cache(make_load)


def rows(name: str) -> list[dict[str, str]]:
    with open(DATA / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


RUNS, SWEEP = rows("avmp_runs.csv"), rows("avmp_batch_sweep.csv")
CELL = ("workload", "model_spec", "gib")
NAMES = sorted({row["allocator"] for row in RUNS})
BATCHES = sorted({row["allocator"] for row in SWEEP}, key=lambda name: int(name[14:]))


def run(allocator, workload: str, model: str, gib: int, seed: int) -> PaperResult:
    """One run; an allocator by its name, or one that is made."""
    geometry, name = PUBLISHED[model], "own"
    if isinstance(allocator, str):
        name, allocator = allocator, make_published(allocator, geometry, gib * GIB)
    return run_paper(load(workload, seed), allocator, geometry, name=name, pool_bytes=gib * GIB)


def counters(result: PaperResult) -> dict[str, str]:
    """As `avmp_runs.csv` has them."""
    values = result.as_dict() | {"gib": result.pool_bytes // GIB}
    return {column: str(values[column]) for column in RUNS[0]}


def test_the_files_are_whole():
    assert len(RUNS) == 5 * 4 * 2 * 2 * 3 and len(SWEEP) == 9 * 3 * 2 * 2
    assert BATCHES == [f"avmp_dynamic_b{2**power}" for power in range(9)]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("allocator", NAMES)
def test_every_counter_of_the_240_runs(allocator, workload):
    expected = [r for r in RUNS if (r["allocator"], r["workload"]) == (allocator, workload)]
    assert len(expected) == 12
    for row in expected:
        cell = row["model_spec"], int(row["gib"]), int(row["seed"])
        assert counters(run(allocator, workload, *cell)) == row


@pytest.mark.parametrize(
    "allocator",
    [pytest.param(x, marks=[left_to_all] * (x[-3:] not in ("_b1", "b16", "128"))) for x in BATCHES],
)
def test_the_published_sweep_of_batch_sizes(allocator):
    for row in (row for row in SWEEP if row["allocator"] == allocator):
        geometry, ooms, others = PUBLISHED[row["model_spec"]], [], []
        for seed in SEEDS[row["workload"]]:
            memory = make_published(allocator, geometry, int(row["gib"]) * GIB)
            found = run(memory, row["workload"], row["model_spec"], int(row["gib"]), seed)
            ooms.append(found.oom_count)
            sizes = memory.pools[KV].num_units, memory.pools[STATE].num_units
            moved = found.rebalance_count, found.migrated_bytes, found.wasted_bytes
            others.append((*moved, *sizes))
        cell = [row[column] for column in CELL]
        assert sum(ooms) == int(row["oom_sum"]), cell
        assert statistics.pstdev(ooms) == pytest.approx(float(row["oom_std"]), abs=1e-6), cell
        columns = ("rebalance_count", "migrated_bytes", "wasted_bytes", "kv_pages", "states")
        medians = [statistics.median(values) for values in zip(*others, strict=True)]
        assert medians == [int(row[column]) for column in columns], cell


@pytest.mark.parametrize(("allocator", "total"), TOTALS.items())
def test_the_240_runs_add_up_to_the_published_table(allocator, total):
    ooms = sum(
        int(row["oom_count"])
        for row in RUNS
        if row["allocator"] == allocator and row["workload"] in THREE
    )
    assert ooms / 3 == pytest.approx(total, abs=0.05)


@pytest.mark.parametrize(
    ("allocator", "three", "sharegpt"),
    [("fixed_dual_sglang", 548.0, 2.67), ("fixed_dual_mr03", 532.7, 1.17)],
)
def test_splits_that_were_not_published(allocator, three, sharegpt):
    ooms = {
        workload: sum(
            run(allocator, workload, model, gib, seed).oom_count
            for seed in SEEDS[workload]
            for model in PUBLISHED
            for gib in (1, 4)
        )
        for workload in WORKLOADS
    }
    assert sum(ooms[workload] for workload in THREE) / 3 == pytest.approx(three, abs=0.05)
    assert ooms["sharegpt_replay"] / 12 == pytest.approx(sharegpt, abs=0.005)


def test_the_same_run_gives_the_same_result():
    first, second = (run("avmp_dynamic_b128", "agentic_burst", "mamba2_1b3", 1, 3) for _ in "ab")
    assert first.as_dict() | {"cpu_seconds": 0} == second.as_dict() | {"cpu_seconds": 0}

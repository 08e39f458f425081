"""Tables of all runs: rows of plain values for JSON, and markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.memory.studies.runs import (
    BATCHES,
    GEOMETRIES,
    HONEST,
    MORE_SPLITS,
    ROWS,
    VARIANTS,
    Cell,
)
from benchmarks.pools.loads import WORKLOADS

THREE = ("uniform_short", "mixed_long", "agentic_burst")
RESAMPLES, BOOTSTRAP_SEED = 10_000, 20260520
BASELINE = "fixed_dual_mr05"
Runs = dict[Cell, dict | None]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a title.

    Attributes:
        name, title, note: of it. columns: their names; rows: their values.
    """

    name: str
    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple]

    def as_dict(self) -> dict:
        return {
            "title": self.title,
            "note": self.note,
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
        }

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", self.note, "", _line(self.columns)]
        lines.append(_line("---" for _ in self.columns))
        lines += [_line(map(_text, row)) for row in self.rows]
        return "\n".join(lines)


def _line(values: Iterable[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _text(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def pick(runs: Runs, mode: str, allocator: str, **where) -> list[dict]:
    """Results of one allocator in the cells that fit."""
    return [
        run
        for cell, run in runs.items()
        if run is not None
        and (cell.mode, cell.allocator) == (mode, allocator)
        and all(getattr(cell, name) == value for name, value in where.items())
    ]


def tables(runs: Runs) -> list[Table]:
    """All of them."""
    return [
        oom(runs),
        share_gpt(runs),
        batches(runs),
        intervals(runs),
        memory(runs),
        speed(runs),
        honest(runs),
        ratios(runs),
        honest_ideal(runs),
    ]


def _per_cell(runs: Runs, allocator: str, workloads: Iterable[str]) -> dict[tuple, float]:
    """Failed calls of each (workload, model, pool), the mean over seeds."""
    found: dict[tuple, list[int]] = {}
    for cell, run in runs.items():
        if (cell.mode, cell.allocator) == ("paper", allocator) and cell.workload in workloads:
            found.setdefault((cell.workload, cell.model, cell.gib), []).append(run["oom_count"])
    return {key: sum(values) / len(values) for key, values in found.items()}


def _total(runs: Runs, allocator: str, *workloads: str) -> float:
    return sum(_per_cell(runs, allocator, workloads).values())


def oom(runs: Runs) -> Table:
    rows = []
    for name in (*VARIANTS, *MORE_SPLITS):
        each = [_total(runs, name, workload) for workload in THREE]
        done = pick(runs, "paper", name)
        completed = sum(run["completed"] for run in done)
        hollow = sum(run["hollow"] for run in done)
        rows.append((name, *each, sum(each), hollow / completed if completed else None))
    return Table(
        name="oom",
        title="Failed calls in the published harness",
        note="Sums over models and pools of means over seeds. Hollow: share of completed requests, in all four "
        "workloads, that had lost memory while they ran.",
        columns=("allocator", *THREE, "sum", "hollow"),
        rows=rows,
    )


def share_gpt(runs: Runs) -> Table:
    rows = []
    for name in (*VARIANTS, *MORE_SPLITS):
        each = list(_per_cell(runs, name, ("sharegpt_replay",)).values())
        rows.append((name, sum(each) / len(each) if each else None))
    return Table(
        name="sharegpt",
        title="ShareGPT replay in the published harness",
        note="Failed calls a cell.",
        columns=("allocator", "failed calls"),
        rows=rows,
    )


def batches(runs: Runs) -> Table:
    rows = []
    for name in BATCHES:
        done = [run for w in THREE for run in pick(runs, "paper", name, workload=w)]
        moved = [sum(run[key] for run in done) for key in ("rebalance_count", "rebalances_refused")]
        lost = sum(run["wasted_bytes"] for run in done) / 2**20
        rows.append((int(name.partition("_b")[2]), _total(runs, name, *THREE), *moved, lost))
    return Table(
        name="batches",
        title="Units that a rebalance moves, in the published harness",
        note="Failed calls as above; rebalances, and MiB lost for ever, over all runs.",
        columns=("batch", "failed calls", "rebalances", "refused", "MiB lost"),
        rows=rows,
    )


def bootstrap(differences: list[float]) -> tuple[float, float]:
    """95 % interval of the mean of paired differences."""
    values = np.array(differences)
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    means = values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def intervals(runs: Runs) -> Table:
    rows = []
    base = _per_cell(runs, BASELINE, THREE)
    for name in (*VARIANTS, *MORE_SPLITS):
        other = _per_cell(runs, name, THREE)
        if name == BASELINE or not other:
            continue
        differences = [other[cell] - base[cell] for cell in base]
        low, high = bootstrap(differences)
        mean = sum(differences) / len(differences)
        rows.append((name, mean, low, high, "no" if low <= 0 <= high else "yes"))
    return Table(
        name="intervals",
        title=f"Failed calls a cell, less those of {BASELINE}",
        note="Pairs are cells of the first three workloads (workload, model, pool; means over seeds). Percentile "
        f"bootstrap, {RESAMPLES:,} resamples, seed {BOOTSTRAP_SEED}.",
        columns=("allocator", "mean", "2.5 %", "97.5 %", "without 0"),
        rows=rows,
    )


def memory(runs: Runs) -> Table:
    rows = []
    for name in VARIANTS:
        done = pick(runs, "paper", name)
        gib = [cell.gib for cell in runs if (cell.mode, cell.allocator) == ("paper", name)]
        reserved = max(r["reserved_bytes"] / g / 2**30 for r, g in zip(done, gib, strict=True))
        used = max(r["peak_bytes"] / g / 2**30 for r, g in zip(done, gib, strict=True))
        rows.append((name, reserved, used))
    return Table(
        name="memory",
        title="Memory over the budget, in the published harness",
        note="Most over all cells: reserved from the device, and of pages and states in use.",
        columns=("allocator", "reserved", "in use"),
        rows=rows,
    )


def speed(runs: Runs) -> Table:
    rows = []
    for name in VARIANTS:
        done = pick(runs, "paper", name)
        calls, seconds = (sum(r[key] for r in done) for key in ("allocate_calls", "cpu_seconds"))
        rows.append((name, calls, float(seconds), round(calls / max(seconds, 1e-9))))
    return Table(
        name="speed",
        title="Allocate calls a processor second, in the published harness",
        note="Timed once, each run by itself; the event loop counts.",
        columns=("allocator", "calls", "seconds", "calls a second"),
        rows=rows,
    )


# --- honest mode ----------------------------------------------------------------------------------


def geo_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def relative(runs: Runs, allocator: str, reference: str = "ideal", **where) -> list[float]:
    """Tokens per tick over the ideal's, one for each cell in which somebody completed."""
    found = []
    ideals = {
        (c.workload, c.model, c.gib, c.seed): run["tokens_per_tick"]
        for c, run in runs.items()
        if (c.mode, c.allocator) == ("honest", reference)
    }
    for cell, run in runs.items():
        fits = (cell.mode, cell.allocator) == ("honest", allocator) and all(
            getattr(cell, name) == value for name, value in where.items()
        )
        if fits and run is not None and run["completed"]:
            ideal = ideals[cell.workload, cell.model, cell.gib, cell.seed]
            found.append(run["tokens_per_tick"] / ideal)
    return found


def best_rows(runs: Runs, model: str, gib: int) -> str | None:
    """The number of rows that serves a model and a pool best over all loads."""
    means = {name: geo_mean(relative(runs, name, model=model, gib=gib)) for name in ROWS}
    known = {name: mean for name, mean in means.items() if mean is not None}
    return max(known, key=known.__getitem__) if known else None


def honest(runs: Runs) -> Table:
    rows = []
    for name in HONEST:
        done = pick(runs, "honest", name)
        if name in ROWS or not done:
            continue
        seeds = len({cell.seed - _first(cell) for cell in runs})
        total = lambda key, done=done: sum(run[key] for run in done)
        mean = lambda key, done=done: sum(run[key] for run in done) / len(done)
        rows.append(
            (
                name,
                geo_mean(relative(runs, name)),
                total("infeasible") / seeds,
                total("preempted") / seeds,
                total("recomputed_tokens") // seeds,
                mean("utilisation"),
                total("hollow"),
                max(run["peak_footprint"] for run in done),
                max(run["slot_padding"] for run in done),
                total("copied_bytes") / seeds / 2**30,
                total("wasted_bytes") / seeds / 2**30,
                total("leaked_bytes"),
                _range(run["prefix_tokens"] for run in done),
            )
        )
    return Table(
        name="honest",
        title="Honest mode, all geometries",
        note="Tokens per tick over the byte-fluid ideal's, geometric mean over all cells where somebody completed; "
        "sums of means over seeds; footprint and slot padding: the most of any cell. The rings of `frames` lie beside "
        "its pool and count in its footprint.",
        columns=(
            *("allocator", "of ideal", "infeasible", "preempted", "recomputed", "utilisation"),
            *("hollow", "footprint", "slot padding"),
            *("GiB copied", "GiB lost", "leaked", "prefix tokens"),
        ),
        rows=rows,
    )


def _first(cell: Cell) -> int:
    return WORKLOADS[cell.workload].seed


def _range(values: Iterable[int]) -> str:
    known = sorted(set(values))
    return str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"


def ratios(runs: Runs) -> Table:
    rows = []
    for name in (*(n for n in HONEST if n not in ROWS), "frames, rings inside"):
        values = []
        for model, gib in GEOMETRIES:
            one = best_rows(runs, model, gib) if name.startswith("frames,") else name
            found = relative(runs, one, model=model, gib=gib) if one else []
            values.append(geo_mean(found))
        rows.append((name, *values))
    best = [best_rows(runs, model, gib) for model, gib in GEOMETRIES]
    rows.append(("rows of the last", *(one.partition(":")[2] if one else None for one in best)))
    return Table(
        name="ratios",
        title="Honest mode, tokens per tick over the ideal's",
        note="Geometric means over workloads and seeds. The line before the last: rings and tables of the best of 8, "
        "16, 32, 64, 96 and 128 rows are taken out of the pool, and no more rows run than that.",
        columns=("allocator", *(f"{model} {gib} GiB" for model, gib in GEOMETRIES)),
        rows=rows,
    )


def honest_ideal(runs: Runs) -> Table:
    """What the ideal itself does, geometry by geometry, and how far frames are from it."""
    rows = []
    for model, gib in GEOMETRIES:
        where = {"model": model, "gib": gib}
        ideal, ours = (pick(runs, "honest", name, **where) for name in ("ideal", "frames"))
        if not ideal:
            continue
        inf = [sum(run["infeasible"] for run in each) for each in (ideal, ours)]
        rows.append(
            (
                f"{model} {gib} GiB",
                geo_mean(relative(runs, "frames", **where)),
                geo_mean(relative(runs, "frames", "ideal:1", **where)),
                *inf,
                sum(run["hollow"] for run in ours),
                max(run["slot_padding"] for run in ours),
                max(run["peak_footprint"] for run in ours),
                max(run["most_running"] for run in ours),
                sum(run["copied_bytes"] + run["leaked_bytes"] for run in ours),
                _range(run["prefix_tokens"] for run in ours),
            )
        )
    return Table(
        name="frames",
        title="Honest mode, frames against the ideal",
        note="The ideal grows by pages of 16 tokens, and in the third column by single tokens. Infeasible: summed over "
        "all runs.",
        columns=(
            *("geometry", "of ideal", "of ideal, by token", "ideal infeasible", "infeasible"),
            *("hollow", "slot padding", "footprint", "most rows", "bytes copied or leaked"),
            "prefix tokens",
        ),
        rows=rows,
    )

"""Which figures there are, and how they are made into files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.cache.figures import (
    formulas,
    microbenchmarks,
    plots,
    report,
    reuse,
    sweep,
)
from benchmarks.cache.figures.check import check
from benchmarks.cache.figures.figure import Figure
from benchmarks.cache.figures.loads import Traces
from benchmarks.cache.figures.runs import Runs, Setup
from benchmarks.common import header

OUT = Path(__file__).resolve().parents[2] / "results" / "cache" / "figures"
FIGURES: dict[str, Callable[[Runs, Setup], Figure]] = {
    "3a": reuse.fig_3a,
    "3b": formulas.fig_3b,
    "5": formulas.fig_5,
    "7": sweep.fig_7,
    "8": sweep.fig_8,
    "9": sweep.fig_9,
    "10": microbenchmarks.fig_10,
    "11": microbenchmarks.fig_11,
    "12a": microbenchmarks.fig_12a,
    "12b": microbenchmarks.fig_12b,
    "13": microbenchmarks.fig_13,
    "14": formulas.fig_14,
    "table1": formulas.table_1,
    "check": check,
}


def chosen(names: str) -> list[str]:
    """Names out of a list with commas, or all.

    Raises:
        ValueError: one that is no figure.
    """
    if names == "all":
        return list(FIGURES)
    asked = [name.strip() for name in names.split(",")]
    for name in asked:
        if name not in FIGURES:
            raise ValueError(f"--figures: no figure {name!r}; known are all, {', '.join(FIGURES)}")
    return asked


def make(names: list[str], out: Path, traces: Traces, setup: Setup | None = None) -> None:
    """Makes figures and writes them; those of other names that the folder has stay."""
    setup = Setup() if setup is None else setup
    runs, run = Runs(traces, scale=setup.scale), header()
    out.mkdir(parents=True, exist_ok=True)
    missing = plots.why_not()
    if missing:
        print(missing)
    figures = report.read(out)
    for name in names:
        started = time.process_time()
        figure = FIGURES[name](runs, setup)
        figures[name] = figure.as_dict() | {"run": run}
        if figure.panels and not missing:
            plots.draw(figure, out / report.chart_name(name))
        report.write(out, list(FIGURES), figures, run)
        seconds = time.process_time() - started
        print(f"{report.label(name)}: {figure.ours} ({seconds:.0f} s)", flush=True)

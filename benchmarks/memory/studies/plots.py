"""Figures of the studies, with matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cache.figures.plots import DPI, OTHERS, why_not
from benchmarks.memory.studies.tables import Table

__all__ = ["draw_all", "why_not"]
LEFT_OUT = ("ideal", "ideal:1", "rows of the last", "superblocks:8MiB", "fixed_dual_mr09")


def draw_all(tables: list[Table], folder: Path) -> list[Path]:
    """Bars of the ratios by geometry, and lines of the sweeps."""
    found = {table.name: table for table in tables}
    return [
        _ratios(found["ratios"], folder / "ratios.png"),
        _oom(found["oom"], folder / "oom.png"),
        _batches(found["batches"], folder / "batches.png"),
    ]


def _canvas(width: float, height: float):
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(width, height), layout="constrained")
    axis = canvas.subplots()
    axis.grid(axis="y", linewidth=0.4, color="#dddddd")
    axis.set_axisbelow(True)
    return canvas, axis


def _save(canvas, path: Path) -> Path:
    canvas.savefig(path, dpi=DPI, pil_kwargs={"optimize": True}, metadata={"Software": None})
    return path


def _ratios(table: Table, path: Path) -> Path:
    canvas, axis = _canvas(11, 4)
    rows = [row for row in table.rows if row[0] not in LEFT_OUT]
    wide = 0.85 / len(rows)
    for index, (name, *values) in enumerate(rows):
        places = [group + (index + 0.5) * wide - 0.425 for group in range(len(values))]
        heights = [value or 0 for value in values]
        axis.bar(places, heights, wide, label=name, color=f"C{index}")
    axis.axhline(1, color="black", linewidth=0.6)
    labels = [name.replace(" ", "\n", 1) for name in table.columns[1:]]
    axis.set_xticks(range(len(labels)), labels, fontsize=7)
    axis.set_ylabel("tokens per tick over the ideal's")
    axis.set_title(table.title, fontsize=10)
    axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(canvas, path)


def _oom(table: Table, path: Path) -> Path:
    canvas, axis = _canvas(7.4, 3)
    names, bottoms = [row[0] for row in table.rows], [0.0] * len(table.rows)
    for index, workload in enumerate(table.columns[1:-2]):
        values = [row[1 + index] for row in table.rows]
        axis.bar(names, values, bottom=bottoms, label=workload, color=OTHERS[index])
        bottoms = [low + value for low, value in zip(bottoms, values, strict=True)]
    axis.set_xticks(range(len(names)), names, fontsize=7, rotation=20)
    axis.set_ylabel("failed calls")
    axis.set_title(table.title, fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    return _save(canvas, path)


def _batches(table: Table, path: Path) -> Path:
    canvas, axis = _canvas(7.4, 3)
    axis.plot([row[0] for row in table.rows], [row[1] for row in table.rows], marker="o")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("units that a rebalance moves")
    axis.set_ylabel("failed calls")
    axis.set_title(table.title, fontsize=10)
    return _save(canvas, path)

"""What a figure consists of: words, tables, and a chart that does not know how it is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that all have the same columns; None is what is not known."""

    title: str
    rows: list[dict[str, Any]]

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0])


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        kind: "lines" (series over x), "areas" (shares stacked over x), "bars" (a value per group), "boxes" (a list
            of values per group).
        x: numbers of lines and areas, names of the groups of bars and boxes.
        series: by label.
        log_x, log_y: logarithmic axes.
    """

    kind: str
    title: str
    x_label: str
    y_label: str
    x: list[Any]
    series: dict[str, list[Any]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of the paper, made again.

    Attributes:
        name: "3a".
        title: what it is about.
        paper: what the paper shows, with its numbers.
        ours: what came out here.
        differences: one sentence on why they differ, or that they do not.
        tables, panels: the numbers and the chart.
    """

    name: str
    title: str
    paper: str
    ours: str
    differences: str
    tables: list[Table]
    panels: list[Panel] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """All but the chart, which shows nothing that the tables do not say."""
        tables = [{"title": table.title, "rows": table.rows} for table in self.tables]
        words = {key: getattr(self, key) for key in ("title", "paper", "ours", "differences")}
        return words | {"tables": tables}


def ratio(value: float | None, base: float | None, digits: int = 2) -> float | None:
    """How many times as much; None where there is nothing to compare."""
    return round(value / base, digits) if base and value is not None else None


def win(value: float | None, base: float | None) -> float | None:
    """By how many percent more."""
    return round(100 * (value / base - 1), 1) if base and value is not None else None


def spread(values: Iterable[float | None]) -> dict[str, float | None]:
    """{"P5", ..., "P95", "mean"} of what is known."""
    known = [value for value in values if value is not None]
    if not known:
        return {f"P{p}": None for p in PERCENTILES} | {"mean": None}
    found = {f"P{p}": round(float(np.percentile(known, p)), 1) for p in PERCENTILES}
    return found | {"mean": round(float(np.mean(known)), 2)}


def said(value: float | None, unit: str = "") -> str:
    """A number in a sentence."""
    return "n/a" if value is None else f"{value:g}{unit}"


def listed(values: Iterable[float | None], unit: str = "") -> str:
    """Numbers in a sentence: 4.5x / 7.3x."""
    return " / ".join(said(value, unit) for value in values)

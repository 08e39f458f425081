"""What rings cost: their length, their place, and what a budget that has to hold them leaves of the ideal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.memory.studies.runs import GEOMETRIES, Cell, Kept, loads
from benchmarks.memory.studies.tables import Table, geo_mean

LENGTHS = (32, 16, 8, 4, 2, 1)
LEAST_BUILT = 8  # EngineConfig.grain
ROWS = tuple(round(8 * 2 ** (step / 6)) for step in range(31))  # 8 to 256
SPARE = 1.01
BESIDE, FIXED, IN_FRAMES = "frames", "frames:N", ("frames_rings", "frames_records", "frames_raw")
BUILT = (BESIDE, FIXED)
SAME = ("frames_records", 1)  # as frames_rings


@dataclass(frozen=True, kw_only=True)
class Point:
    """One allocator with rings of one length on one geometry, over all loads.

    Attributes:
        kind, length, model, gib: what ran. rows: the best number of them, of FIXED.
        of_ideal: geometric mean of tokens per tick over the ideal's; None where nothing runs.
        footprint: the most. infeasible: more than the ideal refuses, preempted: more than the ideal, all loads.
    """

    kind: str
    length: int
    model: str
    gib: int
    rows: int | None
    of_ideal: float | None
    footprint: float
    infeasible: int
    preempted: int


class Study:
    """Runs what a table of points needs.

    Args:
        kept: results of cells.
        smoke: few cells, for tests.
    """

    def __init__(self, kept: Kept, *, smoke: bool):
        self.kept, self.loads = kept, loads(smoke=smoke)
        self.geometries = GEOMETRIES[:1] if smoke else GEOMETRIES
        self.lengths = (8, 1) if smoke else LENGTHS
        self.rows = ROWS[::10] if smoke else ROWS

    def points(self, share: float = 1.0) -> list[Point]:
        """All of them; with a pool of more than the budget only those with rings in frames."""
        found = []
        for model, gib in self.geometries:
            if share == 1:
                found += [self.point(BESIDE, length, model, gib) for length in self.lengths]
                found += self._fixed(model, gib)
            for kind in IN_FRAMES:
                lengths = [length for length in self.lengths if (kind, length) != SAME]
                found += [self.point(kind, length, model, gib, share) for length in lengths]
        return found

    def point(
        self,
        kind: str,
        length: int,
        model: str,
        gib: int,
        share: float = 1.0,
        rows: int | None = None,
    ) -> Point:
        name = kind if rows is None else f"frames:{rows}"
        ratios, runs, ideals = [], [], []
        for workload, seed in self.loads:
            where = {"workload": workload, "seed": seed, "model": model, "gib": gib}
            spare = {"mode": "spare", "options": (share,)} if share > 1 else {"mode": "honest"}
            run = self.kept(Cell(allocator=f"{name}@{length}", **spare, **where))
            ideal = self.kept(Cell(mode="honest", allocator="ideal", **where))
            if run is None:
                continue
            runs.append(run)
            ideals.append(ideal)
            if run["completed"]:
                ratios.append(run["tokens_per_tick"] / ideal["tokens_per_tick"])
        more = lambda key: sum(run[key] for run in runs) - sum(ideal[key] for ideal in ideals)
        return Point(
            kind=kind,
            length=length,
            model=model,
            gib=gib,
            rows=rows,
            of_ideal=geo_mean(ratios),
            footprint=max((run["peak_footprint"] for run in runs), default=0.0),
            infeasible=more("infeasible"),
            preempted=more("preempted"),
        )

    def _fixed(self, model: str, gib: int) -> list[Point]:
        """The best number of rows for each length; the search begins where it ended for the one before."""
        best, place = [], None
        for length in self.lengths:
            known: dict[int, Point] = {}

            def score(index: int, length=length, known=known) -> float:
                point = self.point(FIXED, length, model, gib, rows=self.rows[index])
                known[index] = point
                return point.of_ideal or 0.0

            place = climb(score, len(self.rows), place)
            best.append(known[place])
        return best


def climb(score: Callable[[int], float], count: int, start: int | None) -> int:
    """An index below `count` with no better one beside it; from `start`, or from the best of every fourth."""
    known: dict[int, float] = {}

    def value(index: int) -> float:
        if index not in known:
            known[index] = score(index) if 0 <= index < count else float("-inf")
        return known[index]

    best = max(range(0, count, 4), key=value) if start is None else start
    for step in (4, 2, 1):
        while (beside := max(best - step, best + step, key=value)) != best:
            if value(beside) <= value(best):
                break
            best = beside
    return best


# --- tables ---------------------------------------------------------------------------------------


def ring_tables(study: Study) -> list[Table]:
    """Of the budget, of a hundredth more, of footprints, and of the best rows."""
    points = study.points()
    return [
        _ratios(
            study,
            points,
            name="rings",
            title="Rings within the budget",
            note="Tokens per tick over the byte-fluid ideal's, which has no rings, by tokens of a ring (after the @): "
            "geometric means over workloads and seeds. `frames`: rings beside the pool, in the footprint alone. "
            "`frames:N`: the best N. `frames_rings`, `frames_records`, `frames_raw`: rings in frames of the pool, "
            "whole, as records come, and as raw records without columns. Infeasible and preempted: more than under "
            "the ideal, all runs; where more is refused, what is left is an easier load. The engine has the rows "
            "that are built.",
        ),
        _ratios(
            study,
            study.points(SPARE),
            name="rings_spare",
            title=f"Rings within {SPARE} of the budget",
            note=f"The same with a pool of {SPARE} of the budget, against the ideal with the budget. What the ideal "
            "refuses is refused here too.",
        ),
        _by_length(
            study,
            points,
            BESIDE,
            "footprint",
            name="ring_footprints",
            title="Footprint with rings beside the pool",
            note="Of `frames`, over the budget, by the tokens of a ring: rings for the most rows that ever ran.",
        ),
        _by_length(
            study,
            points,
            FIXED,
            "rows",
            name="ring_rows",
            title="The best N of `frames:N`",
            note=f"By the tokens of a ring, of {len(study.rows)} from {study.rows[0]} to {study.rows[-1]}, over all "
            "loads; one with no better one beside it.",
        ),
    ]


def _ratios(study: Study, points: list[Point], *, name: str, title: str, note: str) -> Table:
    rows = []
    for kind, length in dict.fromkeys((point.kind, point.length) for point in points):
        own = [point for point in points if (point.kind, point.length) == (kind, length)]
        values = [point.of_ideal for point in own]
        rows.append(
            (
                f"{kind} @{length}",
                "built" if kind in BUILT and length >= LEAST_BUILT else "not built",
                *values,
                min((value for value in values if value is not None), default=None),
                max(point.footprint for point in own),
                sum(point.infeasible for point in own),
                sum(point.preempted for point in own),
            )
        )
    order = [*(BESIDE, FIXED), *IN_FRAMES]
    rows.sort(key=lambda row: order.index(row[0].partition(" ")[0]))
    return Table(
        name=name,
        title=title,
        note=f"{note} {len(study.loads)} loads.",
        columns=(
            *("allocator", "engine", *_names(study)),
            *("least", "footprint", "infeasible", "preempted"),
        ),
        rows=rows,
    )


def _by_length(
    study: Study, points: list[Point], kind: str, field: str, *, name: str, title: str, note: str
) -> Table:
    """One value of one kind of allocator."""
    rows = []
    for length in study.lengths:
        own = [point for point in points if (point.kind, point.length) == (kind, length)]
        rows.append((length, *(getattr(point, field) for point in own)))
    return Table(name=name, title=title, note=note, columns=("tokens", *_names(study)), rows=rows)


def _names(study: Study) -> list[str]:
    return [f"{model} {gib} GiB" for model, gib in study.geometries]

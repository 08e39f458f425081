"""Which cells are run, and a file of their results that is gone on with."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.pools.loads import WORKLOADS, make_load
from benchmarks.pools.model_sizes import PUBLISHED, model_sizes
from benchmarks.pools.names import make_memory, make_published, make_run
from benchmarks.pools.paper_mode import run_paper

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
SEEDS = 3
PAPER_SIZES = tuple((model, gib) for model in PUBLISHED for gib in (1, 4))
VARIANTS = (
    "padded_unified",
    "fixed_dual_mr05",
    "fixed_dual_mr09",
    "avmp_static_mr05",
    "avmp_dynamic_b128",
)
MORE_SPLITS = ("fixed_dual_sglang", "fixed_dual_mr03")
BATCHES = tuple(f"avmp_dynamic_b{1 << power}" for power in range(9))
GEOMETRIES = (
    *PAPER_SIZES,
    ("nemotron_h_8b", 8),
    ("qwen3_next_80b", 8),
    ("bamba_9b", 8),
    ("granite_4_h_small", 8),
    ("paper_7b_float32", 8),
)
ROWS = tuple(
    f"frames:{rows}" for rows in (8, 16, 32, 64, 96, 128)
)  # with their rings inside the pool
HONEST = (
    *("ideal", "ideal:1", "frames", *ROWS, "two_ended", "vllm_big_block"),
    *("superblocks:8MiB", "superblocks:16MiB", "superblocks:64MiB"),
    *("fixed_dual_mr05", "fixed_dual_sglang", "fixed_dual_mr09"),
    *("avmp_dynamic_b128", "padded_unified"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run.

    Attributes:
        mode: paper, honest or spare.
        allocator, workload, model, gib, seed: of it. options: of spare, the pool over the budget.
    """

    mode: str
    allocator: str
    workload: str
    model: str
    gib: int
    seed: int
    options: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        parts = (self.mode, self.allocator, self.workload, self.model, self.gib, self.seed)
        return " ".join(map(str, (*parts, *self.options)))


def loads(*, smoke: bool) -> list[tuple[str, int]]:
    """Workloads and seeds."""
    if smoke:
        return [("sharegpt_replay", 4), ("uniform_short", 1)]
    return [(name, kind.seed + more) for name, kind in WORKLOADS.items() for more in range(SEEDS)]


def cells(*, smoke: bool) -> Iterator[Cell]:
    """All of them, or for a test a few of each kind."""
    sizes, geometries = (PAPER_SIZES[:1], GEOMETRIES[:1]) if smoke else (PAPER_SIZES, GEOMETRIES)
    names = dict.fromkeys((*VARIANTS, *MORE_SPLITS, *BATCHES))
    for workload, seed in loads(smoke=smoke):
        for model, gib in sizes:
            where = {"workload": workload, "seed": seed, "model": model, "gib": gib}
            for name in names:
                yield Cell(mode="paper", allocator=name, **where)
        for model, gib in geometries:
            where = {"workload": workload, "seed": seed, "model": model, "gib": gib}
            for name in HONEST:
                yield Cell(mode="honest", allocator=name, **where)


load, model_of = cache(make_load), cache(model_sizes)


def run_cell(cell: Cell) -> dict | None:
    """What came of it; None where the allocator cannot be made for these sizes."""
    return RUN[cell.mode](cell)


def _paper(cell: Cell) -> dict:
    geometry, size = PUBLISHED[cell.model], cell.gib * GIB
    memory = make_published(cell.allocator, geometry, size)
    requests = load(cell.workload, cell.seed)
    return run_paper(requests, memory, geometry, name=cell.allocator, pool_bytes=size).as_dict()


def _honest(cell: Cell) -> dict | None:
    model, size = model_of(cell.model), cell.gib * GIB
    try:
        memory = make_memory(cell.allocator, model, size)
    except ValueError:  # the rings of so many rows leave no room
        return None
    run = make_run(load(cell.workload, cell.seed), memory, model)
    return run.run(name=cell.allocator, pool_bytes=size).as_dict()


def _spare(cell: Cell) -> dict | None:
    """A pool of more than the budget, which everything is still measured by."""
    model, size = model_of(cell.model), cell.gib * GIB
    memory = make_memory(cell.allocator, model, int(cell.options[0] * size))
    # Who is refused at the budget stays refused, or another load would be compared.
    own, ideal = memory.fits_alone, make_memory("ideal", model, size).fits_alone
    memory.fits_alone = lambda num_tokens: ideal(num_tokens) and own(num_tokens)
    run = make_run(load(cell.workload, cell.seed), memory, model)
    return run.run(name=cell.allocator, pool_bytes=size).as_dict()


RUN: dict[str, Callable[[Cell], dict | None]] = {
    "paper": _paper,
    "honest": _honest,
    "spare": _spare,
}


class Kept:
    """Results of cells, those that the file has from there; the file is written as it goes.

    Args:
        path: of the file. say: told how far it is.
    """

    def __init__(self, path: Path, say: Callable[[str], None]):
        self._path, self._say = path, say
        self._known = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else {}
        self._asked = self._unsaved = 0

    def __call__(self, cell: Cell) -> dict | None:
        self._asked += 1
        if cell.key not in self._known:
            self._known[cell.key] = run_cell(cell)
            self._unsaved += 1
            if self._unsaved >= 200:
                self.save()
                self._say(f"{self._asked} runs")
        return self._known[cell.key]

    def save(self) -> None:
        save(self._path, self._known)
        self._unsaved = 0


def run_all(path: Path, *, smoke: bool, say: Callable[[str], None]) -> dict[Cell, dict | None]:
    """Every cell of `cells`."""
    kept = Kept(path, say)
    results = {cell: kept(cell) for cell in cells(smoke=smoke)}
    kept.save()
    return results


def save(path: Path, known: dict[str, dict | None]) -> None:
    """One line for each run."""
    lines = (f"{json.dumps(key)}: {json.dumps(_short(run))}" for key, run in known.items())
    text = '{"header": ' + json.dumps(header()) + ',\n"runs": {\n' + ",\n".join(lines) + "\n}}\n"
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


NAMED = ("mode", "workload", "allocator", "model_spec", "pool_bytes", "seed")  # the key has them


def _short(run: dict | None) -> dict | None:
    if run is None:
        return None
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in run.items()
        if name not in NAMED and value is not None
    }


def header() -> dict[str, str]:
    """Where this was run."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "commit": done.stdout.strip(),
    }

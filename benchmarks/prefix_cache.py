"""Cache policies on the shipped traces, for models of all kinds, from far too little memory to enough for all.

A cell is a trace, a model and a capacity: a share of what the cache takes when nothing is ever evicted. Every policy
runs through the same classes an engine uses, in request order. What counts is how much of the gap between `sglang`
(least recently used) and `optimal` (it knows the future, and is a lower bound of the best) a policy closes. The
traces are stand-ins but for Mooncake's log: see traces/README.md.

    python benchmarks/prefix_cache.py [--traces chat,log] [--specs paper_7b] [--json FILE]
    python benchmarks/prefix_cache.py --figures all|3a,3b,... [--out FOLDER] [--trace-folder FOLDER]

A file is gone on with: cells that it has are not run again. With --figures, the Marconi paper's figures are made
instead: see prefix_cache_figures/.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import header, write_json
from benchmarks.prefix_cache_figures import command
from benchmarks.prefix_cache_figures.loads import COMMITTED, FOLDER, Traces
from benchmarks.prefix_cache_figures.runs import grain_of
from hybrid_jax.sim.model_specs import load_spec
from hybrid_jax.sim.prefix_cache.caches import make_cache
from hybrid_jax.sim.prefix_cache.request_order import simulate
from hybrid_jax.sim.prefix_cache.traces import TraceRequest, read_trace

SHARES = (1 / 24, 1 / 12, 1 / 6, 1 / 3, 2 / 3)
SPECS = (
    *("jamba_1_5_mini", "mamba_7b", "nemotron_h_8b", "paper_7b", "paper_7b_real"),
    *("qwen3_next_80b", "transformer_8b"),
)
FIXED = ("lru", "alpha:0.2", "alpha:0.5", "alpha:1", "alpha:2", "marconi", "marconi-code")
POLICIES = ("vllm", "sglang", *FIXED, "adaptive", "optimal", "infinite")
LEAST_GAP = 0.01  # of the tokens, between sglang and optimal, for a share of it to mean something


def unbounded_bytes(trace: list[TraceRequest], spec: str) -> int:
    """What the cache takes when nothing is ever evicted."""
    costs = load_spec(spec).costs
    cache = make_cache("lru", costs, 1 << 60, trace, grain=grain_of(costs))
    for request in trace:
        cache.request(request.prompt, request.whole)
    return cache.peak


def run_cell(trace: list[TraceRequest], name: str, spec: str, share: float, whole: int) -> dict:
    """Hit rates and processor seconds of every policy in one cell."""
    costs, capacity = load_spec(spec).costs, int(whole * share)
    cell = {"trace": name, "spec": spec, "share": round(share, 4), "capacity": capacity}
    for policy in POLICIES:
        result = simulate(trace, costs, policy, capacity, grain=grain_of(costs), bounds=False)
        cell[policy] = round(result.token_hit_rate, 5)
        cell[f"{policy} s"] = round(result.seconds, 3)
    return cell


def closed(cell: dict, policy: str) -> float | None:
    """Share of the gap between sglang and optimal; None where there is hardly one."""
    gap = cell["optimal"] - cell["sglang"]
    return (cell[policy] - cell["sglang"]) / gap if gap > LEAST_GAP else None


def summary(cells: list[dict]) -> dict:
    """What the targets ask for."""
    shares = {
        policy: [s for cell in cells if (s := closed(cell, policy)) is not None]
        for policy in (*FIXED, "adaptive")
    }
    best = [max(cell[policy] for policy in FIXED) for cell in cells]
    return {
        "cells": len(cells),
        "cells_with_a_gap": len(shares["adaptive"]),
        "mean_share_of_gap_closed": {
            policy: round(float(np.mean(values)), 4) if values else None
            for policy, values in shares.items()
        },
        "adaptive_minus_sglang_least": min(c["adaptive"] - c["sglang"] for c in cells),
        "adaptive_minus_best_fixed_least": min(
            cell["adaptive"] - rate for cell, rate in zip(cells, best, strict=True)
        ),
    }


def print_cell(cell: dict) -> None:
    rates = "  ".join(f"{policy} {100 * cell[policy]:.1f}" for policy in POLICIES)
    print(f"{cell['trace']:<7}{cell['spec']:<16}{cell['share']:<8.3f}{rates}", flush=True)


def run_cells(options: argparse.Namespace) -> None:
    """Every cell that the file lacks, and a summary of all."""
    cells = []
    if options.json and options.json.exists():
        cells = json.loads(options.json.read_text())["cells"]
    done = {(cell["trace"], cell["spec"], cell["share"]) for cell in cells}
    for name in options.traces.split(","):
        trace = read_trace(FOLDER / COMMITTED[name].file)
        for spec in options.specs.split(","):
            todo = [share for share in SHARES if (name, spec, round(share, 4)) not in done]
            whole = unbounded_bytes(trace, spec) if todo else 0
            for share in todo:
                cells.append(run_cell(trace, name, spec, share, whole))
                print_cell(cells[-1])
                write_json(options.json, header() | {"summary": summary(cells), "cells": cells})
    print(json.dumps(summary(cells), indent=1))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", default=",".join(COMMITTED))
    parser.add_argument("--specs", default=",".join(SPECS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figures", help=f"all, or some of {', '.join(command.FIGURES)}")
    parser.add_argument("--out", type=Path, default=command.OUT, help="folder of the figures")
    parser.add_argument("--trace-folder", type=Path, help="more traces for the figures")
    options = parser.parse_args(arguments)
    if options.figures is None:
        run_cells(options)
        return
    try:
        command.make(command.chosen(options.figures), options.out, Traces(options.trace_folder))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

"""Cache policies on the shipped traces, for models of all kinds, from far too little memory to enough for all.

A cell is a trace, a model and a capacity: a share of what the cache takes when nothing is ever evicted. Every policy
runs through the same classes an engine uses, in request order. What counts is how much of the gap between `sglang`
(least recently used) and `optimal` (it knows the future, and is a lower bound of the best) a policy closes. The
traces are stand-ins but for Mooncake's log: see traces/README.md.

    python benchmarks/cache/policies.py [--traces chat,log] [--specs paper_7b] [--policies sglang,...] [--json FILE]
    python benchmarks/cache/policies.py --drawn tuning|judging [--wide] [--cells 200] [--json FILE]
    python benchmarks/cache/policies.py --figures all|3a,3b,... [--out FOLDER] [--trace-folder FOLDER]

A file is gone on with: cells that it has are not run again.

With --drawn, loads, models and capacities are drawn at random (see drawn_cells.py), to see what `adaptive` can lose;
with --wide, over wider ranges. Even seeds are there to try things on, odd ones to judge them. Each --again runs
`adaptive` in all cells of the file once more and counts as an attempt. With --figures, the Marconi paper's figures are
made: see figures/.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

from benchmarks.cache.drawn_cells import draw_cell, draw_trace, draw_wide_cell
from benchmarks.cache.figures import command
from benchmarks.cache.figures.loads import COMMITTED, FOLDER, Traces
from benchmarks.cache.figures.runs import grain_of
from benchmarks.common import header, write_json
from hybrid_jax.sim.model_specs import load_spec
from hybrid_jax.sim.prefix_cache.caches import least_capacity, make_cache
from hybrid_jax.sim.prefix_cache.request_order import simulate
from hybrid_jax.sim.prefix_cache.traces import TraceRequest, read_trace

SHARES = (1 / 24, 1 / 12, 1 / 6, 1 / 3, 2 / 3)
SPECS = (
    *("jamba_1_5_mini", "codestral_mamba_7b", "nemotron_h_8b", "paper_7b", "paper_7b_real"),
    *("qwen3_5_9b", "qwen3_5_35b_a3b", "qwen3_next_80b", "llama_3_1_8b"),
)
FIXED = ("lru", "alpha:0.2", "alpha:0.5", "alpha:1", "alpha:2", "marconi", "marconi-code")
POLICIES = ("vllm", "sglang", *FIXED, "adaptive", "optimal", "infinite")
DRAWN_POLICIES = ("lru", "sglang", "marconi", "adaptive", "optimal")
WIDE_POLICIES = (*DRAWN_POLICIES, "seglen")
BESIDE = ("adaptive", "optimal")  # `adaptive` is not to fall behind any other of a drawn cell
HALVES = {"tuning": 0, "judging": 1}  # the first seed; every other one follows
NUM_WORST = 10
LEAST_GAP = 0.01  # of the tokens, between sglang and optimal, for a share of it to mean something


def unbounded_bytes(trace: list[TraceRequest], spec: str) -> int:
    """What the cache takes when nothing is ever evicted."""
    costs = load_spec(spec).costs
    cache = make_cache("lru", costs, 1 << 60, trace, grain=grain_of(costs))
    for request in trace:
        cache.request(request.prompt, request.whole)
    return cache.peak


def run_cell(
    trace: list[TraceRequest],
    name: str,
    spec: str,
    share: float,
    whole: int,
    policies: tuple[str, ...] = POLICIES,
) -> dict:
    """Hit rates and processor seconds of every policy in one cell."""
    cell = {"trace": name, "spec": spec, "share": round(share, 4), "capacity": int(whole * share)}
    return cell | rates(trace, spec, cell["capacity"], policies)


def rates(
    trace: list[TraceRequest], spec: str, capacity: int, policies: tuple[str, ...]
) -> dict[str, float]:
    """Hit rate and processor seconds of each policy."""
    costs, found = load_spec(spec).costs, {}
    for policy in policies:
        result = simulate(trace, costs, policy, capacity, grain=grain_of(costs), bounds=False)
        found[policy] = round(result.token_hit_rate, 5)
        found[f"{policy} s"] = round(result.seconds, 3)
    return found


def closed(cell: dict, policy: str) -> float | None:
    """Share of the gap between sglang and optimal; None where there is hardly one, or optimal has not run."""
    gap = cell.get("optimal", 0) - cell["sglang"]
    return (cell[policy] - cell["sglang"]) / gap if gap > LEAST_GAP else None


def summary(cells: list[dict]) -> dict:
    """What the targets ask for."""
    shares = {
        policy: [s for cell in cells if (s := closed(cell, policy)) is not None]
        for policy in (*FIXED, "seglen", "adaptive", "placed")
        if all(policy in cell for cell in cells)
    }
    fixed = ("sglang", *FIXED, "seglen")
    best = [max(cell[policy] for policy in fixed if policy in cell) for cell in cells]
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
    ran = [policy for policy in (*POLICIES, "seglen", "placed") if policy in cell]
    told = "  ".join(f"{policy} {100 * cell[policy]:.1f}" for policy in ran)
    print(f"{cell['trace']:<7}{cell['spec']:<16}{cell['share']:<8.3f}{told}", flush=True)


def run_cells(options: argparse.Namespace) -> None:
    """Every cell that the file lacks, and a summary of all."""
    cells = []
    if options.json and options.json.exists():
        cells = json.loads(options.json.read_text())["cells"]
    policies = tuple(options.policies.split(",")) if options.policies else POLICIES
    done = {(cell["trace"], cell["spec"], cell["share"]) for cell in cells}
    for name in options.traces.split(","):
        trace = read_trace(FOLDER / COMMITTED[name].file)
        for spec in options.specs.split(","):
            todo = [share for share in SHARES if (name, spec, round(share, 4)) not in done]
            whole = unbounded_bytes(trace, spec) if todo else 0
            for share in todo:
                cells.append(run_cell(trace, name, spec, share, whole, policies))
                print_cell(cells[-1])
                write_json(options.json, header() | {"summary": summary(cells), "cells": cells})
    print(json.dumps(summary(cells), indent=1))


def behind(cell: dict) -> float:
    """Points by which `adaptive` is behind the best plain policy that ran; below 0 where it is ahead."""
    plain = [cell[policy] for policy in WIDE_POLICIES if policy in cell and policy not in BESIDE]
    return 100 * (max(plain) - cell["adaptive"])


def drawn_summary(cells: list[dict]) -> dict:
    """How often and by how much `adaptive` is behind, and what it gains."""
    lost, ranked = np.array([behind(cell) for cell in cells]), sorted(cells, key=behind)
    with_gap = [cell for cell in cells if closed(cell, "adaptive") is not None]
    gaps = np.array([behind(cell) for cell in with_gap])
    return {
        "cells": len(cells),
        "cells_with_a_gap": len(with_gap),
        "within_0.3_points_%": round(100 * float((lost <= 0.3).mean()), 1),
        "within_half_a_point_%": round(100 * float((lost <= 0.5).mean()), 1),
        "within_0.7_points_%": round(100 * float((lost <= 0.7).mean()), 1),
        "within_a_point_%": round(100 * float((lost <= 1).mean()), 1),
        "within_half_a_point_with_a_gap_%": round(100 * float((gaps <= 0.5).mean()), 1)
        if with_gap
        else None,
        "worst_points": round(-float(lost.max()), 2),
        "mean_points": round(-float(lost.mean()), 2),
        "mean_share_of_gap_closed_%": round(
            100 * float(np.mean([closed(cell, "adaptive") for cell in with_gap])), 2
        )
        if with_gap
        else None,
        "worst_cells": [
            {"seed": cell["seed"], "trace": cell["trace"], "spec": cell["spec"]}
            | {"share": cell["share"], "points": round(-behind(cell), 2)}
            for cell in ranked[: -1 - NUM_WORST : -1]
        ],
    }


def run_drawn(options: argparse.Namespace) -> None:
    """What the file lacks of cells of one half of the seeds, or `adaptive` in all that it has."""
    report: dict = {"attempts": [], "cells": []}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    cells = {cell["seed"]: cell for cell in report["cells"]}
    draw = draw_wide_cell if options.wide else draw_cell
    policies = WIDE_POLICIES if options.wide else DRAWN_POLICIES
    if options.policies:
        policies = tuple(options.policies.split(","))
    seeds = range(HALVES[options.drawn], 2 * options.cells, 2)
    for seed in list(cells) if options.again else seeds:
        lacks = [name for name in policies if name not in cells.get(seed, {})]
        if not (lacks or options.again):
            continue
        drawn = draw(seed)
        trace = draw_trace(drawn)
        if seed not in cells:
            whole, least = (
                unbounded_bytes(trace, drawn.spec),
                least_capacity(load_spec(drawn.spec).costs),
            )
            cells[seed] = drawn.told() | {"capacity": max(least, int(whole * drawn.share))}
        run = ("adaptive",) if options.again else tuple(lacks)
        cells[seed] |= rates(trace, drawn.spec, cells[seed]["capacity"], run)
        if not options.again:
            write_json(options.json, report | {"cells": list(cells.values())})
        print_cell(cells[seed])
    report = {"attempts": [*report["attempts"], header() | drawn_summary(list(cells.values()))]}
    write_json(options.json, report | {"cells": list(cells.values())})
    print(json.dumps(report["attempts"][-1], indent=1))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", default=",".join(COMMITTED))
    parser.add_argument("--specs", default=",".join(SPECS))
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--drawn", choices=HALVES, help="cells drawn at random, of this half of the seeds"
    )
    parser.add_argument("--wide", action="store_true", help="drawn over wider ranges")
    parser.add_argument(
        "--policies", help="which run; for cells of traces sglang, adaptive and optimal at least"
    )
    parser.add_argument("--cells", type=int, default=200, help="how many are drawn")
    parser.add_argument(
        "--again", action="store_true", help="run adaptive in the file's drawn cells"
    )
    parser.add_argument("--figures", help=f"all, or some of {', '.join(command.FIGURES)}")
    parser.add_argument("--out", type=Path, default=command.OUT, help="folder of the figures")
    parser.add_argument("--trace-folder", type=Path, help="more traces for the figures")
    options = parser.parse_args(arguments)
    if options.drawn:
        run_drawn(options)
        return
    if options.figures is None:
        run_cells(options)
        return
    try:
        command.make(command.chosen(options.figures), options.out, Traces(options.trace_folder))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

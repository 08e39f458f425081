"""Routers before replicas, on virtual time: the engine's own beside published ones.

    python benchmarks/cluster/routers.py [--json benchmarks/results/cluster/routers.json] [--requests 4000]
                                         [--replicas 16] [--seeds 5] [--classes chats,agents] [--smoke]

Every request runs through a replica's own scheduler and cache. A cell is a class of requests, a load and a seed; the
same requests go through every router. Load 0.7 means that requests arrive at 0.7 times the rate that the fleet reaches
when all of them are there at once, sent to the replica with the fewest. The model is `hybrid_7b` on H200s, by the
formula of `DeviceModel`: times are computed. A file is gone on with: runs that it has are not made again.

What is compared is the mean and the 95th percentile of the time to the first token, over the best of all other routers
in the same cell. The others have settings. For each class they get those of `GRIDS` with which they did best on a seed
of its own, in fewer requests; the first of each grid are their authors'. Ours is the same everywhere.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

from benchmarks.cluster.loads import CLASSES, at_speed, draw
from benchmarks.common import header, write_json
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.costs import Costs
from hybrid_jax.sim.model_specs import load_spec
from hybrid_jax.sim.routing.fleet import Routing, run_fleet
from hybrid_jax.sim.routing.own import OwnRouting
from hybrid_jax.sim.routing.rivals import (
    ApproximateTree,
    BlocksAndLoad,
    ExploitOrExplore,
    LeastLoaded,
    PrefixHash,
    RoundRobin,
    joint_seen,
)

MODEL, CAPACITY = "hybrid_7b", 40 * 10**9
LOADS = (0.7, 0.3, 0.9)
OWN = "own"


TUNING_SEED, TUNING_REQUESTS = 101, 2000
Settings = dict[str, Any]


def routers(costs: Costs) -> dict[str, Callable[..., Routing]]:
    """What makes each router, by name, of its settings."""
    return {
        "round robin": RoundRobin,
        "fewest requests": LeastLoaded,
        "hash of the prefix": PrefixHash,
        "approximate tree": ApproximateTree,
        "blocks and load": BlocksAndLoad,
        "blocks and load, joint hits": functools.partial(BlocksAndLoad, joint_seen),
        "exploit or explore": functools.partial(ExploitOrExplore, costs),
        "exploit or explore, joint hits": functools.partial(
            ExploitOrExplore, costs, seen=joint_seen
        ),
        OWN: OwnRouting,
    }


def _grid(**values: Sequence[Any]) -> list[Settings]:
    return [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]


_WEIGHTS, _WINDOWS = _grid(weight=(1, 2, 4, 8)), _grid(window_s=(180, 30, 5), imbalance=(1.5, 3))
GRIDS: dict[str, list[Settings]] = {
    "hash of the prefix": _grid(tokens=(1024, 4096), bound=(1.25, 2)),
    "approximate tree": _grid(absolute=(64, 16, 4, 1)),
    "blocks and load": _WEIGHTS,
    "blocks and load, joint hits": _WEIGHTS,
    "exploit or explore": _WINDOWS,
    "exploit or explore, joint hits": _WINDOWS,
}


class Cell:
    """Requests of a class at a load, for fleets of so many replicas."""

    def __init__(self, load: float, seed: int, name: str, *, replicas: int, requests: int) -> None:
        spec = load_spec(MODEL)
        self._costs = spec.costs
        self._options: dict[str, Any] = {
            "replicas": replicas,
            "costs": spec.costs,
            "decode": spec.decode,
            "engine": EngineConfig(cache=CacheConfig(), max_rows=64, prefill_tokens=8192),
            "capacity": CAPACITY,
        }
        trace = draw(name, requests, seed)
        shortest = run_fleet(at_speed(trace, 0.0), LeastLoaded(), **self._options).span_s
        span = trace[-1].arrival_s - trace[0].arrival_s
        self._trace = at_speed(trace, shortest / load / span)

    def run(self, router: str, settings: Settings) -> dict[str, Any]:
        """What a router does with them."""
        routing = routers(self._costs)[router](**settings)
        return {"settings": settings, **asdict(run_fleet(self._trace, routing, **self._options))}


def tune(name: str, *, replicas: int, requests: int) -> dict[str, Settings]:
    """The settings with which each router did best in a class, by the mean time to the first token."""
    cell = Cell(LOADS[0], TUNING_SEED, name, replicas=replicas, requests=requests)

    def mean(router: str, settings: Settings) -> float:
        return cell.run(router, settings)["ttft_s"]["mean"]

    return {
        router: min(grid, key=functools.partial(mean, router)) for router, grid in GRIDS.items()
    }


def cells(seeds: int) -> list[tuple[float, int, str]]:
    """Load, seed and class of each cell: all seeds at the first load, one at the others."""
    return [
        (load, seed, name)
        for load in LOADS
        for seed in range(1, 1 + (seeds if load == LOADS[0] else 1))
        for name in CLASSES
    ]


def run_cell(
    load: float,
    seed: int,
    name: str,
    *,
    tuned: dict[str, Settings],
    known: dict[str, Any],
    replicas: int,
    requests: int,
) -> dict[str, Any]:
    """What each router does in a cell; `known` are results that are there already."""
    wanted = {router: tuned.get(router, {}) for router in routers(load_spec(MODEL).costs)}
    same = {r: known[r] for r in wanted if r in known and known[r].get("settings") == wanted[r]}
    if len(same) < len(wanted):
        cell = Cell(load, seed, name, replicas=replicas, requests=requests)
        same |= {r: cell.run(r, s) for r, s in wanted.items() if r not in same}
    return {router: same[router] for router in wanted}


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """A cell's ratios, and whether seeing caches matters there."""
    results = row["routers"]
    ratios = {}
    for what in ("mean", "p95"):
        best = min(r["ttft_s"][what] for name, r in results.items() if name != OWN)
        ratios[what] = results[OWN]["ttft_s"][what] / best
    blind = results["fewest requests"]["ttft_s"]["mean"]
    seeing = min(
        r["ttft_s"]["mean"]
        for name, r in results.items()
        if name.startswith(("blocks", "exploit", "approx"))
    )
    return {"ratios": ratios, "caches matter": seeing < 0.8 * blind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--classes", default=",".join(CLASSES), help="others stay as they are")
    parser.add_argument("--smoke", action="store_true", help="one small cell")
    args = parser.parse_args()
    requests, replicas = (60, 3) if args.smoke else (args.requests, args.replicas)
    found: dict[str, Any] = {}
    tuned: dict[str, dict[str, Settings]] = {}
    if args.json is not None and args.json.exists():
        old = json.loads(args.json.read_text())
        if (old["requests"], old["replicas"]) == (requests, replicas):
            found = {f"{row['load']}/{row['seed']}/{row['class']}": row for row in old["cells"]}
            tuned = old.get("tuned", {})
    rows: list[dict[str, Any]] = []

    def write() -> None:
        made = {(row["load"], row["seed"], row["class"]) for row in rows}
        left = [r for r in found.values() if (r["load"], r["seed"], r["class"]) not in made]
        numbers = {"requests": requests, "replicas": replicas, "tuned": tuned}
        numbers |= {"cells": [*rows, *left]}
        if args.json is not None:
            write_json(args.json, header() | numbers)

    todo = cells(args.seeds)[:1] if args.smoke else cells(args.seeds)
    for load, seed, name in todo:
        if name not in args.classes.split(","):
            continue
        if name not in tuned:
            tuning = min(requests, TUNING_REQUESTS)
            tuned[name] = tune(name, replicas=replicas, requests=tuning)
            print(f"tuned for {name}: {tuned[name]}", flush=True)
        known = found.get(f"{load}/{seed}/{name}", {}).get("routers", {})
        results = run_cell(
            load,
            seed,
            name,
            tuned=tuned[name],
            known=known,
            replicas=replicas,
            requests=requests,
        )
        row: dict[str, Any] = {"load": load, "seed": seed, "class": name, "routers": results}
        row |= judged(row)
        rows.append(row)
        print(f"load {load}, seed {seed}, {name}")
        for router, r in results.items():
            ttft = r["ttft_s"]
            print(
                f"  {router:32} mean {ttft['mean']:7.3f} s, p95 {ttft['p95']:7.3f} s, hits {r['token_hit_rate']:.3f}, "
                f"busiest {r['imbalance']:.2f}, {r['decision_us']:.0f} us"
            )
        print(
            f"  own over the best: mean {row['ratios']['mean']:.3f}, p95 {row['ratios']['p95']:.3f}",
            flush=True,
        )
        write()
    for matters in (True, False):
        chosen = [r for r in rows if r["caches matter"] == matters and r["load"] == LOADS[0]]
        for what in ("mean", "p95"):
            values = [r["ratios"][what] for r in chosen]
            if values:
                print(
                    f"load {LOADS[0]}, caches {'matter' if matters else 'do not matter'}: {what} over the best "
                    f"{statistics.median(values):.3f} (median of {len(values)}), {max(values):.3f} (worst)"
                )


if __name__ == "__main__":
    main()

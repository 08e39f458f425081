"""What lies below the arena, on traces: hits by tier, bytes moved and times to the first token, on virtual time.

    python benchmarks/cache/tier_studies.py [--json benchmarks/results/cache/tier_studies.json] [--png FILE]
                                            [--limit 500] [--traces FOLDER] [--smoke]

Each cell is a trace, a form of checkpoints and an arena. It runs five times through the engine's own scheduler: with
the arena alone, with a host's memory of four times the arena, with a disk of twenty times the arena as well, with both
and `loads="always"`, and with an arena of three and a half times. The model is `hybrid_7b` on one H200, by the formula
of `DeviceModel`: the times are computed. Those of the disk are of the machine on which
benchmarks/results/cache/disk.json was measured, which is slower than the disks beside an H200. The traces are stand-ins
but for Mooncake's log: see traces/README.md. --traces FOLDER adds the .jsonl.gz files there that are not in traces/. A
file is gone on with: runs that it has are not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

from benchmarks.cache.figures.loads import COMMITTED, FOLDER
from benchmarks.cache.figures.plots import why_not
from benchmarks.common import header, write_json
from hybrid_jax.sim.model_specs import load_spec
from hybrid_jax.sim.prefix_cache.in_flight import InFlightResult, simulate_in_flight
from hybrid_jax.sim.prefix_cache.timing import DeviceModel
from hybrid_jax.sim.prefix_cache.traces import TraceRequest, read_trace

MODEL = "hybrid_7b"
HOST, DISK, LARGER = 4, 20, 3.5  # times the arena
# Times the arena: the arena itself, the host's memory, the disk.
SETUPS = {
    "arena": (1, 0, 0),
    "with a host's memory": (1, HOST, 0),
    "with a disk, too": (1, HOST, DISK),
    "with both, all loaded": (1, HOST, DISK),
    "larger arena": (LARGER, 0, 0),
}
CHECKPOINTS = ("float32", "int8")
SMALL, LARGE = 500 * 10**6, 5 * 10**9  # bytes of an arena
CHATS = ("chat", "short")  # whose arenas are small
ROOMIER = 4  # the second arena of a trace
COLORS = {"arena": "#4c78a8", "host": "#f28e2b", "disk": "#1b7f5c"}


def traces(folder: Path | None, *, smoke: bool = False) -> dict[str, tuple[Path, int]]:
    """Path and smallest arena of each trace by name; of a single one for a try."""
    found = {
        name: (FOLDER / load.file, SMALL if name in CHATS else LARGE)
        for name, load in COMMITTED.items()
        if name == "short" or not smoke
    }
    for path in sorted(folder.glob("*.jsonl.gz")) if folder is not None else ():
        if not (FOLDER / path.name).exists():
            found[path.name.partition(".")[0]] = path, LARGE
    return found


def run(
    trace: list[TraceRequest], checkpoints: str, capacity: int, setup: str
) -> tuple[InFlightResult, dict[str, int]]:
    """A trace in one setup, and the bytes of its tiers."""
    spec = load_spec(MODEL)
    arena, host, disk = (int(times * capacity) for times in SETUPS[setup])
    result = simulate_in_flight(
        trace,
        spec.costs,
        "adaptive",
        arena,
        host_capacity=host,
        disk_capacity=disk,
        narrow_bytes=spec.narrow_bytes if checkpoints == "int8" else 0,
        loads="always" if setup == "with both, all loaded" else "faster",
    )
    return result, {"arena": arena, "host": host, "disk": disk}


def row_of(result: InFlightResult, capacities: dict[str, int]) -> dict[str, Any]:
    """What counts of a run."""
    return {
        "capacity": capacities,
        "requests": result.requests,
        "infeasible": result.infeasible,
        "input_tokens": result.input_tokens,
        "token_hit_rate": round(result.token_hit_rate, 5),
        "by_tier": {tier: round(hits.token_hit_rate, 5) for tier, hits in result.hits.items()},
        "requests_by_tier": {tier: hits.requests for tier, hits in result.hits.items()},
        "moved_bytes": result.moved_bytes,
        "seconds": {
            name: round(getattr(result, f"{name}_s"), 2)
            for name in ("copied", "read", "written", "span")
        },
        "ttft_s": {name: round(result.ttft_s[name], 3) for name in ("mean", "p95")},
        "host": result.host,
        "disk": result.disk,
        "processor_s": round(result.seconds, 1),
    }


def reached(rows: list[dict]) -> list[dict]:
    """Whether a host's memory hits as much as the larger arena, in each cell in which all have run."""
    cells: dict[tuple, dict[str, float]] = {}
    for row in rows:
        cell = row["trace"], row["checkpoints"], row["arena"]
        cells.setdefault(cell, {})[row["setup"]] = row["token_hit_rate"]
    host, larger = "with a host's memory", "larger arena"
    return [
        {"trace": trace, "checkpoints": checkpoints, "arena": arena}
        | {name: rates[name] for name in (host, larger)}
        | {"reached": rates[host] >= rates[larger]}
        for (trace, checkpoints, arena), rates in cells.items()
        if {host, larger} <= set(rates)
    ]


def told(row: dict) -> str:
    by_tier = ", ".join(f"{tier} {100 * rate:.1f}" for tier, rate in row["by_tier"].items())
    return (
        f"{row['trace']:<26}{row['checkpoints']:<9}{row['arena'] / 1e9:<4g} GB  {row['setup']:<22}"
        f"{100 * row['token_hit_rate']:5.1f} % ({by_tier}), first token {row['ttft_s']['mean']:.2f} s"
    )


def draw(rows: list[dict], path: Path) -> None:
    """Hit rates by tier, and mean times to the first token: a column for each form of checkpoints and each arena."""
    from matplotlib.figure import Figure

    columns = [(form, roomier) for form in CHECKPOINTS for roomier in (False, True)]
    names = list(dict.fromkeys(row["trace"] for row in rows))
    canvas = Figure(figsize=(4.6 * len(columns), 6.4), layout="constrained")
    axes = canvas.subplots(2, len(columns), sharey="row", squeeze=False)
    wide = 0.85 / len(SETUPS)
    for column, (form, roomier) in enumerate(columns):
        hits, times = axes[:, column]
        for row in rows:
            if (row["checkpoints"], row["roomier"]) != (form, roomier):
                continue
            number = list(SETUPS).index(row["setup"])
            place = names.index(row["trace"]) + (number + 0.5) * wide - 0.425
            bottom = 0.0
            for tier, rate in row["by_tier"].items():
                hits.bar(place, 100 * rate, 0.9 * wide, bottom=bottom, color=COLORS[tier])
                bottom += 100 * rate
            shade = "#c9c9c9" if row["setup"] == "larger arena" else "#6a4c93"
            times.bar(place, row["ttft_s"]["mean"], 0.9 * wide, color=shade)
        arenas = "4 times the smaller arenas" if roomier else "the smaller arenas"
        hits.set_title(f"{form}, {arenas}", fontsize=10)
        for axis in (hits, times):
            labels = [name.replace("_", "\n") for name in names]
            axis.set_xticks(range(len(names)), labels, fontsize=7)
            axis.grid(axis="y", linewidth=0.4, color="#dddddd")
            axis.set_axisbelow(True)
        times.set_yscale("log")
    axes[0, 0].set_ylabel("prompt tokens that were hit, %")
    axes[1, 0].set_ylabel("mean time to the first token, s")
    for tier, color in COLORS.items():
        axes[0, 0].bar(0, 0, color=color, label={"host": "host's memory"}.get(tier, tier))
    axes[0, 0].legend(fontsize=7, frameon=False)
    order = ", ".join(SETUPS)
    canvas.suptitle(f"{MODEL} on one H200, computed. Bars from left to right: {order}", fontsize=11)
    canvas.savefig(path, dpi=100, pil_kwargs={"optimize": True})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path, help="needs matplotlib")
    parser.add_argument("--limit", type=int, default=500, help="requests of each trace")
    parser.add_argument("--traces", type=Path, help="a folder with more traces")
    parser.add_argument("--smoke", action="store_true", help="a few requests of one trace")
    options = parser.parse_args(arguments)
    if options.png and (reason := why_not()):
        parser.error(reason)
    if options.traces is not None and not options.traces.is_dir():
        parser.error(f"--traces must be a folder, got {options.traces}")
    limit, rows = 60 if options.smoke else options.limit, []
    device = DeviceModel()
    settings = {
        "model": MODEL,
        "requests_at_most": limit,
        "policy": "adaptive",
        "device_model": asdict(device) | {"told": device.describe(copies=True, disk=True)},
    }
    if options.json and options.json.exists():
        before = json.loads(options.json.read_text())
        if {name: before.get(name) for name in settings} != settings:
            parser.error(f"{options.json} is of other settings; name a new file")
        rows = before["rows"]
    done = {(row["trace"], row["checkpoints"], row["arena"], row["setup"]) for row in rows}
    report = header() | settings
    for name, (path, least) in traces(options.traces, smoke=options.smoke).items():
        trace = read_trace(path, limit=limit)
        for checkpoints in CHECKPOINTS:
            for arena in (least, ROOMIER * least):
                for setup in SETUPS:
                    if (name, checkpoints, arena, setup) in done:
                        continue
                    cell = {"trace": name, "checkpoints": checkpoints, "arena": arena}
                    cell |= {"roomier": arena > least, "setup": setup}
                    rows.append(cell | row_of(*run(trace, checkpoints, arena, setup)))
                    print(told(rows[-1]), flush=True)
                    write_json(options.json, report | {"reached": reached(rows), "rows": rows})
    cells = reached(rows)
    print(f"{sum(cell['reached'] for cell in cells)} of {len(cells)} cells hit as much; not:")
    for cell in cells:
        if not cell["reached"]:
            print(" ", cell)
    if options.png:
        draw(rows, options.png)


if __name__ == "__main__":
    main()

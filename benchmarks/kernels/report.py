"""Running the cases of the kernel benchmarks from a command line, their tables, and their file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import jax

from benchmarks.common import Ceilings, device_answers, header, measure_ceilings, write_json
from benchmarks.kernels import peers
from benchmarks.kernels.harness import Case, failure, measure

NO_GPU = (
    "no GPU found; on a machine with one run `python -m benchmarks.kernels.{name}`, "
    "here `JAX_PLATFORMS=cpu python -m benchmarks.kernels.{name} --smoke`"
)
SWEEP_ROUNDS = 3
# Of the arrays that the ceilings are measured with.
SIZES = {"words": 1 << 29, "size": 8192, "rounds": 6}
SMOKE_SIZES = {"words": 1 << 16, "size": 128, "rounds": 2}


def parser(name: str, description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.kernels.{name}", description=description
    )
    made.add_argument("--smoke", action="store_true", help="tiny shapes, one round, on a CPU too")
    made.add_argument("--rounds", type=int, help="measurements of each side, in turns (9)")
    made.add_argument("--cases", nargs="+", metavar="TEXT", help="only cases with this in the name")
    made.add_argument("--without", nargs="+", default=[], metavar="TEXT", help="sides to leave out")
    made.add_argument("--sweep", action="store_true", help="launch parameters, by time")
    made.add_argument("--out", type=Path, help="JSON file; other cases' rows in it stay")
    made.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return made


def open_device(name: str, *, smoke: bool) -> None:
    """Settings of the process; ends it with exit code 2 where there is no GPU to time on."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to torch
    warnings.filterwarnings("ignore", "(?s).*Triton.*", DeprecationWarning)
    if smoke:
        jax.config.update("jax_disable_most_optimizations", True)  # compiles in half the time
    if not smoke and jax.default_backend() != "gpu":
        print(NO_GPU.format(name=name), file=sys.stderr)
        raise SystemExit(2)


def full_name(case: Case) -> str:
    return f"{case.operation}/{case.name}"


def chosen(cases: list[Case], words: list[str] | None) -> list[Case]:
    """The cases whose "operation/name" holds one of the words; all for None. One that is a whole name takes its case
    alone."""
    every = {full_name(case) for case in cases}
    fits = lambda name: any(word == name if word in every else word in name for word in words)
    found = [case for case in cases if not words or fits(full_name(case))]
    if not found:
        names = ", ".join(full_name(case) for case in cases)
        print(
            f"benchmarks: no case has {' or '.join(words or ())} in its name; there are {names}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return found


def run_cases(cases: list[Case], options: argparse.Namespace, *, minutes: float | None = None):
    """Measures cases until the time is spent or the device is lost, writing the file after each.

    Returns:
        the report; and the cases that were not run.
    """
    begin = time.monotonic()
    ceilings = measure_ceilings(**(SMOKE_SIZES if options.smoke else SIZES))
    report = _read(options.out)
    run = {**header(), "versions": peers.versions(), **asdict(ceilings), "smoke": options.smoke}
    report["runs"].append(run)
    if not options.json:
        print(" ".join(f"{name}={run[name]}" for name in ("device", "jax", "python", "commit")))
        print(f"copy {ceilings.copy / 1e9:.0f} GB/s, bfloat16 {ceilings.matmul / 1e12:.1f} TFLOP/s")
    rounds = options.rounds or (1 if options.smoke else SWEEP_ROUNDS if options.sweep else 9)
    longest = 0.0
    for number, case in enumerate(cases):
        started = time.monotonic()
        if minutes is not None and started - begin + longest > 60 * minutes:
            return report, cases[number:]
        if options.sweep and not case.configs:
            print(f"{case.operation} {case.name}: nothing to sweep", file=sys.stderr)
            continue
        rows = _measured(case, ceilings, options, rounds)
        for row in rows:
            row |= {"run": len(report["runs"]) - 1, "sweep": options.sweep}
        replaced = {(case.operation, case.name, options.sweep)}
        key = lambda row: (row["operation"], row["case"], row["sweep"])
        report["rows"] = [row for row in report["rows"] if key(row) not in replaced] + rows
        write_json(options.out, report)
        if not options.json:
            print_rows(case, rows)
        peers.release()
        failed = any(row["status"].startswith("failed") for row in rows)
        if failed and not device_answers():
            left = cases[number + 1 :]
            print(
                f"{full_name(case)} left the device in a state of error, as a kernel does that reads where nothing "
                f"is; what is left needs a new process, and this case --without the side that did it",
                file=sys.stderr,
            )
            return report, left
        longest = max(longest, time.monotonic() - started)
    return report, []


def _measured(case: Case, ceilings: Ceilings, options, rounds: int) -> list[dict]:
    """The case's rows; one that says why where not even its inputs or the truth can be had."""
    try:
        return measure(
            case,
            ceilings,
            rounds=rounds,
            smoke=options.smoke,
            sweep=options.sweep,
            without=options.without,
        )
    except Exception as error:  # a case too large for this device must not end the others
        row = {"operation": case.operation, "case": case.name, "side": "inputs"}
        return [row | {"status": failure(error), "note": ""}]


def _read(path: Path | None) -> dict:
    if path is None or not path.exists():
        return {"runs": [], "rows": []}
    return json.loads(path.read_text())


def not_in_file(cases: list[Case], options: argparse.Namespace) -> list[Case]:
    """The cases of which the file has no row yet."""
    rows = _read(options.out)["rows"]
    known = {(row["operation"], row["case"]) for row in rows if row["sweep"] == options.sweep}
    return [case for case in cases if (case.operation, case.name) not in known]


def print_rows(case: Case, rows: list[dict]) -> None:
    print(f"\n{case.operation} {case.name}")
    print(
        f"  {'side':34}{'us':>10}  {'[p10, p90]':20}{'/ base':>8}{'error':>9}{'GB/s':>7}"
        f"{'TFLOP/s':>9}{'Mtok/s':>9}{'of floor':>9}  note"
    )
    for row in rows:
        if "us" not in row:
            print(f"  {row['side']:34}{row['status']}")
            continue
        us, notes = row["us"], [row["note"]] if row["note"] else []
        notes += ["bound by dispatching"] if row["host_bound"] else []
        notes += ["inputs may stay in L2"] if row.get("in_cache") else []
        spread = f"[{us['p10']:.1f}, {us['p90']:.1f}]"
        error = f"{row['error']:.1e}" if "error" in row else "-"
        tokens = f"{row['tokens_per_s'] / 1e6:.3f}" if "tokens_per_s" in row else "-"
        print(
            f"  {row['side']:34}{us['median']:10.1f}  {spread:20}{row['ratio']['median']:7.2f}x"
            f"{error:>9}{row['gb_per_s']:7.0f}{row['tflop_per_s']:9.1f}{tokens:>9}"
            f"{row['share']:9.1%}  {'; '.join(notes)}",
            flush=True,
        )


def roofline(rows: list[dict]) -> str:
    """A markdown table: of each case what it must move and compute, its floor, and what was achieved."""
    lines = [
        "| operation | case | MB | GFLOP | floor us | bound by | pallas us | of floor | best xla / pallas "
        "| best peer / pallas |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    own = ("pallas", "triton", "xla", "reference", "engine")
    cases = {(row["operation"], row["case"]): {} for row in rows if not row["sweep"]}
    for row in rows:
        if not row["sweep"]:
            cases[row["operation"], row["case"]][row["side"]] = row
    for (operation, case), sides in cases.items():
        timed = {name: row for name, row in sides.items() if "us" in row}
        if "pallas" not in timed:
            status = sides["pallas"]["status"] if "pallas" in sides else "not run"
            lines.append(f"| {operation} | {case} | | | | | {status} | | | |")
            continue
        pallas = timed["pallas"]
        by_xla = [row["ratio"]["median"] for name, row in timed.items() if "xla" in name.split()]
        xla = f"{min(by_xla):.2f}" if by_xla else "-"
        others = [row for name, row in timed.items() if name.split()[0] not in own]
        best = min(others, key=lambda row: row["us"]["median"], default=None)
        peer = f"{best['ratio']['median']:.2f} ({best['side']})" if best else "none was there"
        lines.append(
            f"| {operation} | {case} | {pallas['bytes'] / 1e6:.2f} | {pallas['flops'] / 1e9:.2f} "
            f"| {pallas['floor_us']:.1f} | {pallas['bound']}{' in L2' if pallas.get('in_cache') else ''} "
            f"| {pallas['us']['median']:.1f} "
            f"| {pallas['share']:.0%} | {xla} | {peer} |"
        )
    return "\n".join(lines)


def finish(report: dict, options: argparse.Namespace) -> None:
    """Prints what remains to be printed."""
    if options.json:
        print(json.dumps(report, indent=1))
    elif not options.sweep:
        print("\n" + roofline(report["rows"]))


def main(name: str, description: str, cases) -> None:
    """A script's command line. cases: smoke -> its cases, the most important first."""
    options = parser(name, description).parse_args()
    open_device(name, smoke=options.smoke)
    report, _ = run_cases(chosen(cases(smoke=options.smoke), options.cases), options)
    finish(report, options)

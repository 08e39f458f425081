"""Every kernel benchmark in one process, with one measurement of the device's ceilings.

    python -m benchmarks.kernels.all [--minutes 8] [--left] [--only NAME ...] [--smoke] [--sweep] [--out FILE]

Writes benchmarks/results/kernels/<device>.json after every case and prints the roofline as markdown. The first case
of each script comes before the second of any, so that what matters most is measured when `--minutes` are spent; then
the command that goes on from there is printed. The same command with `--left` goes on too, also where the last one was
killed: it leaves out the cases that the file has. Rows in the file that are not measured again stay.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import ROOT
from benchmarks.kernels import (
    append_kv,
    causal_conv,
    frame_io,
    gated_delta,
    gated_rmsnorm,
    grouped_linear,
    paged_attention,
    report,
    residual_rmsnorm,
    row_product,
    selective_scan,
    short_conv,
    ssd_scan,
    ssd_window,
    token_sampling,
)
from benchmarks.kernels.harness import Case

SCRIPTS = (  # the most important first
    paged_attention,
    ssd_window,
    ssd_scan,
    gated_delta,
    grouped_linear,
    selective_scan,
    row_product,
    append_kv,
    causal_conv,
    short_conv,
    token_sampling,
    gated_rmsnorm,
    residual_rmsnorm,
    frame_io,
)


def all_cases(*, smoke: bool) -> list[Case]:
    """The first case of each script, then the second of each, and so on."""
    lists = [script.cases(smoke=smoke) for script in SCRIPTS]
    longest = max(map(len, lists))
    return [found[i] for i in range(longest) for found in lists if i < len(found)]


def default_path() -> Path:
    """benchmarks/results/kernels/h200.json on an NVIDIA H200; likewise on others."""
    kind = jax.devices()[0].device_kind.lower().replace("nvidia", "").split()
    name = re.sub(r"\W+", "_", kind[0] if kind else "gpu")
    return ROOT / "benchmarks" / "results" / "kernels" / f"{name}.json"


def main(arguments: list[str] | None = None) -> int:
    parser = report.parser("all", __doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="starts no case that may end later")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="operations, or operation/case; to go on"
    )
    parser.add_argument("--left", action="store_true", help="only cases that the file lacks")
    options = parser.parse_args(arguments)
    if options.minutes is not None and options.minutes < 0:
        parser.error(f"--minutes must not be below 0, got {options.minutes:g}")
    report.open_device("all", smoke=options.smoke)
    if options.out is None and not options.smoke:
        options.out = default_path()
    cases = report.chosen(all_cases(smoke=options.smoke), options.only)
    cases = report.chosen(cases, options.cases)
    if options.left:
        cases = report.not_in_file(cases, options)
    found, left = report.run_cases(cases, options, minutes=options.minutes)
    report.finish(found, options)
    if left:
        print(
            f"\n{len(left)} of {len(cases)} cases are left; go on with:\n{go_on(options, left)}",
            file=sys.stderr if options.json else sys.stdout,
        )
    return 0


def go_on(options: argparse.Namespace, left: list[Case]) -> str:
    """The command that measures what is left as this one did."""
    words = ["python -m benchmarks.kernels.all"]
    words += [f"--{flag}" for flag in ("smoke", "sweep", "json") if getattr(options, flag)]
    for name in ("minutes", "rounds", "out"):
        value = getattr(options, name)
        words += [f"--{name} {value}"] if value is not None else []
    if options.without:
        words += ["--without", *map(shlex.quote, options.without)]
    return " ".join([*words, "--only", *map(report.full_name, left)])


if __name__ == "__main__":
    sys.exit(main())

"""Tests of the kernels on the device at hand: every kernel, dtype and edge, those written in Triton too if they can be
called. With `--engine` tests of engines on these kernels: tokens beside those of XLA, and the exactness matrix.

    JAX_PLATFORMS=cuda python -m benchmarks.on_gpu.checks --out FILE [--few | --all | --engine] [--processes 12] \\
        [--only WORD ...]

Of each test with many cases it takes some, the first and the last among them, unless `--all` is given. One case of each
test runs before the others. Most of the time goes into compiling, so several processes share the tests. One that an
error leaves without the device starts again after the test that did it. The file is written when the last process has
ended, or after `--minutes`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import jax

try:
    import pytest
except ModuleNotFoundError as missing:
    raise SystemExit(f"checks: {missing}; pip install -e '.[test]'") from None

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import ROOT, device_answers, header, write_json
from pallas_kernels import jax_triton

TESTS, TRITON_TESTS = ROOT / "tests" / "kernels", ROOT / "tests" / "interpreted"
ENGINE_TESTS = [  # in this order
    ROOT / "tests" / "engine" / "test_kernel_paths.py",
    *(ROOT / "tests" / "exactness" / f"test_{name}.py" for name in ("matrix", "exact_mode")),
    ROOT / "tests" / "exactness" / "test_bfloat16.py",
]
# What a device does not change, and what second.sh runs.
LEFT_OUT = ("gradients", "exceed", "refused", "engine_draws", "on_a_gpu")
CALL_KERNELS = ("test_selective_scan_engine.py", "test_short_conv.py")  # whatever their cases say
OUTCOMES = ("passed", "failed", "skipped")
STARTS = 6  # of a process whose device was lost


def spread(cases: list, count: int) -> list:
    """So many cases, evenly spread, the first and the last among them."""
    if len(cases) <= count:
        return cases
    return [cases[round(i * (len(cases) - 1) / max(1, count - 1))] for i in range(count)]


def of_a_kernel(nodeid: str) -> bool:
    file = nodeid.partition("::")[0]
    return "pallas" in nodeid or TRITON_TESTS.name in file or file.endswith(CALL_KERNELS)


class Recorder:
    """A plugin that chooses tests and writes what became of them.

    Attributes:
        share, shares: of the tests it takes every so-manyth, those of one engine together.
        known: a report with tests that have run.
        only: words, one of which a test's name must have; none: all tests.
    """

    def __init__(
        self,
        path: Path,
        *,
        few: bool = False,
        everything: bool = False,
        share: int = 0,
        shares: int = 1,
        known: dict | None = None,
        only: list[str] | None = None,
    ) -> None:
        self.only = only or [""]
        self.path, self.few, self.everything = path, few, everything
        self.share, self.shares, self.start = share, shares, time.monotonic()
        self.report = {"header": header(), **{name: [] for name in OUTCOMES}, **(known or {})}
        self.report["no_triton"] = jax_triton.why_unavailable()
        self.seen = {entry["test"] for name in OUTCOMES for entry in self.report[name]}

    def pytest_collection_modifyitems(self, config, items: list) -> None:
        items_of = [
            item
            for item in items
            if not any(word in item.nodeid.partition("[")[0] for word in LEFT_OUT)
            and any(word in item.nodeid for word in self.only)
        ]
        chosen = self.of_engines(items_of) or self.of_kernels(items_of)
        chosen = [item for item in chosen if item.nodeid not in self.seen]
        taken = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = chosen

    def of_kernels(self, items: list) -> list:
        """One case of each test, then the others, as far as time allows."""
        functions = defaultdict(list)
        for item in items:
            if of_a_kernel(item.nodeid):
                functions[item.nodeid.partition("[")[0]].append(item)
        files, chosen = set(), {}
        for name, cases in sorted(functions.items(), key=lambda pair: -len(pair[1])):
            file = name.partition("::")[0]
            least = int(TRITON_TESTS.name in file or file not in files)
            count = 3 if len(cases) >= 10 else 2 if len(cases) >= 4 else least
            if self.everything:
                count = len(cases)
            if self.few:
                count = int(file not in files)
            files.add(file)
            chosen |= {item: i for i, item in enumerate(spread(cases, count) if count else ())}
        return sorted(chosen, key=chosen.__getitem__)[self.share :: self.shares]

    def of_engines(self, items: list) -> list:
        """Tests of one model's engines stay together: they share what was compiled."""
        groups = defaultdict(list)
        for item in items:
            file = ROOT / item.nodeid.partition("::")[0]
            if file in ENGINE_TESTS:
                groups[ENGINE_TESTS.index(file), item.nodeid.partition("[")[2]].append(item)
        together = [groups[key] for key in sorted(groups, key=lambda key: key[0])]
        if self.few:
            together = [group[:1] for group in together[:2]]
        return list(itertools.chain.from_iterable(together[self.share :: self.shares]))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(running=nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or not report.passed:
            if report.when == "teardown" and report.passed:
                return
            entry = {"test": report.nodeid, "seconds": round(report.duration, 2)}
            if report.failed:
                entry["why"] = str(report.longrepr)[-2000:]
            self.report[report.outcome].append(entry)
            self.write()
            if report.failed and not device_answers():
                os._exit(LOST)

    def write(self, **more: str) -> None:
        seconds = round(time.monotonic() - self.start, 1)
        write_json(self.path, self.report | {"seconds": seconds} | more)


LOST = 75  # exit code of a process without its device


def run_share(asked: argparse.Namespace) -> int:
    """A process's share of the tests, without those that its file has."""
    known: dict = {}
    if asked.out.exists():
        known = json.loads(asked.out.read_text())
        if last := known.pop("running", None):
            known["failed"].append({"test": last, "seconds": 0.0, "why": "its process ended"})
    passed = json.loads(asked.passed.read_text())["passed"] if asked.passed else []
    recorder = Recorder(
        asked.out,
        few=asked.few,
        everything=asked.all,
        share=asked.share,
        shares=asked.processes,
        known=known,
        only=asked.only,
    )
    recorder.seen |= {entry["test"] for entry in passed}
    if not asked.engine:
        os.environ["HYBRID_JAX_TESTS"] = "all"  # it draws its own
    paths = ENGINE_TESTS if asked.engine else [TESTS, TRITON_TESTS]
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "default", "--rootdir", str(ROOT)]
    code = pytest.main([*map(str, paths), *quiet], [recorder])
    return int(code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))


def merged(paths: list[Path]) -> dict:
    """One report of those of all processes."""
    reports = [json.loads(path.read_text()) for path in paths if path.exists()]
    whole: dict = {"header": header(), **{name: [] for name in OUTCOMES}}
    whole["no_triton"] = jax_triton.why_unavailable()
    whole["seconds"] = max((one["seconds"] for one in reports), default=0.0)
    for one in reports:
        for name in OUTCOMES:
            whole[name] += one[name]
    whole["running"] = [one["running"] for one in reports if "running" in one]
    return whole


def run_all(asked: argparse.Namespace, folder: Path) -> dict:
    """Every process to its end, or for as long as there is time."""
    env = os.environ | {
        # They share the device.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.8 / asked.processes:.3f}",
        "PYTHONUNBUFFERED": "1",
    }
    if not asked.engine:
        # Otherwise XLA for a GPU leaves out a definition's roundings to bfloat16 between operations in float32.
        known = os.environ.get("XLA_FLAGS", "")
        env["XLA_FLAGS"] = f"{known} --xla_allow_excess_precision=false".strip()
    flags = [f"--{name}" for name in ("few", "all", "engine") if getattr(asked, name)]
    command = [sys.executable, "-m", "benchmarks.on_gpu.checks", *flags]
    command += ["--processes", str(asked.processes)]
    command += ["--only", *asked.only] if asked.only else []
    command += ["--passed", str(asked.passed.resolve())] if asked.passed else []
    paths = [folder / f"{share}.json" for share in range(asked.processes)]
    end = time.monotonic() + 60 * asked.minutes

    def begin(share: int) -> subprocess.Popen:
        with (folder / f"{share}.log").open("ab") as log:
            own = [*command, "--share", str(share), "--out", str(paths[share])]
            return subprocess.Popen(own, cwd=ROOT, env=env, stdout=log, stderr=log)

    running = {share: begin(share) for share in range(asked.processes)}
    starts = dict.fromkeys(running, 1)
    while running and time.monotonic() < end:
        time.sleep(0.2)
        for share, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[share]
            if (code == LOST or code < 0) and starts[share] < STARTS:
                starts[share] += 1
                running[share] = begin(share)
            elif code not in (0, 1):
                log = (folder / f"{share}.log").read_text(errors="replace")
                print(f"process {share}: exit code {code}\n{log[-2000:]}")
    for process in running.values():
        process.kill()
    return merged(paths)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--few", action="store_true", help="one test a file")
    parser.add_argument("--all", action="store_true", help="every case")
    parser.add_argument("--engine", action="store_true", help="engines in place of kernels")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", help="tests whose names have one of these words")
    parser.add_argument("--passed", type=Path, help="a report; what passed there is left out")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.share is not None:
        return run_share(asked)
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(asked, Path(folder))
    write_json(asked.out, found)
    counts = ", ".join(f"{len(found[name])} {name}" for name in OUTCOMES)
    print(f"{jax.default_backend()}: {counts}, {len(found['running'])} not ended")
    for entry in found["failed"]:
        print(f"  {entry['test']}: {entry['why'].strip().splitlines()[-1][:160]}")
    if found["no_triton"]:
        print(f"Triton kernels: not there: {found['no_triton']}")
    return int(bool(found["failed"]) or not found["passed"])


if __name__ == "__main__":
    sys.exit(main())

"""Some eighty tests of the Pallas kernels on the device at hand, and twenty of the Triton kernels if they can be
called: every kernel, dtype and edge.

    JAX_PLATFORMS=cuda python -m benchmarks.on_gpu.checks --out FILE [--few]

Of each test with many cases it takes some, the first and the last among them, and runs one case of each test before the
others. The file is written after each test.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import ROOT, header, write_json
from pallas_kernels import jax_triton

TESTS, TRITON_TESTS = ROOT / "tests" / "kernels", ROOT / "tests" / "interpreted"
# What a device does not change, and what second.sh runs.
LEFT_OUT = ("gradients", "exceed", "refused", "engine")


def spread(cases: list, count: int) -> list:
    """So many cases, evenly spread, the first and the last among them."""
    if len(cases) <= count:
        return cases
    return [cases[round(i * (len(cases) - 1) / max(1, count - 1))] for i in range(count)]


class Recorder:
    """A plugin that chooses tests and writes what became of them."""

    def __init__(self, path: Path, few: bool) -> None:
        self.path, self.few, self.start = path, few, time.monotonic()
        self.report = {"header": header(), "passed": [], "failed": [], "skipped": []}
        self.report["no_triton"] = jax_triton.why_unavailable()

    def pytest_collection_modifyitems(self, config, items: list) -> None:
        functions = defaultdict(list)
        for item in items:
            name = item.nodeid.partition("[")[0]
            of_a_kernel = "pallas" in item.nodeid or TRITON_TESTS.name in item.nodeid
            if of_a_kernel and not any(word in name for word in LEFT_OUT):
                functions[name].append(item)
        files, chosen = set(), {}
        for name, cases in sorted(functions.items(), key=lambda pair: -len(pair[1])):
            file = name.partition("::")[0]
            least = int(TRITON_TESTS.name in file or file not in files)
            count = 3 if len(cases) >= 10 else 2 if len(cases) >= 4 else least
            if self.few:
                count = int(file not in files)
            files.add(file)
            chosen |= {item: i for i, item in enumerate(spread(cases, count) if count else ())}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        # One of each, then the others, as far as time allows.
        items[:] = sorted(chosen, key=chosen.__getitem__)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or not report.passed:
            if report.when == "teardown" and report.passed:
                return
            entry = {"test": report.nodeid, "seconds": round(report.duration, 2)}
            if report.failed:
                entry["why"] = str(report.longrepr)[-2000:]
            self.report[report.outcome].append(entry)
            self.report["seconds"] = round(time.monotonic() - self.start, 1)
            write_json(self.path, self.report)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--few", action="store_true", help="one test a file")
    asked = parser.parse_args(argv)
    recorder = Recorder(asked.out, asked.few)
    os.environ["HYBRID_JAX_TESTS"] = "all"  # it draws its own
    code = pytest.main(
        [str(TESTS), str(TRITON_TESTS), "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)],
        [recorder],
    )
    found = recorder.report
    print(
        f"{jax.default_backend()}: {len(found['passed'])} passed, {len(found['failed'])} failed, "
        f"{len(found['skipped'])} skipped"
    )
    if found["no_triton"]:
        print(f"Triton kernels: not there: {found['no_triton']}")
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())

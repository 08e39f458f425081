"""A plugin of pytest: runs the tests of a job as a plan says (tests/choice.py), and leaves what became of them.

Without HYBRID_JAX_PLAN all tests run, in their usual order.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.choice import LONG, NEAR, NOWHERE, Plan, file_of, in_order
from tests.drawing import EVERYTHING, NOTHING, marked
from tests.imports import ROOT

PLAN = os.environ.get("HYBRID_JAX_PLAN")
JOB = os.environ.get("HYBRID_JAX_JOB", "engine")
# What a job compiles, and with what: the same file runs in several.
KIND = "quickly" if JOB in ("engine", "surface", "numeric") else JOB
ALL = EVERYTHING or os.environ.get("HYBRID_JAX_TIME") == "all"


def seconds_in(settings: Mapping[str, str]) -> float:
    """How long a job begins tests that are not near; raises pytest.UsageError."""
    given = settings.get("HYBRID_JAX_SECONDS", "inf")
    try:
        return float(given)
    except ValueError:
        raise pytest.UsageError(
            f"HYBRID_JAX_SECONDS must be a number of seconds, got {given!r}"
        ) from None


SECONDS = float("inf") if ALL else seconds_in(os.environ)
# Tests near what changed since they ran, but not near the last commit, may take so many times as long.
DUE = 3.0
# Tests near the last commit run however long they take, up to here: seconds since the plan was made.
LONGEST = float("inf") if ALL else 3600.0
BEGAN = time.monotonic()


def unit_of(item: pytest.Item, long_functions: set[str]) -> str:
    """The function if it has a line of its own in the record, else the file."""
    file, function = places_of(item)
    return function if function in long_functions else file


def places_of(item: pytest.Item) -> tuple[str, str]:
    """The file of a test below the root, and the test without its case."""
    file = item.path.relative_to(ROOT).as_posix()
    return file, f"{file}::{item.nodeid.partition('::')[2].partition('[')[0]}"


def folder_of(nodeid: str) -> str:
    """The folder below tests/ in which a test stands; "tests" for one beside the folders."""
    folders = Path(nodeid.partition("::")[0]).parts[1:-1]
    return folders[0] if folders else "tests"


class Chosen:
    """The tests of one job: those that are near run first, the others while there is time."""

    def __init__(self, plan: Plan, made: float):
        self.plan, self.made = plan, made
        self.seconds = plan.seconds.get(KIND, {})
        self.near: list[pytest.Item] = []
        self.far: dict[str, list[pytest.Item]] = {}
        self.due: set[str] = set()
        self.unit: dict[str, str] = {}
        self.left: list[pytest.Item] = []
        self.spent: Counter[str] = Counter()
        self.ended: set[str] = set()
        self.failed: set[str] = set()
        self.spine: set[str] = set()
        self.collected: dict[str, int] = {}
        self.passed: list[str] = []
        self.nothing: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Before anything is left out, all tests of a folder are counted."""
        self.collected = Counter(folder_of(item.nodeid) for item in items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What is left by now is to run: sorts it into near and far."""
        long_functions = {unit for unit in self.seconds if "::" in unit}
        for item in session.items:
            unit = self.unit[item.nodeid] = unit_of(item, long_functions)
            if marked(item, "spine"):
                self.spine.add(item.nodeid)
            if self.is_near(item):
                self.near.append(item)
            else:
                self.far.setdefault(unit, []).append(item)
        self.near.sort(key=lambda item: item.nodeid not in self.spine)
        distance = {file_of(unit): self.plan.distance_of(file_of(unit), KIND) for unit in self.far}
        self.due = {unit for unit in self.far if distance[file_of(unit)] <= NEAR}
        order = in_order(self.far, distance, self.plan.age.get(KIND, {}))
        self.far = {unit: self.far[unit] for unit in order}

    def is_near(self, item: pytest.Item) -> bool:
        case = item.nodeid.partition("[")[2].removesuffix("]")
        return (
            item.nodeid in self.spine
            or self.plan.last.get(places_of(item)[0], NOWHERE) <= NEAR
            or re.sub(r"\d+$", "", case) in self.plan.names
            or case in self.plan.names
        )

    def order(self) -> Iterator[pytest.Item]:
        """The tests to run, one after the other.

        What begins is finished. While there is time, the first of the others begins even if it takes longer than there
        is, and each further one if it does not.
        """
        for place, item in enumerate(self.near):
            if time.time() - self.made > LONGEST:
                self.left += self.near[place:]
                break
            yield item
        begun = False
        for unit, items in list(self.far.items()):
            elapsed = time.monotonic() - BEGAN
            most = SECONDS * (DUE if unit in self.due else 1)
            if elapsed < most and (not begun or elapsed + self.seconds.get(unit, 0.0) <= most):
                begun = True
                del self.far[unit]
                yield from items

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """As pytest's own, but which test comes next is found out while the one before it waits."""
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        if session.config.option.collectonly:
            return True
        order = self.order()
        item = next(order, None)
        while item is not None:
            following = next(order, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        if self.left:
            session.testsfailed += 1
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        function = report.nodeid.partition("[")[0]
        self.spent[function] += report.duration
        if report.when == "teardown":
            self.ended.add(report.nodeid)
        if report.failed:
            self.failed.add(self.unit[report.nodeid])
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)
        if report.skipped and NOTHING in str(report.longrepr):
            self.nothing.append(report.nodeid)

    def ran(self) -> dict[str, float]:
        """Seconds of the units of which all tests ran and none failed; a function that took `LONG` is one by itself."""
        units: dict[str, list[str]] = {}
        for nodeid, unit in self.unit.items():
            units.setdefault(unit, []).append(nodeid)
        found: dict[str, float] = {}
        for unit, nodeids in units.items():
            if unit in self.failed or not self.ended.issuperset(nodeids):
                continue
            functions = {nodeid.partition("[")[0] for nodeid in nodeids}
            long_ones = {x: self.spent[x] for x in functions if self.spent[x] >= LONG}
            found |= long_ones
            if unit not in long_ones:
                found[unit] = sum(self.spent[x] for x in functions) - sum(long_ones.values())
        return found

    def pytest_sessionfinish(self) -> None:
        result = {
            "job": KIND,
            "ran": self.ran(),
            "left": list(self.far),
            "near": sorted(self.due.intersection(self.far)),
            "nothing": self.nothing,
            "passed": len(self.passed),
            "spine": Counter(folder_of(nodeid) for nodeid in self.spine.intersection(self.passed)),
            "collected": self.collected,
        }
        Path(PLAN or "").with_name(f"job_{JOB}.json").write_text(json.dumps(result))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        say = terminalreporter.write_line
        say(f"{len(self.near)} tests were near the last commit or of the spine")
        say(
            f"{len(self.far)} files or functions were not run, and {len(self.nothing)} tests had {NOTHING}"
        )
        if self.left:
            say(
                f"tests near the last commit must run, and {LONGEST:.0f} seconds were not enough for these;"
            )
            say("run `make test TIME=all` on a machine with time:")
            for item in self.left:
                say(f"  {item.nodeid}")


def read_plan(path: str) -> Plan:
    """The plan of a run; raises pytest.UsageError."""
    try:
        return Plan(**json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise pytest.UsageError(
            f"HYBRID_JAX_PLAN: {path} must be a plan ({error}); run python -m tests.choice plan"
        ) from None


def pytest_configure(config: pytest.Config) -> None:
    if PLAN:
        config.pluginmanager.register(Chosen(read_plan(PLAN), Path(PLAN).stat().st_mtime))

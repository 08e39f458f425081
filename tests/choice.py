"""Which tests `make test` runs, and in which order: `python -m tests.choice plan`, and `report` after the run.

Near a change are the test files that changed, and those that import what changed. Those near the last commit run
whole, and so do the tests of the spine (`@spine`). Next come those near a change that was made since they ran, and then
all others in order of their distance in the graph of imports, and of their age, until the time of their job is used.
The report names those that did not run.

`tests/record.txt` says of each file when it ran: the job, the commit, and its seconds. The commit is the newest one
that others have too, so it is there after a rebase, and all that a branch changes counts as changed. A function that
takes `LONG` has a line of its own. Lines are sorted, and git keeps those of both sides of a merge.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.imports import ROOT, Graph, changed_names, import_graph, name_of, parsed

RECORD = "tests/record.txt"
FOLDER = ".cache/tests"  # the plan of a run, and what its jobs leave
LONG = 20.0  # seconds
NEAR, NOWHERE = 1, 99
LAST = "HEAD~1"
# Folders of tests for sources that are no room of the package.
ROOMS = dict.fromkeys(("kernels", "interpreted"), "pallas_kernels/") | {"benchmarks": "benchmarks/"}
# So many tests each folder must have, and so many of the spine must pass there: where there are fewer, some were lost.
FLOORS = {
    "tests": 810,
    "aot": 160,
    "api": 740,
    "batch": 230,
    "benchmarks": 210,
    "cache": 370,
    "cli": 360,
    "config": 120,
    "constraints": 1110,
    "docs": 180,
    "engine": 590,
    "exactness": 410,
    "interpreted": 24,
    "kernels": 990,
    "layers": 99,
    "models": 360,
    "openai": 13,
    "parity": 130,
    "process": 26,
    "products": 32,
    "schedule": 270,
    "sim": 720,
    "sizing": 320,
    "text": 1040,
    "train": 71,
    "typing": 11,
    "viz": 9,
    "weights": 310,
}
SPINE_FLOORS = {"tests": 700, "engine": 9, "exactness": 24, "parity": 34}
# Tests of files that no module reads by name.
PAGES = ("tests/docs/test_site.py",)


@dataclass(frozen=True)
class Entry:
    """When tests ran: as of which commit, and how long it took, in seconds."""

    commit: str
    seconds: float


Record = dict[tuple[str, str], Entry]  # by unit, which is a file or file::function, and job


# --- the change --------------------------------------------------------------------------------------


def git(root: Path, *arguments: str, given: str = "") -> str | None:
    """What git says, and is given; None where it fails, or there is no repository."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, input=given.encode(), capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode(errors="replace")


def texts_at(root: Path, commit: str, files: Sequence[str]) -> dict[str, str]:
    """What files held at a commit where they were."""
    given = "".join(f"{commit}:{file}\n" for file in files)
    said, found = (git(root, "cat-file", "--batch=%(objectsize) sizes", given=given) or ""), {}
    left = said.encode(errors="replace")
    for file in files:
        head, _, left = left.partition(b"\n")
        size = int(head.split()[0])
        found[file], left = left[:size].decode(), left[size + 1 :]
    return found


def common_commit(root: Path) -> str | None:
    """The newest commit that others have too."""
    for ref in ("origin/HEAD", "origin/main", "main", "HEAD"):
        if found := git(root, "merge-base", "HEAD", ref):
            return found.strip()[:12]
    return None


def changes(root: Path, commit: str) -> dict[str, frozenset[str] | None] | None:
    """Files that differ from a commit, committed or not, and the names that changed in each: None for all of it.

    Returns None if the commit is not there.
    """
    listed = git(root, "diff", "--name-status", "--find-renames", "--no-ext-diff", commit)
    if listed is None:
        return None
    found: dict[str, frozenset[str] | None] = {}
    edited: dict[str, str] = {}
    for line in listed.splitlines():
        status, *paths = line.split("\t")
        old, new = paths[0], paths[-1]
        if status[0] in "DR":
            found[old] = None
        if status[0] != "D":
            found[new] = None
        if new.endswith(".py") and status[0] in "MR":
            edited[new] = old
    before = texts_at(root, commit, list(edited.values()))
    for new, old in edited.items():
        found[new] = changed_names(before[old], (root / new).read_text(encoding="utf-8"))
    for path in (git(root, "ls-files", "--others", "--exclude-standard") or "").splitlines():
        found[path] = None
    return {path: names for path, names in found.items() if names != frozenset() or path == RECORD}


def stand_ins(root: Path, changed: Iterable[str], graph: Graph) -> set[str]:
    """The files of Python that read changed files of another kind, which count as changed in their place.

    Those are the ones that name it. If none does, its folder's name is looked for, and so on upwards.
    """
    found: set[str] = set()
    for path in changed:
        if path.endswith(".py") or path == RECORD:
            continue
        if path.endswith(".md"):
            found.update(PAGES)
        for name in (Path(path).name, *(parent.name for parent in Path(path).parents)):
            if not name or name in ("tests", "hybrid_jax", "docs", "README.md", "__init__"):
                break
            word = re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.])")
            named = {file for file in graph if any(map(word.search, words_in(root / file, name)))}
            if named:
                found |= named
                break
    return found


def words_in(path: Path, name: str) -> list[str]:
    """The texts in a module's code that hold a name; docstrings and comments do not count."""
    if name not in path.read_text(encoding="utf-8"):
        return []
    tree = parsed(path)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
    ]


# --- the order ---------------------------------------------------------------------------------------


def is_test(file: str) -> bool:
    return file.startswith("tests/") and Path(file).name.startswith("test_")


def distances(graph: Graph, changed: Mapping[str, frozenset[str] | None]) -> dict[str, int]:
    """How many imports lie between each test file and what changed; a file that does not reach it is left out.

    An import of names that did not change counts double. What a test of a room reaches through modules of tests alone
    is as near as what it imports itself.
    """
    importers: dict[str, list[str]] = {}
    for file, uses in graph.items():
        for used in uses:
            importers.setdefault(used, []).append(file)

    def spread(start: str, through_tests: bool) -> dict[str, int]:
        steps, level, distance = {start: 0}, {0: [start]}, 0
        while level:
            for file in level.pop(distance, ()):
                if steps[file] < distance:
                    continue
                for user in importers.get(file, ()):
                    if through_tests and not user.startswith("tests/"):
                        continue
                    names, new = graph[user][file], changed[start]
                    touched = file != start or names is None or new is None or bool(names & new)
                    if through_tests and not touched:
                        continue
                    cost = distance + (1 if touched else 2)
                    if cost < steps.get(user, NOWHERE):
                        steps[user] = cost
                        level.setdefault(cost, []).append(user)
            distance += 1
            if level and distance > max(level):
                break
        return steps

    found: dict[str, int] = {}
    for start in changed:
        steps = spread(start, through_tests=False)
        for file, distance in steps.items():
            if is_test(file):
                found[file] = min(distance, found.get(file, NOWHERE))
        for file in spread(start, through_tests=True):
            if is_test(file) and start.startswith(room_of(file)):
                found[file] = min(NEAR, found.get(file, NOWHERE))
    return found


def room_of(test: str) -> str:
    """The folder of the sources that a test's folder is named after."""
    folder = test.split("/")[1]
    return ROOMS.get(folder, f"hybrid_jax/{folder}/")


def in_order(
    units: Iterable[str], distance: Mapping[str, int], age: Mapping[str, float]
) -> list[str]:
    """Units by the distance of their files, then the oldest first; what never ran is the oldest of all."""

    def rank(unit: str) -> tuple[int, float, str]:
        return distance.get(file_of(unit), NOWHERE), -age.get(unit, float("inf")), unit

    return sorted(units, key=rank)


def file_of(unit: str) -> str:
    return unit.partition("::")[0]


# --- the record --------------------------------------------------------------------------------------


def read_record(text: str, dates: Mapping[str, int]) -> Record:
    """Entries by unit and job. Of two lines of the same, as a merge leaves them, the one of the later commit."""
    found: Record = {}
    for line in text.splitlines():
        unit, job, commit, seconds = line.split()
        before = found.get((unit, job))
        if before is None or dates.get(before.commit, 0) <= dates.get(commit, 0):
            found[unit, job] = Entry(commit, float(seconds))
    return found


def write_record(record: Record) -> str:
    return "".join(
        f"{unit} {job} {entry.commit} {entry.seconds:g}\n"
        for (unit, job), entry in sorted(record.items())
    )


def updated(
    record: Record, ran: Mapping[tuple[str, str], float], commit: str, *, keep_seconds: bool
) -> Record:
    """The record after a run of units. Seconds stay unless they differ by half, so that few lines change.

    Args:
        keep_seconds: whether seconds stay that are there: those of a run with more cases are no measure for others.
    """
    found = dict(record)
    for key, seconds in ran.items():
        unit, job = key
        if "::" in unit and seconds < LONG / 2 and (file_of(unit), job) in ran:
            found.pop(key, None)  # its file's line is enough
            continue
        known = record[key].seconds if key in record else None
        if known is None or not keep_seconds and abs(seconds - known) > max(known / 2, 1.0):
            known = float(f"{max(seconds, 0.1):.2g}")
        found[key] = Entry(commit, known)
    return found


def dates_of(root: Path, commits: Iterable[str]) -> dict[str, int]:
    """When each commit that is there was made, in seconds."""
    found = {}
    for commit in commits:
        said = git(root, "show", "--no-patch", "--format=%ct", f"{commit}^{{commit}}")
        if said:
            found[commit] = int(said)
    return found


def load_record(root: Path) -> tuple[Record, dict[str, int]]:
    """The record, and the dates of its commits."""
    path = root / RECORD
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    commits = {line.split()[2] for line in text.splitlines()}
    dates = dates_of(root, commits)
    return read_record(text, dates), dates


# --- the plan and the report -------------------------------------------------------------------------


@dataclass
class Plan:
    """What the jobs of a run read.

    Attributes:
        last: distance of each test file that reaches what differs from the last commit.
        distance: the same for what differs from the commit at which the file ran, by job; not of files that never did.
        age: days between the commit at which a unit ran and the one at hand, by job and unit.
        seconds: how long a unit took, by job and unit.
        names: names of cases that are near, whatever their file: modules and pages that differ from the last commit.
    """

    last: dict[str, int] = field(default_factory=dict)
    distance: dict[str, dict[str, int]] = field(default_factory=dict)
    age: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def distance_of(self, file: str, job: str) -> int:
        """To the change since the file ran: at least what differs from the last commit."""
        last = self.last.get(file, NOWHERE)
        return min(last, self.distance.get(job, {}).get(file, NOWHERE))


def make_plan(root: Path) -> Plan:
    graph = import_graph(root)
    record, dates = load_record(root)
    [now] = dates_of(root, ["HEAD"]).values() or [0]
    plan = Plan()

    @functools.cache
    def since(commit: str) -> dict[str, int] | None:
        changed = changes(root, commit)
        if changed is None:
            return None
        if commit == LAST:
            plan.names = sorted({case_name(path) for path in changed})
        changed |= dict.fromkeys(stand_ins(root, changed, graph))
        return distances(graph, changed)

    plan.last = since(LAST) or {}
    for (unit, job), entry in record.items():
        plan.seconds.setdefault(job, {})[unit] = entry.seconds
        if entry.commit in dates:
            days = (now - dates[entry.commit]) / 86_400
            plan.age.setdefault(job, {})[unit] = round(days, 2)
            known, file = plan.distance.setdefault(job, {}), file_of(unit)
            nearest = (since(entry.commit) or {}).get(file, NOWHERE)
            known[file] = min(nearest, known.get(file, NOWHERE))
    return plan


def case_name(path: str) -> str:
    """How cases are named that look at a file: a module by its dotted name, all else by the file's name."""
    return name_of(path) if path.endswith(".py") else Path(path).name


def report(root: Path, results: Sequence[Mapping], *, everything: bool) -> str:
    """What a run came to. Writes the record, and the units that did not run by name into a file."""
    record, _ = load_record(root)
    ran = {
        (unit, result["job"]): seconds
        for result in results
        for unit, seconds in result["ran"].items()
    }
    commit = common_commit(root)
    if commit is not None:
        record = updated(record, ran, commit, keep_seconds=everything)
        record = {key: entry for key, entry in record.items() if is_there(root, key[0])}
        (root / RECORD).write_text(write_record(record), encoding="utf-8")
    left = [(unit, result["job"]) for result in results for unit in result["left"]]
    near = {(unit, result["job"]) for result in results for unit in result["near"]}
    lines = [f"{unit} ({job})" + ", near a change" * ((unit, job) in near) for unit, job in left]
    (root / FOLDER / "not_run.txt").write_text("".join(f"{line}\n" for line in lines))
    nothing = [case for result in results for case in result["nothing"]]
    known = sum(record[key].seconds for key in left if key in record)
    said = ["not run for lack of time, the nearest to a change first in each job:", *lines]
    passed = sum(result["passed"] for result in results)
    spine = sum(count for result in results for count in result["spine"].values())
    return "\n".join(
        [
            *(said if left else []),
            f"{len(left)} files or functions were not run; their names are in {FOLDER}/not_run.txt, and by the record "
            f"they take {known / 60:.0f} minutes",
            f"{len(nothing)} tests had nothing to check" + "".join(f"\n  {x}" for x in nothing),
            f"{passed} tests passed, {spine} of them of the spine",
        ]
    )


def is_there(root: Path, unit: str) -> bool:
    """Whether a file, or a function in it, still exists."""
    file, _, function = unit.partition("::")
    path, name = root / file, function.rpartition("::")[2]
    return path.is_file() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))


def missing(results: Sequence[Mapping], *, one_python: bool = False) -> list[str]:
    """What a run has fewer of than it must have, a line each. Tests of Triton may need the second Python."""
    lines = []
    for floors, what, verb in ((FLOORS, "collected", "have"), (SPINE_FLOORS, "spine", "pass")):
        for folder, floor in floors.items():
            count = max((result[what].get(folder, 0) for result in results), default=0)
            if count < floor and not (one_python and folder == "interpreted"):
                lines.append(
                    f"make: tests/{folder} must {verb} at least {floor} tests{' of the spine' * (verb == 'pass')}, and "
                    f"there were {count}; if that is right, change the number in tests/choice.py"
                )
    return lines


def main(arguments: list[str]) -> None:
    folder = ROOT / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if arguments == ["plan"]:
        for old in folder.glob("*.json"):
            old.unlink()
        plan = make_plan(ROOT)
        (folder / "plan.json").write_text(json.dumps(vars(plan)))
        near = sum(distance <= NEAR for distance in plan.last.values())
        print(f"make: {near} test files are near what differs from the last commit")
        if git(ROOT, "rev-parse", LAST) is None:
            print(
                "make: the last commit is not here (a shallow clone?), so tests are chosen by age alone"
            )
        return
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("job_*.json"))]
    print(report(ROOT, results, everything="all" in arguments))
    fewer = missing(results, one_python="one_python" in arguments)
    print(*fewer, sep="\n", end="\n" if fewer else "")
    sys.exit(bool(fewer))


if __name__ == "__main__":
    main(sys.argv[1:])

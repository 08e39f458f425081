"""Which tests `make test` runs, and in which order: `python -m tests.choice plan`, and `report` after the run.

Near a change are the test files that changed, and those that import what changed, or read it. Those near the last
commit run whole, and so do the tests of the spine (`@spine`). Next come those near a change that was made since they
ran, and then all others in order of their distance in the graph of imports, and of their age, until the time of their
job is used. The report names those that did not run. What cannot be found out is said in a line, such as in a shallow
clone.

`tests/record.txt` says of each file when it ran: the job, the commit, and its seconds. The commit is the newest one
that others have too, so it is there after a rebase, and all that a branch changes counts as changed. A function that
takes `LONG` has a line of its own. Lines are sorted, and git keeps those of both sides of a merge.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from tests.imports import (
    ROOT,
    Graph,
    Unreadable,
    changed_names,
    import_graph,
    imported_modules,
    name_of,
    parsed,
)

RECORD = "tests/record.txt"
FOLDER = ".cache/tests"  # the plan of a run, and what its jobs leave
LONG = 20.0  # seconds
NEAR, NOWHERE = 1, 99
# If no test imports a changed file, the nearest tests run whole where they are no more than so many files.
FEW = 10
LAST, HERE = "HEAD~1", "HEAD"
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
    "cluster": 75,
    "config": 120,
    "constraints": 1110,
    "docs": 180,
    "engine": 480,
    "exactness": 410,
    "interpreted": 50,
    "kernels": 1310,
    "layers": 99,
    "mesh": 170,
    "models": 360,
    "openai": 13,
    "parity": 130,
    "process": 26,
    "products": 140,
    "schedule": 270,
    "sim": 720,
    "sizing": 320,
    "text": 1040,
    "tiers": 130,
    "train": 71,
    "typing": 11,
    "viz": 9,
    "weights": 310,
}
SPINE_FLOORS = {
    "tests": 700,
    "aot": 1,
    "cache": 3,
    "engine": 9,
    "exactness": 24,
    "interpreted": 1,
    "parity": 34,
}
# Tests of what the site is made of: no module reads these files by name.
PAGES = ("tests/docs/test_site.py",)
# All tests run with these.
INSTALLED = (".ci/constraints.txt", "pyproject.toml")


@dataclass(frozen=True)
class Entry:
    """When tests ran: as of which commit, and how long it took, in seconds."""

    commit: str
    seconds: float


Record = dict[tuple[str, str], Entry]  # by unit, which is a file or file::function, and job


# --- the change --------------------------------------------------------------------------------------


def git(root: Path, *arguments: str, given: bytes = b"") -> bytes | None:
    """What git says, and is given; None where it fails, or there is no repository."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, input=given, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def paths_in(said: bytes | None) -> list[str]:
    """What git lists by `-z`: paths in any alphabet."""
    return (said or b"").decode("utf-8", "surrogateescape").split("\0")[:-1]


def texts_at(root: Path, commit: str, files: Sequence[str]) -> dict[str, bytes | None]:
    """What files held at a commit; None where git cannot say."""
    found: dict[str, bytes | None] = dict.fromkeys(files)
    asked = [file for file in files if "\n" not in file]
    given = "".join(f"{commit}:./{file}\n" for file in asked).encode("utf-8", "surrogateescape")
    left = git(root, "cat-file", "--batch=%(objectsize) size", given=given) or b""
    for file in asked:
        head, _, left = left.partition(b"\n")
        size = head.partition(b" ")[0]
        if head.endswith(b" size") and size.isdigit():  # else "missing"
            found[file], left = left[: int(size)], left[int(size) + 1 :]
    return found


def common_commit(root: Path) -> str | None:
    """The newest commit that others have too."""
    for ref in ("origin/HEAD", "origin/main", "main", "HEAD"):
        if found := git(root, "merge-base", "HEAD", ref):
            return found.decode().strip()[:12]
    return None


def changes(root: Path, commit: str) -> dict[str, frozenset[str] | None] | None:
    """Files that differ from a commit, committed or not, and the names that changed in each: None for all of it.

    Returns None if the commit is not there.
    """
    listed = git(
        root, "diff", "-z", "--relative", "--name-status", "--find-renames", "--no-ext-diff", commit
    )
    if listed is None:
        return None
    found: dict[str, frozenset[str] | None] = {}
    edited: dict[str, str] = {}
    fields = iter(paths_in(listed))
    for status in fields:
        old = next(fields)
        new = next(fields) if status[0] in "RC" else old
        if status[0] in "DR":
            found[old] = None
        if status[0] != "D":
            found[new] = None
        if new.endswith(".py") and status[0] in "MR":
            edited[new] = old
    before = texts_at(root, commit, list(edited.values()))
    for new, old in edited.items():
        text = before[old]
        if text is not None and (root / new).is_file():
            found[new] = changed_names(text, (root / new).read_bytes())
    for path in paths_in(git(root, "ls-files", "-z", "--others", "--exclude-standard")):
        found[path] = None
    return {path: names for path, names in found.items() if names != frozenset() or path == RECORD}


def readers_of(root: Path, changed: Mapping[str, frozenset[str] | None], graph: Graph) -> set[str]:
    """The files of Python that use changed files otherwise than by an import, and count as changed in their place.

    - A file of another kind is used by those that name it, and by a module of the same name beside it. If there are
      none, its folder's name is looked for, and so on upwards; that of a room is too common a word. Two folders of its
      path side by side are always looked for.
    - A program is used by those that name its module or its file, such as those that run it in another process.
    - A package passes names on to those that take them from it.
    """
    found: set[str] = set()
    rooms = {part for file in graph for part in file.split("/")[1:-1][:1]}
    for path, names in changed.items():
        if path.endswith("/__init__.py"):
            found |= takers_of(root, path, names, graph)
        elif path.endswith(".py"):
            found |= callers_of(root, path, graph)
        elif path != RECORD:
            found |= data_readers_of(root, path, graph, rooms)
        if path.endswith(".md") or path == "mkdocs.yml":
            found.update(PAGES)
    if any(path.startswith("docs/") for path in found | {*changed}):
        found.update(PAGES)  # it runs what stands there
    return found


def data_readers_of(root: Path, path: str, graph: Graph, rooms: set[str]) -> set[str]:
    """The files that name a file, or else a folder above it."""
    *folders, last = Path(path).parts
    pairs = ["/".join(pair) for pair in zip(folders, folders[1:], strict=False)]
    found = named_in(root, graph, pairs) if pairs else set()
    beside = Path(path).with_suffix(".py").as_posix()
    if last == "README.md":  # every folder may have one
        return found
    if named := named_in(root, graph, [last]) | ({beside} & graph.keys()):
        return found | named
    for name in reversed(folders):
        if name in ("tests", "hybrid_jax", "docs"):
            break
        if name not in rooms and (named := named_in(root, graph, [name])):
            return found | named
    return found


def callers_of(root: Path, path: str, graph: Graph) -> set[str]:
    """The files that name a module, or its file: with the folder above it if they stand elsewhere."""
    if is_test(path) or path.endswith("/conftest.py"):
        return set()
    folder, last = Path(path).parent, Path(path).name
    beside = {x: graph[x] for x in graph if Path(x).parent == folder}
    found = named_in(root, graph, [f"{folder.name}/{last}", name_of(path)])
    return (found | named_in(root, beside, [last])) - {path}


def takers_of(root: Path, package: str, names: frozenset[str] | None, graph: Graph) -> set[str]:
    """The files that take names from a package that passes them on: those names, or any for None."""
    module = name_of(package) + "."
    if names is not None and any(name.startswith("_") for name in names):
        names = None  # it looks them up by itself
    found = set()
    for file in graph:
        taken = {
            name.removeprefix(module)
            for name, _ in imported_modules(root / file)
            if name.startswith(module)
        }
        own = {name for name in taken if "." not in name}  # the others are of its modules
        if own if names is None else own & names:
            found.add(file)
    return found - {package}


def named_in(root: Path, graph: Graph, names: Sequence[str]) -> set[str]:
    """The files with a text in their code that holds one of these words."""
    word = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}(?![\w.])" for name in names))
    return {file for file in graph if any(map(word.search, words_in(root / file, names)))}


def words_in(path: Path, names: Sequence[str]) -> list[str]:
    """The texts in a module's code, if it holds one of the names; docstrings and comments do not count."""
    text = source_of(path)
    if not any(name.encode("utf-8", "surrogateescape") in text for name in names):
        return []
    return texts_of(path)


@functools.cache
def source_of(path: Path) -> bytes:
    return path.read_bytes()


@functools.cache
def texts_of(path: Path) -> list[str]:
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


def entry_of(line: str) -> tuple[tuple[str, str], Entry] | None:
    """A line of the record; None if it is none, such as what a merge left."""
    match line.split():
        case [unit, job, commit, seconds] if re.fullmatch(r"\w+", commit):
            with contextlib.suppress(ValueError):
                if 0 <= float(seconds) < float("inf"):
                    return (unit, job), Entry(commit, float(seconds))
    return None


def read_record(text: str, dates: Mapping[str, int]) -> Record:
    """Entries by unit and job. Of two lines of the same, as a merge leaves them, the one of the later commit."""
    found: Record = {}
    for line in text.splitlines():
        if entry := entry_of(line):
            key, new = entry
            before = found.get(key)
            if before is None or dates.get(before.commit, 0) <= dates.get(new.commit, 0):
                found[key] = new
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


def record_text(root: Path) -> str:
    path = root / RECORD
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def load_record(root: Path) -> tuple[Record, dict[str, int]]:
    """The record, and the dates of its commits."""
    text = record_text(root)
    commits = {entry[1].commit for line in text.splitlines() if (entry := entry_of(line))}
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
        notes: what could not be found out, and what that means for the choice; a line each.
    """

    last: dict[str, int] = field(default_factory=dict)
    distance: dict[str, dict[str, int]] = field(default_factory=dict)
    age: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def distance_of(self, file: str, job: str) -> int:
        """To the change since the file ran: at least what differs from the last commit."""
        last = self.last.get(file, NOWHERE)
        return min(last, self.distance.get(job, {}).get(file, NOWHERE))


def make_plan(root: Path) -> Plan:
    """Reads the record and what changed; raises Unreadable for a file that is no Python."""
    record, dates = load_record(root)
    [now] = dates_of(root, [HERE]).values() or [0]
    found = {commit: changes(root, commit) for commit in [LAST, HERE, *sorted(dates)]}
    known = {commit: changed for commit, changed in found.items() if changed is not None}
    # What is gone counts as there for those that still import it.
    gone = {x for changed in known.values() for x in changed if not (root / x).is_file()}
    graph = import_graph(root, gone=[x for x in gone if x.endswith(".py")])
    plan = Plan(notes=notes_on_record(root, record, known.keys()))

    @functools.cache
    def readers(path: str, names: frozenset[str] | None) -> set[str]:
        return readers_of(root, {path: names}, graph)

    @functools.cache  # most commits differ from the tree in the same files
    def from_one(path: str, names: frozenset[str] | None) -> dict[str, int]:
        return distances(graph, {path: names})

    def from_all(changed: Mapping[str, frozenset[str] | None]) -> dict[str, int]:
        starts = {*changed.items()}
        starts |= {(x, None) for path, names in changed.items() for x in readers(path, names)}
        found: dict[str, int] = {}
        for start in starts:
            for test, distance in from_one(*start).items():
                found[test] = min(distance, found.get(test, NOWHERE))
        return found

    far = {commit: from_all(changed) for commit, changed in known.items()}
    base = LAST if LAST in known else HERE
    if base in known:
        plan.last = far[base] | nearest(root, known[base], from_all, plan)
        plan.names = sorted({name for path in known[base] for name in case_names(path)})
    plan.notes += notes_on_change(root, known, base)
    for (unit, job), entry in record.items():
        plan.seconds.setdefault(job, {})[unit] = entry.seconds
        if entry.commit in known:
            days = (now - dates[entry.commit]) / 86_400
            plan.age.setdefault(job, {})[unit] = round(days, 2)
            near, file = plan.distance.setdefault(job, {}), file_of(unit)
            near[file] = min(far[entry.commit].get(file, NOWHERE), near.get(file, NOWHERE))
    return plan


def nearest(
    root: Path, changed: Mapping[str, frozenset[str] | None], from_all: Callable, plan: Plan
) -> dict[str, int]:
    """The tests that run whole because none is nearer to a changed file of the packages, or to a helper of tests."""
    found: dict[str, int] = {}
    for file, names in changed.items():
        ours = file.startswith(("hybrid_jax/", "pallas_kernels/", "tests/"))
        if not ours or not file.endswith(".py") or is_test(file) or not (root / file).is_file():
            continue
        to = from_all({file: names})
        at = min(to.values(), default=NOWHERE)
        those = [test for test, distance in to.items() if distance == at]
        if at > NEAR and len(those) <= FEW:
            found |= dict.fromkeys(those, NEAR)
        if at == NOWHERE or at > NEAR and len(those) > FEW:
            which = f"{len(those)} test files at distance {at}" if those else "none at any distance"
            plan.notes.append(f"no test file imports {file}, which changed; there are {which}")
    return found


def notes_on_change(root: Path, known: Mapping[str, Mapping], base: str) -> list[str]:
    """What could not be found out about the change."""
    by_age = "the spine runs, and the others by their age while there is time; TIME=all runs all"
    if HERE not in known:
        return [
            f"git does not say what changed in {root} (no repository with a commit?), so {by_age}"
        ]
    lines = []
    if base == HERE:
        lines.append(
            "the commit before the last is not here (a shallow clone?), so what the last commit changed is not known: "
            f"tests near what is not committed and {by_age}; `git fetch --deepen=1` brings it"
        )
    for file in known[base].keys() & set(INSTALLED):
        lines.append(f"{file} changed, and all tests run with what it installs: TIME=all runs all")
    return lines


def notes_on_record(root: Path, record: Record, known: Set[str]) -> list[str]:
    """What the record does not say; `known` are the commits that a difference can be taken from."""
    lines, texts = [], record_text(root).splitlines()
    wrong = [n for n, line in enumerate(texts, 1) if line.strip() and entry_of(line) is None]
    if wrong:
        lines.append(
            f"{RECORD}:{wrong[0]}: a line must be file, job, commit and seconds, got {texts[wrong[0] - 1][:80]!r}; "
            f"{len(wrong)} such lines are left out, as if their tests had never run, and are not written again"
        )
    there = {x.relative_to(root).as_posix() for x in (root / "tests").rglob("test_*.py")}
    new = there - {file_of(unit) for unit, _ in record}
    if new:
        lines.append(
            f"{len(new)} of {len(there)} test files have no line in {RECORD}: for these the change is what differs "
            "from the last commit"
        )
    lost = {entry.commit for entry in record.values()} - known
    if lost:
        count = sum(entry.commit in lost for entry in record.values())
        lines.append(
            f"{len(lost)} commits of {RECORD} are not here, such as {min(lost)} (a shallow clone?): {count} of its "
            "lines count as of tests that never ran"
        )
    return lines


def case_names(path: str) -> list[str]:
    """How cases are named that look at a file: its path, the dotted name of a module, the file's name otherwise."""
    return [path, name_of(path) if path.endswith(".py") else Path(path).name]


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
        (root / RECORD).parent.mkdir(exist_ok=True)
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
    unwritten = [f"git names no commit, so {RECORD} stays as it is"] * (commit is None)
    return "\n".join(
        [
            *(said if left else []),
            *unwritten,
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
    return path.is_file() and (not name or f"def {name}(".encode() in path.read_bytes())


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
    match arguments:
        case ["plan"]:
            for old in folder.glob("*.json"):
                old.unlink()
            try:
                plan = make_plan(ROOT)
            except Unreadable as error:
                sys.exit(f"make: which tests are near a change cannot be told: {error}")
            (folder / "plan.json").write_text(json.dumps(vars(plan)))
            near = sum(distance <= NEAR for distance in plan.last.values())
            print(f"make: {near} test files are near what differs from the last commit")
            for note in plan.notes:
                print(f"make: {note}")
        case ["report", *words] if {*words} <= {"all", "one_python"}:
            results, unread = read_results(folder)
            print(report(ROOT, results, everything="all" in words))
            fewer = unread + missing(results, one_python="one_python" in words)
            print(*fewer, sep="\n", end="\n" if fewer else "")
            sys.exit(bool(fewer))
        case _:
            sys.exit("usage: python -m tests.choice plan, or report [all] [one_python]")


def read_results(folder: Path) -> tuple[list[dict], list[str]]:
    """What jobs left, and a line for each result that cannot be read."""
    results, unread = [], []
    for path in sorted(folder.glob("job_*.json")):
        try:
            results.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            unread.append(f"make: {path}: a job left no whole result ({error}); run it again")
    return results, unread


if __name__ == "__main__":
    main(sys.argv[1:])

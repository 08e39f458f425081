"""Who imports whom, read from the syntax trees: of modules, of tests, and of what tests are made of."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    *("hybrid_jax", "pallas_kernels", "tests", "benchmarks", "examples", "docs", "models", ".ci"),
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# For each file the files it imports, with the names that it takes from each; None where it takes the module.
Graph = Mapping[str, Mapping[str, frozenset[str] | None]]


class Unreadable(ValueError):
    """A file of Python that cannot be parsed; the message says which, where and why."""


def name_of(file: str) -> str:
    """The dotted name of a module: "a/b.py" and "a/b/__init__.py" are a.b."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


SOURCES = {
    name_of(path.relative_to(ROOT).as_posix()): path
    for folder in ("hybrid_jax", "pallas_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; raises Unreadable."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:  # ValueError: a zero byte
        line, why = getattr(error, "lineno", None) or 1, getattr(error, "msg", None) or error
        raise Unreadable(f"{path}:{line}: {why}; mend the file or delete it") from None


def imported_modules(path: Path, *, types: bool = False) -> list[tuple[str, int]]:
    """(dotted name, line) of all imports; `from a import b` gives a.b. `types`: those for type checkers too."""
    tree = parsed(path)
    ignored = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
        if not types
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise Unreadable(f"{path}:{node.lineno}: a relative import; write the whole name")
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def python_files(root: Path) -> list[str]:
    """All files of Python, by their paths below the root."""
    return sorted(
        path.relative_to(root).as_posix()
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
        if path.is_file()  # and no link of an editor to nowhere
    )


def import_graph(
    root: Path, gone: Iterable[str] = ()
) -> dict[str, dict[str, frozenset[str] | None]]:
    """Which files each file imports, and which names of them.

    A package that only passes names on, as `hybrid_jax` passes on `LLM`, is looked through. A test also imports the
    modules that define the fixtures it asks for, and every `conftest.py` above it.

    Args:
        gone: files that are no longer there: what still imports them is found all the same.
    """
    files = python_files(root)
    homes = {name_of(file): file for file in {*files, *gone}}
    passed: dict[
        str, dict[str, str]
    ] = {}  # by package: where the names that it passes on come from
    for module, file in homes.items():
        if file.endswith("__init__.py") and file in files:
            found = [name for name, _ in imported_modules(root / file, types=True)]
            passed[module] = {name.rpartition(".")[2]: name for name in found}

    def resolve(name: str) -> tuple[str, str | None] | None:
        """The file that defines a dotted name, and its name there: None for the file itself."""
        if name in homes:
            return homes[name], None
        module, _, last = name.rpartition(".")
        if module not in homes:
            return None
        origin = passed.get(module, {}).get(last, name)
        further = resolve(origin) if origin not in (name, module) else None
        return further or (homes[module], last)

    fixtures = fixtures_of(root, files)
    shared = shared_by_all(root, [x for x in homes.values() if is_conftest(x)])
    graph: dict[str, dict[str, frozenset[str] | None]] = {}
    for file in files:
        uses: dict[str, set[str] | None] = {}
        wanted = [resolve(name) for name, _ in imported_modules(root / file)]
        wanted += fixtures_for(root, file, fixtures)
        for conftest, names_in_it in shared.items():
            if file != conftest and file.startswith(conftest.removesuffix("conftest.py")):
                wanted += [(conftest, name) for name in names_in_it]
        for found in wanted:
            if found is None or found[0] == file:
                continue
            target, name = found
            names = uses.setdefault(target, set())
            uses[target] = None if name is None or names is None else names | {name}
        graph[file] = {
            target: None if names is None else frozenset(names) for target, names in uses.items()
        }
    return graph


def is_conftest(file: str) -> bool:
    return file.startswith("tests/") and file.endswith("/conftest.py")


def fixtures_in(path: Path) -> Iterator[tuple[str, bool]]:
    """The fixtures that a file defines at its top, and whether tests get each unasked."""
    for node in parsed(path).body:
        if isinstance(node, Definition):
            decorators = ast.dump(ast.List(node.decorator_list))
            if "fixture" in decorators:
                yield node.name, "autouse" in decorators


def fixtures_of(root: Path, files: Iterable[str]) -> dict[str, list[str]]:
    """The files that define each fixture for others: every `conftest.py`, and the plugin `tests/llms.py`."""
    found: dict[str, list[str]] = {}
    for file in files:
        if is_conftest(file) or file == "tests/llms.py":
            for name, _ in fixtures_in(root / file):
                found.setdefault(name, []).append(file)
    return found


def shared_by_all(root: Path, conftests: Iterable[str]) -> dict[str, set[str]]:
    """What tests below each `conftest.py` get of it unasked: its hooks, fixtures with `autouse`, and what it does.

    That is "" for what stands outside of definitions, and for one that is gone.
    """
    found = {}
    for file in conftests:
        names, there = {""}, root / file
        if there.is_file():
            names |= {x for x in definitions(there.read_bytes()) if x.startswith("pytest_")}
            names |= {name for name, unasked in fixtures_in(there) if unasked}
        found[file] = names
    return found


def fixtures_for(
    root: Path, file: str, fixtures: Mapping[str, list[str]]
) -> Iterator[tuple[str, str]]:
    """The fixtures that a test's functions ask for, as (file, name)."""
    if not file.startswith("tests/"):
        return
    for node in ast.walk(parsed(root / file)):
        if isinstance(node, ast.arg | ast.Constant):  # `usefixtures` names them as words
            name = node.arg if isinstance(node, ast.arg) else node.value
            for home in fixtures.get(name, ()) if isinstance(name, str) else ():
                if home == "tests/llms.py" or file.startswith(home.removesuffix("conftest.py")):
                    yield home, name


@functools.cache
def definitions(source: bytes) -> dict[str, str]:
    """What a module defines at its top, by name, as text without comments and docstrings; "" for all else."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, Definition | ast.Module) and ast.get_docstring(node) is not None:
            del node.body[0]
    found: dict[str, str] = {}
    for node in tree.body:
        names = [""]
        if isinstance(node, Definition):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [x.id for t in targets for x in ast.walk(t) if isinstance(x, ast.Name)] or [""]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        for name in names:
            found[name] = found.get(name, "") + ast.dump(node)
    return found


def changed_names(before: bytes, after: bytes) -> frozenset[str] | None:
    """Names at the top of a module that mean something else after a change; None for all of them.

    A name that uses a changed one is changed as well. Comments, docstrings and the places of lines change nothing.
    What is no Python, before or after, has changed as a whole.
    """
    try:
        old, new = definitions(before), definitions(after)
    except (SyntaxError, ValueError):
        return None
    changed = {name for name in {*old, *new} if old.get(name) != new.get(name)}
    if "" in changed:
        return None
    while True:
        uses = [f"id='{used}'" for used in changed] + [f"arg(arg='{used}'" for used in changed]
        more = {
            name
            for name, text in new.items()
            if name not in changed and any(use in text for use in uses)
        }
        if not more:
            return frozenset(changed)
        if "" in more:
            return None
        changed |= more

"""Imports go one way: the table of rooms, checked on the syntax trees, and on what really gets loaded."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import hybrid_jax
from tests.drawing import spine
from tests.imports import ROOT, SOURCES, imported_modules, parsed

pytestmark = spine
FOLDERS = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
# Rooms that load without jax, by prefix.
HOST = (
    *("cache", "config", "constraints", "schedule", "sim", "sizing", "text", "api.outputs"),
    *("inspection", "openai"),
    *("costs", "geometry", "kinds", "machine", "byte_sizes", "display", "process.streams"),
)
RULE = re.compile(r"^May import: ([^:]*)\.$(?:\nPackages: ([^:]*)\.$)?", re.M)


@dataclass(frozen=True)
class Room:
    """What the modules of a folder may import: modules by prefix, under hybrid_jax unless it says pallas_kernels, and
    packages."""

    name: str
    internal: tuple[str, ...] = ()
    external: tuple[str, ...] = ()


# Files of kernels' packages that the host reads, too.
PLANS = [module for module in SOURCES if re.fullmatch(r"pallas_kernels\.\w+\.plan", module)]
# The files beside the rooms, and kernels written in Triton.
FILES = (
    Room("pallas_kernels.jax_triton", (), ("jax", "numpy", "jax_triton")),
    Room("pallas_kernels.ssd_scan.triton_kernel", (), ("triton",)),
    Room("pallas_kernels.token_sampling.triton_kernel", ("pallas_kernels",), ("jax", "triton")),
    Room("pallas_kernels.lazily"),
    Room("pallas_kernels.plan"),
    *(Room(name, ("pallas_kernels.plan",)) for name in PLANS),
    Room("pallas_kernels", ("pallas_kernels",), ("jax", "numpy")),
    Room("geometry", ("config", "kinds")),
    Room("costs", ("config", "geometry", "kinds")),
    Room("machine", (), ("platformdirs",)),
    Room("byte_sizes"),
    Room("display"),
    Room("state", ("config", "geometry"), ("jax", "flax")),
    Room("__main__", ("cli",)),
    Room("", ()),  # the package itself: lazy
)
# Where an import may stand inside a function, and why.
LATE_IMPORTS = {
    "pallas_kernels.jax_triton": "jax-triton belongs to the extra `triton`",
    "pallas_kernels.ssd_scan.triton_scan": "triton belongs to the extra `triton`",
    "pallas_kernels.token_sampling.api": "triton belongs to the extra `triton`",
    "hybrid_jax.products.cpu.build": "llvmlite belongs to the extra `cpu`",
    "hybrid_jax.api.llm": "jax and the engine take most of a second to load, and are needed when an LLM is made",
    "hybrid_jax.api.progress_bar": "rich is for bars alone, and many programs show none",
    "hybrid_jax.weights.orbax": "orbax takes seconds to load, and most loads never need it",
    "hybrid_jax.batch": "ray belongs to the extra `ray`",
    "hybrid_jax.train": "optax belongs to the extra `train`; the signature is readable without it",
    "hybrid_jax.constraints.grammar": "llguidance belongs to the extra `structured`",
    "hybrid_jax.constraints.trial_worker": "its path is set first, in a process that sees no packages",
    "hybrid_jax.cli": "each command loads only what it needs, so `inspect` runs without jax",
}


def short(module: str) -> str:
    """Module name as rooms write it: without the package, except the kernels'."""
    return module.removeprefix("hybrid_jax").removeprefix(".")


def inside(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


@functools.cache
def rooms() -> dict[str, Room]:
    """Every folder with its own `__init__`, by name; its docstring says what it may import."""
    found = {room.name: room for room in FILES}
    for module in FOLDERS:
        if not inside(module, ("hybrid_jax",)) or module == "hybrid_jax":
            continue
        rule = RULE.search(ast.get_docstring(ast.parse(SOURCES[module].read_text())) or "")
        assert rule, f"{SOURCES[module]} must say what its modules may import: 'May import: ...'"
        internal, external = (words_of(text) for text in rule.groups())
        name = short(module)
        found[name] = Room(name, (*internal, name), external)
    return found


def words_of(text: str | None) -> tuple[str, ...]:
    words = tuple((text or "").replace(",", " ").split())
    return () if words == ("nothing", "of", "the", "package") else words


def room_of(module: str) -> Room:
    """The room whose name is the longest prefix of the module's."""
    name = short(module)
    while name:
        if name in rooms():
            return rooms()[name]
        name = name.rpartition(".")[0]
    if module == "hybrid_jax":
        return rooms()[""]
    pytest.fail(
        f"{module} is in no room: move it into one, or add it to FILES in {Path(__file__).name}"
    )


def violations(module: str, path: Path) -> list[str]:
    room, wrong = room_of(module), []
    for name, line in imported_modules(path):
        top = name.partition(".")[0]
        if top in ("hybrid_jax", "pallas_kernels"):
            allowed = inside(short(name), (*room.internal, "__version__"))
        else:
            allowed = top in sys.stdlib_module_names or top in room.external
        if not allowed:
            wrong.append(f"{module}:{line} imports {name}")
    return wrong


@pytest.mark.parametrize("module", SOURCES)
def test_module_imports_only_what_its_room_allows(module):
    assert violations(module, SOURCES[module]) == []


def test_a_rule_allows_nothing_that_no_module_needs():
    unused = {}
    for name, room in rooms().items():
        modules = [m for m in SOURCES if room_of(m) is room]
        used = {found for m in modules for found, _ in imported_modules(SOURCES[m])}
        rest = {
            p for p in room.internal if p != name and not any(inside(short(u), (p,)) for u in used)
        }
        rest |= set(room.external) - {found.partition(".")[0] for found in used}
        if rest:
            unused[name] = sorted(rest)
    assert unused == {}


def test_only_its_command_imports_a_study():
    part, user = "sim.prefix_cache", "cli.simulate"
    users = {
        module
        for module, path in SOURCES.items()
        if any(inside(short(name), (part,)) for name, _ in imported_modules(path))
        and not inside(short(module), ("sim",))
    }
    assert users == {f"hybrid_jax.{user}"}


def test_simulators_and_commands_name_no_kind_of_recurrent_layer():
    """They know layers through `hybrid_jax.kinds` alone."""
    named = [
        module
        for module, path in SOURCES.items()
        if inside(short(module), ("sim", "cli")) and re.search(r"mamba.?2", path.read_text(), re.I)
    ]
    assert named == []


def test_rooms_are_small():
    """So a reader sees a room's files at once."""
    files = Counter(path.parent.relative_to(ROOT).as_posix() for path in SOURCES.values())
    assert files.pop("hybrid_jax") <= 8
    assert {folder: count for folder, count in files.items() if count > 18} == {}


# Arrays become the arguments of a kernel in their order, and that is how these take them.
TAKE_ARRAYS = ("call", "compile_for_gpu")


def hidden_names(path: Path) -> list[int]:
    """Lines of the calls with five arguments or more that unpack a tuple which stands there: `f(*(a, b, c), d, e)`.

    A reader would have to count commas to know what `b` is. Such a call names its arguments.
    """
    found = []
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func).rpartition(".")[2] in TAKE_ARRAYS:
            continue
        unpacked = [
            arg.value.elts
            for arg in node.args
            if isinstance(arg, ast.Starred) and isinstance(arg.value, ast.Tuple)
        ]
        total = sum(map(len, [node.args, node.keywords, *unpacked])) - len(unpacked)
        if unpacked and total >= 5:
            found.append(node.lineno)
    return found


def test_calls_name_their_arguments():
    files = {*SOURCES.values(), *(ROOT / "tests").rglob("*.py")}
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sorted(files)
        if (lines := hidden_names(path))
    }
    assert found == {}


def test_a_call_that_hides_names_is_seen(tmp_path):
    path = tmp_path / "calls.py"
    path.write_text(
        "f(*(a, b, c), d)\ng(*(a, b, c), d, e=1)\nh(a, *(b, c), *(d, e))\nh(a, b, c, d, *e)\n"
        "call(kernel, *(a, b, c), d, e=1)\n"
    )
    assert hidden_names(path) == [2, 3]


def test_no_test_is_imported():
    """What several tests need stands in a module of its own: a change of it is told from a change of a test."""
    importers = {
        path.name: names
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (names := [name for name, _ in imported_modules(path) if ".test_" in name])
    }
    assert importers == {}


def test_a_forbidden_import_is_seen(tmp_path):
    path = tmp_path / "radix.py"
    path.write_text(
        "import numpy\nfrom hybrid_jax.cache.pools import frames\nimport jax.numpy as jnp\n"
    )
    assert violations("hybrid_jax.cache.tree.radix", path) == [
        "hybrid_jax.cache.tree.radix:3 imports jax.numpy"
    ]


def test_only_what_type_checkers_alone_read_may_import_anything(tmp_path):
    path = tmp_path / "radix.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax\nelse:\n    import flax\n"
        "if not TYPE_CHECKING:\n    import jax\n"
    )
    assert violations("hybrid_jax.cache.tree.radix", path) == [
        "hybrid_jax.cache.tree.radix:5 imports flax",
        "hybrid_jax.cache.tree.radix:7 imports jax",
    ]


@pytest.mark.parametrize("module", [m for m in SOURCES if not inside(m, tuple(LATE_IMPORTS))])
def test_imports_stand_at_the_top(module):
    tree = parsed(SOURCES[module])
    late = [
        f"{module}:{node.lineno}"
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert late == []


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after it ran `code`."""
    script = f"{code}\nimport sys\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_the_package_loads_neither_jax_nor_numpy():
    loaded = loaded_after("import hybrid_jax, hybrid_jax.config, hybrid_jax.geometry")
    assert not loaded & {"jax", "numpy", "tokenizers", "flax"}


def test_public_names_load_without_jax():
    names = {*hybrid_jax.__all__} - {"load_model", "save_orbax"}  # these two make arrays
    assert not loaded_after(f"from hybrid_jax import {', '.join(sorted(names))}") & {
        "jax",
        "jaxlib",
        "flax",
    }


def test_host_rooms_load_without_jax():
    host = [m for m in SOURCES if inside(short(m), HOST)]
    assert "hybrid_jax.cache" in host
    assert not loaded_after(f"import {', '.join(host)}") & {"jax", "jaxlib", "flax"}


def test_plans_of_kernels_load_without_jax():
    assert len(PLANS) >= 2
    for plan in ("pallas_kernels.plan", *PLANS):
        assert not loaded_after(f"import {plan}") & {"jax", "jaxlib", "numpy"}, plan


@pytest.mark.parametrize("before", ["", "import pallas_kernels.ssd_scan.kernel"])
def test_names_of_kernels_are_their_functions_whatever_was_loaded_first(before):
    loaded_after(
        f"{before}\nfrom pallas_kernels import causal_conv, fold, ssd_scan\n"
        "from pallas_kernels.ssd_scan import reference\n"
        "assert all(map(callable, (causal_conv, fold, ssd_scan))), ssd_scan"
    )


def test_a_name_that_kernels_do_not_have_is_an_error():
    with pytest.raises(AttributeError, match="'pallas_kernels.row_product' has no attribute 'x'"):
        importlib.import_module("pallas_kernels.row_product").x  # noqa: B018


@pytest.mark.skipif("hybrid_jax.cli.main" not in SOURCES, reason="no command line yet")
def test_the_command_line_loads_without_jax():
    assert not loaded_after("import hybrid_jax.cli.main") & {"jax", "jaxlib", "flax"}

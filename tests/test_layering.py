"""Imports go one way: the table of rooms, checked on the syntax trees, and on what really gets loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("hybrid_jax", "pallas_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
PLAIN = (
    *("config", "costs", "devices", "geometry", "machine", "other_names", "parts"),
    *("sampling_params", "sizes", "structured_outputs"),
)
HOST = (
    "cache",
    "engine.admission",
    "engine.audit",
    "engine.bucket",
    "engine.defaults",
    "engine.history",
    "engine.holds",
    "engine.memory",
    "engine.plan",
    "engine.pressure",
    "engine.progress",
    "engine.request",
    "engine.room",
    "engine.scheduler",
    "engine.seats",
    "engine.sequence",
    "engine.sizing",
    "engine.temporaries",
    "engine.turn",
)
DEVICE = ("state", "layers", "models")
TEXT = ("messages", "tokenizer", "text")


@dataclass(frozen=True)
class Room:
    """Modules (by prefix, under hybrid_jax unless it says pallas_kernels), and what they may import."""

    modules: tuple[str, ...]
    internal: tuple[str, ...] = ()
    external: tuple[str, ...] = ()


# The first room whose prefix fits decides. Within a room everything may import everything.
ROOMS = (
    Room(("pallas_kernels.jax_triton",), ("pallas_kernels",), ("jax", "numpy", "jax_triton")),
    Room(
        (
            "pallas_kernels.ssd_scan.triton_kernel",
            "pallas_kernels.token_sampling.triton_kernel",
        ),
        ("pallas_kernels",),
        ("jax", "triton"),
    ),
    Room(("pallas_kernels",), ("pallas_kernels",), ("jax", "numpy")),
    Room(
        (
            "config",
            "devices",
            "machine",
            "other_names",
            "parts",
            "sampling_params",
            "sizes",
            "structured_outputs",
        ),
        ("config", "machine", "other_names", "structured_outputs"),
    ),
    Room(("geometry",), ("config",)),
    Room(("costs",), ("config", "geometry")),
    Room(("outputs",), ("sampling_params",)),
    Room(
        DEVICE, (*DEVICE, "config", "geometry", "parts", "pallas_kernels"), ("jax", "numpy", "flax")
    ),
    Room(("cache",), ("cache", "config", "costs", "geometry"), ("numpy",)),
    Room(HOST, (*HOST, *PLAIN), ("numpy",)),
    Room(("sim",), ("sim", *HOST, *PLAIN), ("numpy",)),
    Room(
        ("checkpoint", "swiftkv"),
        ("checkpoint", "swiftkv", *DEVICE, *PLAIN, "pallas_kernels"),
        ("jax", "numpy", "flax", "ml_dtypes", "orbax", "safetensors", "rich"),
    ),
    Room(
        ("engine",),
        ("engine", "cache", *DEVICE, *PLAIN, "pallas_kernels"),
        ("jax", "numpy", "flax", "rich"),
    ),
    Room(
        ("train",),
        ("train", "checkpoint", *DEVICE, *PLAIN, "compile_cache", "tokenizer", "pallas_kernels"),
        (
            "jax",
            "numpy",
            "flax",
            "optax",
            "orbax",
            "safetensors",
            "rich",
            "ml_dtypes",
            "tokenizers",
        ),
    ),
    Room(("compile_cache",), (), ("jax",)),
    Room(("warm_up",)),
    Room(TEXT, TEXT, ("tokenizers", "jinja2")),
    Room(("fingerprint",), ("config", "tokenizer"), ("jax", "numpy")),
    Room(("prompts", "message_ends"), ("prompts", *TEXT, *PLAIN)),
    Room(
        ("constraints",),
        ("constraints", "tokenizer", *PLAIN),
        ("numpy", "tokenizers", "llguidance"),
    ),
    Room(
        ("completions", "cache_view", "engine_thread", "feed", "ledger"),
        (
            *(
                "cache_view",
                "completions",
                "engine_thread",
                "progress_bar",
                "prompts",
                "outputs",
                "engine.request",
                "cache.reasons",
            ),
            *("constraints", *TEXT, *PLAIN),
        ),
    ),
    Room(("progress_bar",), (), ("rich",)),
    Room(("describe",), ("engine.sizing", *PLAIN)),
    Room(("report",), ("report", "models", "engine.room", "engine.sizing", *PLAIN)),
    Room(
        ("llm", "batch", "intake", "options", "request_limits"),
        (
            *("llm", "batch", "intake", "options", "progress_bar", "request_limits"),
            *("feed", "fingerprint"),
            *("outputs", "prompts", "completions", "cache_view", "describe", "ledger"),
            *("engine_thread", "compile_cache", "message_ends", "warm_up"),
            *("cache.prefix_order", "constraints", "engine", "checkpoint", *TEXT, *PLAIN),
        ),
        ("jax", "numpy", "rich"),
    ),
    Room(
        ("cli", "cli_exits", "cli_pool_sim", "cli_simulate", "cli_words", "__main__"),
        (
            "cli",
            "cli_exits",
            "cli_pool_sim",
            "cli_simulate",
            "cli_words",
            "sim",
            "__version__",
            "llm",
            "batch",
            "outputs",
            "prompts",
            "report",
            "engine.defaults",
            "tokenizer",
            "train",
            *PLAIN,
        ),
        ("typer", "rich"),
    ),
    Room(("",), ()),  # the package itself: lazy
)
# Where an import may stand inside a function, and why.
LATE_IMPORTS = {
    "pallas_kernels.jax_triton": "jax-triton belongs to the extra `triton`",
    "pallas_kernels.ssd_scan.triton_scan": "triton belongs to the extra `triton`",
    "pallas_kernels.token_sampling.api": "triton belongs to the extra `triton`",
    "hybrid_jax.checkpoint.orbax": "orbax takes seconds to load, and most loads never need it",
    "hybrid_jax.train": "optax belongs to the extra `train`; the signature is readable without it",
    "hybrid_jax.constraints.grammar": "llguidance belongs to the extra `structured`",
    "hybrid_jax.cli": "each command loads only what it needs, so `inspect` runs without jax",
    "hybrid_jax.cli_pool_sim": "other commands start without numpy",
    "hybrid_jax.cli_simulate": "other commands start without numpy",
}


def short(module: str) -> str:
    """Module name as rooms write it: without the package, except the kernels'."""
    return module.removeprefix("hybrid_jax").removeprefix(".")


def inside(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


def room_of(module: str) -> Room:
    for room in ROOMS:
        if inside(short(module), room.modules):
            return room
    pytest.fail(f"{module} is in no room: add it to ROOMS in {Path(__file__).name}")


def imported_modules(path: Path) -> list[tuple[str, int]]:
    """(dotted name, line) of all imports but those for type checkers only; `from a import b` gives a.b."""
    tree = ast.parse(path.read_text())
    ignored = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the absolute name"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def violations(module: str, path: Path) -> list[str]:
    room, wrong = room_of(module), []
    for name, line in imported_modules(path):
        top = name.partition(".")[0]
        if top in ("hybrid_jax", "pallas_kernels"):
            allowed = inside(short(name), room.internal)
        else:
            allowed = top in sys.stdlib_module_names or top in room.external
        if not allowed:
            wrong.append(f"{module}:{line} imports {name}")
    return wrong


@pytest.mark.parametrize("module", SOURCES)
def test_module_imports_only_what_its_room_allows(module):
    assert violations(module, SOURCES[module]) == []


def test_a_forbidden_import_is_seen(tmp_path):
    path = tmp_path / "radix.py"
    path.write_text(
        "import numpy\nfrom hybrid_jax.config import ModelConfig\nimport jax.numpy as jnp\n"
    )
    assert violations("hybrid_jax.cache.radix", path) == [
        "hybrid_jax.cache.radix:3 imports jax.numpy"
    ]


def test_only_what_type_checkers_alone_read_may_import_anything(tmp_path):
    path = tmp_path / "radix.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax\nelse:\n    import flax\n"
        "if not TYPE_CHECKING:\n    import jax\n"
    )
    assert violations("hybrid_jax.cache.radix", path) == [
        "hybrid_jax.cache.radix:5 imports flax",
        "hybrid_jax.cache.radix:7 imports jax",
    ]


@pytest.mark.parametrize("module", SOURCES)
def test_imports_stand_at_the_top(module):
    if module in LATE_IMPORTS:
        return
    tree = ast.parse(SOURCES[module].read_text())
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


def test_host_rooms_load_without_jax():
    host = [m for m in SOURCES if inside(short(m), (*HOST, *PLAIN, "sim", "outputs", "text"))]
    assert "hybrid_jax.cache" in host
    assert not loaded_after(f"import {', '.join(host)}") & {"jax", "jaxlib", "flax"}


@pytest.mark.skipif("hybrid_jax.cli" not in SOURCES, reason="no command line yet")
def test_the_command_line_loads_without_jax():
    assert not loaded_after("import hybrid_jax.cli") & {"jax", "jaxlib", "flax"}

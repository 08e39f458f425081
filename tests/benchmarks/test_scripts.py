"""Where the scripts of the benchmarks lie: each can be imported and run as a file, and whatever names one is right."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

from tests.imports import ROOT, name_of

PEERS = ("llama_cpp_peer", "transformers_peer")  # they need other engines
MODULES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "benchmarks").rglob("*.py")}
SCRIPTS = {
    name for name, path in MODULES.items() if '\nif __name__ == "__main__":' in path.read_text()
}
PLACE = re.compile(r"\bbenchmarks/[\w./-]*\w")
COMMAND = re.compile(
    r"python -m (benchmarks\.[\w.]*\w)(?![\w.]*\.?\{)"
)  # f"python -m benchmarks.kernels.{name}"
MADE_UP = (Path(__file__), ROOT / "tests/test_choice.py")  # these name places that are not there
WRITTEN = re.compile(r"--json \S+")


def places(text: str) -> set[str]:
    """The files and folders of the benchmarks that a text names, other than what a command writes."""
    modules = {module.replace(".", "/") + ".py" for module in COMMAND.findall(text)}
    return {*PLACE.findall(WRITTEN.sub("", text))} | modules


@pytest.mark.parametrize(
    "module", sorted(name for name, path in MODULES.items() if path.stem not in PEERS)
)
def test_a_module_can_be_imported(module, monkeypatch):
    # gpu/warmup.py sets them before it imports jax.
    for name in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    importlib.import_module(name_of(module))


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_script_finds_the_repository_as_a_file_and_is_listed(script):
    assert re.search(r"sys\.path\.\w+\(.*parents\[2\]\)", MODULES[script].read_text())
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    assert f"`{script.removeprefix('benchmarks/')}`" in page or "/on_gpu/" in script


def test_every_place_that_is_named_is_there():
    texts = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")]
    for folder in ("benchmarks", "docs", "hybrid_jax", "tests", "examples"):
        texts += [path for end in ("py", "md", "sh") for path in (ROOT / folder).rglob(f"*.{end}")]
    named = {
        (path, place)
        for path in texts
        if path not in MADE_UP
        for place in places(path.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    assert [(path, place) for path, place in named if not (ROOT / place).exists()] == []


def test_a_wrong_place_is_seen():
    text = (
        "`benchmarks/engine.py --json benchmarks/results/new.json`, or python -m benchmarks.gone:"
    )
    assert places(text) == {"benchmarks/engine.py", "benchmarks/gone.py"}

"""Every example runs: doctests of all modules, and the blocks of README.md and docs/ marked `python run`."""

from __future__ import annotations

import ast
import doctest
import importlib
import logging
import os
import re
from pathlib import Path

import pytest

import hybrid_jax

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "notebooks"),
]
OTHER_PAGES = [
    ROOT / "CHANGELOG.md",
    *(
        p
        for folder in ("benchmarks", "tests", "models")
        for p in sorted((ROOT / folder).rglob("*.md"))
    ),
]
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#)([^)#]+)")
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("hybrid_jax", "pallas_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]
HAS_MODEL = (ROOT / "hybrid_jax" / "bundled" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def shared_llm():
    """Stands in for `LLM`: examples that ask for the same model share one, so each compiles once."""
    made = {}
    original = hybrid_jax.LLM if HAS_MODEL else None

    def make(*arguments, **options):
        key = repr((arguments, sorted(options.items())))
        if key not in made:
            made[key] = original(*arguments, **options)
        return made[key]

    make.from_params = original.from_params if HAS_MODEL else None
    return make


def needs_model(source: str) -> bool:
    return "LLM(" in source


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module, shared_llm, monkeypatch):
    loaded = importlib.import_module(module)
    monkeypatch.setattr(hybrid_jax, "LLM", shared_llm, raising=False)
    globals_ = vars(loaded) | {"LLM": shared_llm}
    for test in doctest.DocTestFinder().find(loaded, extraglobs=globals_):
        if any(needs_model(example.source) for example in test.examples) and not HAS_MODEL:
            pytest.skip("the bundled model is not there")
        runner, report = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), []
        runner.run(test, out=report.append)
        assert runner.failures == 0, "".join(report)


def blocks(page: Path) -> list[tuple[str, int, str]]:
    """(what follows ```python, first line, source) of each block."""
    text = page.read_text(encoding="utf-8")
    return [(m[1].strip(), text[: m.start(2)].count("\n") + 1, m[2]) for m in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_examples(page, shared_llm, monkeypatch, tmp_path, caplog):
    found = blocks(page)
    for kind, line, source in found:
        assert kind in ("", "run"), f"{page.name}:{line}: write ```python or ```python run"
        ast.parse(source, filename=f"{page.name}:{line}")
    runnable = [(line, source) for kind, line, source in found if kind == "run"]
    if any(needs_model(source) for _, source in runnable) and not HAS_MODEL:
        pytest.skip("the bundled model is not there")
    monkeypatch.setattr(hybrid_jax, "LLM", shared_llm, raising=False)
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.NOTSET, "hybrid_jax")  # put back after a page that shows how to log
    namespace: dict = {"__name__": page.stem}
    for line, source in runnable:
        code = compile("\n" * (line - 1) + source, str(page), "exec", dont_inherit=True)
        exec(code, namespace)


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    there = {t for t in targets if (page.parent / t).exists() or t in made_pages(page)}
    assert [t for t in targets if t not in there] == []


def made_pages(page):
    """Links of a page to the pages that `make docs` makes of notebooks."""
    folder = os.path.relpath(ROOT / "docs" / "notebooks", page.parent)
    return {f"{folder}/{notebook.stem}.md" for notebook in (ROOT / "examples").glob("*.ipynb")}


def test_a_wrong_example_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n```python run\nx = 1\nassert x == 2\n```\n[gone](nowhere.md)\n")
    [(kind, line, source)] = blocks(page)
    assert (kind, line) == ("run", 3)
    with pytest.raises(AssertionError):
        exec(compile(source, "page", "exec"), {})
    assert LINK.findall(page.read_text()) == ["nowhere.md"]


@pytest.mark.parametrize("name", hybrid_jax.__all__)
def test_everything_public_has_an_example(name):
    assert ">>> " in getattr(hybrid_jax, name).__doc__

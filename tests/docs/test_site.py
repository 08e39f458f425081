"""The documentation site: it builds without a warning, holds every page, and its generated page is up to date."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def script(name):
    """A script in docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOTEBOOKS = script("notebooks")


def test_outputs_of_a_notebook_are_on_its_page(tmp_path):
    picture = {"data": {"image/png": "aGVsbG8=", "text/plain": "<Figure>"}}
    table = {"data": {"text/html": ["<b>", "7</b>"], "text/plain": "7"}}
    pieces = (
        "\rcompiling 1 of 2 ...",
        "\rcompiling 2 of 2 ...",
        "\r        \r",
        "\x1b[1mdone\x1b[0m ```\n",
    )
    said = [{"text": [piece], "name": "stdout"} for piece in pieces]
    notebook = {
        "cells": [
            {"cell_type": "markdown", "source": ["# Title, [here](../docs/batch.md)"]},
            {
                "cell_type": "code",
                "id": "a",
                "source": ["f(", ")"],
                "outputs": [picture, table, *said],
            },
            {"cell_type": "code", "id": "b", "source": ["g()"], "outputs": [{"text": "\r   \r"}]},
        ]
    }
    page = NOTEBOOKS.page_of(notebook, "some", tmp_path)
    assert (tmp_path / "some-a-0.png").read_bytes() == b"hello"
    assert page.splitlines() == [
        *("# Title, [here](../batch.md)", "", "```python", "f()", "```", ""),
        *("![a picture that the cell above has drawn](some-a-0.png)", ""),
        *(
            '<div class="output"><b>7</b></div>',
            "",
            "````{ .text .output }",
            "done ```",
            "````",
            "",
        ),
        *("```python", "g()", "```"),
    ]


def test_a_notebook_that_has_not_changed_is_not_run_again(tmp_path):
    notebook, page = tmp_path / "some.ipynb", tmp_path / "some.md"
    notebook.write_text("{}")
    mark = NOTEBOOKS.mark_of(notebook)
    assert not NOTEBOOKS.is_made(page, mark)
    page.write_text(mark + "# Some\n")
    assert NOTEBOOKS.is_made(page, NOTEBOOKS.mark_of(notebook))
    notebook.write_text("{ }")
    assert not NOTEBOOKS.is_made(page, NOTEBOOKS.mark_of(notebook))


def test_arguments_that_share_a_line_have_one_each():
    parsed = script("griffe_examples").as_parsed
    text = "Says.\n\nArgs:\n    a, b_2: numbers\n        of all kinds.\n    c: one, two: three.\n"
    assert parsed(text) == (
        "Says.\n\nArgs:\n    a: numbers\n        of all kinds.\n    b_2: numbers\n        of all kinds.\n"
        "    c: one, two: three.\n"
    )


def moved_pages() -> dict[str, str]:
    """Where pages of old addresses lie now, as `mkdocs.yml` says, without `.md`."""
    return dict(re.findall(r"^ {8}([\w/]+)\.md: ([\w/]+)\.md$", SITE, re.MULTILINE))


def test_a_page_lies_in_the_folder_of_its_tab():
    tab, folders = "", {}
    for name, page in re.findall(
        r"^  - (\w.*):$|([\w/]+)\.md$", SITE.partition("\nnav:")[2], re.MULTILINE
    ):
        tab = name or tab
        if page and page != "index":
            folders.setdefault(page.split("/")[0], set()).add(tab)
    assert len(folders) == 7
    for folder, tabs in folders.items():
        assert tabs == {folder.replace("_", " ").capitalize()}


def test_an_old_address_leads_to_a_page_and_hides_none():
    moved = moved_pages()
    assert len(moved) >= 19 and moved["design"] == "explain/design"
    for old, new in moved.items():
        assert (ROOT / "docs" / f"{new}.md").is_file()
        assert not (ROOT / "docs" / f"{old}.md").exists()


def test_the_site_builds_without_a_warning_and_holds_every_page(tmp_path):
    left = shutil.ignore_patterns("__pycache__", "notebooks")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=left)
    (tmp_path / "docs" / "notebooks").mkdir()
    for path in NOTEBOOKS.NOTEBOOKS:  # as they are stored, without outputs; `make docs` runs them
        page = NOTEBOOKS.page_of(json.loads(path.read_text()), path.stem, tmp_path)
        (tmp_path / "docs" / "notebooks" / f"{path.stem}.md").write_text(page)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for folder in ("hybrid_jax", "pallas_kernels"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    command = [Path(sys.executable).parent / "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page.relative_to(tmp_path / "docs") for page in (tmp_path / "docs").rglob("*.md")}
    pages = {page for page in pages if page.parts[0] != "plans"}
    nav = SITE.partition("\nnav:")[2]
    assert sorted(map(str, pages)) == sorted(re.findall(r"[\w/]+\.md", nav))
    for page in pages:
        where = page.parent if page.name == "index.md" else page.with_suffix("")
        html = (tmp_path / "site" / where / "index.html").read_text(encoding="utf-8")
        assert "<h1" in html
        assert '<div class="highlight">' not in html, "a language has its name as a class"
    for old, new in moved_pages().items():
        html = (tmp_path / "site" / old / "index.html").read_text(encoding="utf-8")
        [address] = re.findall(r'content="0; url=([^"]+)"', html)
        found = (tmp_path / "site" / old / address).resolve()
        assert found == tmp_path / "site" / new and (found / "index.html").is_file()
    api = (tmp_path / "site" / "reference" / "api" / "llm" / "index.html").read_text("utf-8")
    assert 'id="hybrid_jax.LLM.generate"' in api and "&gt;&gt;&gt;" not in re.sub(
        r"<pre.*?</pre>", "", api, flags=re.DOTALL
    )
    for page in (tmp_path / "site").rglob("*.html"):  # it is read without a network
        loaded = re.findall(
            r'<(?:link|script|img)[^>]*(?:href|src)="?(https?://[^" >]+)', page.read_text()
        )
        assert all("zensical.org" in address for address in loaded), (page, loaded)


def test_the_page_of_the_command_line_is_what_help_says():
    module = script("command_line")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), (
        "run: python docs/command_line.py"
    )


def test_the_picture_of_the_home_page_is_what_was_measured():
    module = script("home_picture")
    assert module.PICTURE.read_text(encoding="utf-8") == module.picture(), (
        "run: python docs/home_picture.py"
    )

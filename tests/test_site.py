"""The documentation site: it builds without a warning, holds every page, and its generated page is up to date."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_site_builds_without_a_warning_and_holds_every_page(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for folder in ("hybrid_jax", "pallas_kernels"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    command = [Path(sys.executable).parent / "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if page.parts[0] != "plans"}
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert sorted(map(str, pages)) == sorted(re.findall(r"[\w/]+\.md", nav))
    for page in pages:
        where = page.parent if page.name == "index.md" else page.with_suffix("")
        html = (tmp_path / "site" / where / "index.html").read_text(encoding="utf-8")
        assert "<h1" in html
    api = (tmp_path / "site" / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    assert 'id="hybrid_jax.LLM.generate"' in api and "&gt;&gt;&gt;" not in re.sub(
        r"<pre.*?</pre>", "", api, flags=re.DOTALL
    )


def test_the_page_of_the_command_line_is_what_help_says():
    spec = importlib.util.spec_from_file_location("command_line", ROOT / "docs" / "command_line.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), (
        "run: python docs/command_line.py"
    )

"""Writes a page with outputs for each notebook in examples/: python docs/notebooks.py [--all]

A notebook is run if it, or the package's version, is not what its page was made from; with --all every one is.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
NOTEBOOKS = sorted((DOCS.parent / "examples").glob("*.ipynb"))
ESCAPES = re.compile(r"\x1b\[[0-9;]*m|[^\n]*\r(?!\n)")  # colours, and what a terminal overwrites
MIN_FENCE = 3
MARK = "<!-- made from {} -->\n"  # the first line of a page


def page_of(notebook: dict[str, Any], name: str, folder: Path) -> str:
    """A notebook as Markdown. Pictures go into files beside the page.

    Args:
        notebook: with outputs if it was run. name: of the page. folder: for the pictures.
    """
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../"))
            continue
        parts.append(_fenced(source, "python"))
        for number, output in enumerate(_joined(cell.get("outputs", []))):
            parts.append(_shown(output, f"{name}-{cell['id']}-{number}.png", folder))
    return "\n\n".join(part for part in parts if part) + "\n"


def _joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outputs, with pieces of text that follow each other as one."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        if "text" in output and found and "text" in found[-1]:
            found[-1] = found[-1] | {"text": [*found[-1]["text"], *output["text"]]}
        else:
            found.append(output)
    return found


def _shown(output: dict[str, Any], picture: str, folder: Path) -> str:
    """One output: a picture, a table, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        (folder / picture).write_bytes(base64.b64decode(data["image/png"]))
        return f"![a picture that the cell above has drawn]({picture})"
    if "text/html" in data:
        html = "".join(data["text/html"])
        return f'<div class="output">{html}</div>' if html else ""
    text = ESCAPES.sub("", "".join(output.get("text", data.get("text/plain", "")))).strip("\n")
    return _fenced(text, "{ .text .output }") if text.strip() else ""


def _fenced(text: str, language: str) -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(MIN_FENCE, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def mark_of(path: Path) -> str:
    """The first line of a notebook's page: it changes with the notebook and with the version of the package."""
    from hybrid_jax import __version__

    data = path.read_bytes() + Path(__file__).read_bytes() + __version__.encode()
    return MARK.format(hashlib.blake2b(data, digest_size=8).hexdigest())


def is_made(page: Path, mark: str) -> bool:
    """Whether a page was made from what the mark stands for."""
    return page.is_file() and page.read_text(encoding="utf-8").startswith(mark)


def main(*, run_all: bool) -> None:
    """Runs notebooks and writes their pages."""
    import nbformat
    from nbclient import NotebookClient

    folder = DOCS / "notebooks"
    folder.mkdir(exist_ok=True)
    for path in NOTEBOOKS:
        page, mark = folder / f"{path.stem}.md", mark_of(path)
        if is_made(page, mark) and not run_all:
            continue
        print(f"running {path.name}", file=sys.stderr)
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, kernel_name="python3", timeout=1200).execute(cwd=str(path.parent))
        page.write_text(mark + page_of(notebook, path.stem, folder), encoding="utf-8")


if __name__ == "__main__":
    main(run_all="--all" in sys.argv[1:])

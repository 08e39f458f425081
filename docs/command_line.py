"""Writes docs/reference/command_line.md, the page with the help of every command: python docs/command_line.py"""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from hybrid_jax.cli import main as cli

PAGE = Path(__file__).parent / "reference" / "command_line.md"
HEAD = """# Command line

`hybrid-jax COMMAND --help` shows the same as this page. `python -m hybrid_jax` is the same program. Exit codes are in
[Environment variables and exit codes](environment.md#exit-codes).

To complete commands and options by the tab key, run `hybrid-jax --install-completion` once, and open a new shell. It
knows bash, zsh, fish and PowerShell.
"""


def help_of(*arguments: str) -> str:
    """What `--help` says, 80 columns wide."""
    os.environ["COLUMNS"] = "80"
    text = StringIO()
    with redirect_stdout(text):
        try:
            cli.main([*arguments, "--help"])
        except SystemExit:
            pass
    return text.getvalue().rstrip()


def page() -> str:
    """The page."""
    parts = [HEAD]
    for heading, names in cli.NAMES.items():
        parts.append(f"\n## {heading}\n")
        parts += [f"\n### {name}\n\n```text\n{help_of(name)}\n```\n" for name in names]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

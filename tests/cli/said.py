"""What a command of the program said: its table, its one line about a mistake, and what it loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WITHOUT_JAX = """
import sys
from hybrid_jax.cli import main as cli
try:
    cli.main(sys.argv[1:])
except SystemExit as exit:
    assert exit.code == 0, exit.code
print(sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def table(found: tuple[int, str, str]) -> dict[str, str]:
    """The lines of a table by their first column; the command ended well."""
    code, out, err = found
    assert (code, err) == (0, "")
    lines = (line.split("  ", 1) for line in out.splitlines() if "  " in line.strip())
    return {name: value.strip() for name, value in lines}


def check_mistake(found: tuple[int, str, str], message: str) -> None:
    """The command ended with 2 and one line that begins so."""
    code, out, err = found
    assert (code, out) == (2, "")
    assert err.startswith(f"hybrid-jax: {message}") and err.count("\n") == 1, err


def run_without_jax(root: Path, arguments: Sequence[str | Path]) -> str:
    """What a command printed in a process of its own, which loaded numpy and neither jax nor flax."""
    command = [sys.executable, "-c", WITHOUT_JAX, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert "'numpy'" in done.stderr and "'hybrid_jax'" in done.stderr
    assert not {f"'{name}'" for name in ("jax", "jaxlib", "flax") if f"'{name}'" in done.stderr}
    return done.stdout

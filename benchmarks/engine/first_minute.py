"""How long a new user waits: README's first example in a new process, with nothing compiled, and once more after that.

python benchmarks/engine/first_minute.py --json benchmarks/results/engine/first_minute_cpu.json
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python run\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def example() -> str:
    """README's first example that runs."""
    return BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0]


def run_here(start: float) -> dict[str, float]:
    """Runs the example in this process, a statement at a time: seconds since `start` (by the clock of the system)."""
    space: dict = {"__name__": "example"}
    seconds, begun, times = {}, time.perf_counter(), time.time() - start
    for statement in ast.parse(example()).body:
        exec(compile(ast.Module([statement], []), "README.md", "exec"), space)
        now = times + time.perf_counter() - begun
        if "SamplingParams" in space and "import" not in seconds:
            seconds["import"] = now
        if "llm" in space and "load" not in seconds:
            seconds["load"] = now
        if "delta" in space and "first_answer" not in seconds:
            first = space["delta"].output.metrics.first_token_time
            seconds["first_token"] = times + first - begun
            seconds["first_answer"] = now
    seconds["whole"] = times + time.perf_counter() - begun
    return seconds


def run_apart(cache: str) -> dict[str, float]:
    """The same in a process of its own, from its start, with a folder for compiled programs."""
    command = [sys.executable, __file__, "--here", str(time.time())]
    set_by_users = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    own = {name: value for name, value in os.environ.items() if name not in set_by_users}
    done = subprocess.run(
        command,
        env=own | {"XDG_CACHE_HOME": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is timed; 3")
    parser.add_argument("--json", type=Path, help="the numbers")
    parser.add_argument("--here", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is not None:
        found = run_here(options.here)
        print(f"\n{json.dumps(found)}")  # the example may leave a line open
        return
    from benchmarks.common import (  # loads jax, which the other process is timed for
        header,
        write_json,
    )

    cold, warm = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(run_apart(cache))
            warm.append(run_apart(cache))
    names = list(cold[0])
    rows = {
        side: {name: round(statistics.median(run[name] for run in runs), 2) for name in names}
        for side, runs in (("nothing compiled", cold), ("compiled before", warm))
    }
    print(f"{'seconds until':<20}", *(f"{name:>14}" for name in names))
    for side, row in rows.items():
        print(f"{side:<20}", *(f"{row[name]:>14.2f}" for name in names))
    if options.json is not None:
        write_json(options.json, {**header(), "seconds": rows, "rounds": options.rounds})


if __name__ == "__main__":
    main()

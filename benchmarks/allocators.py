"""Allocators of KV and states: the tables of the AVMP paper (arXiv 2605.22416) by its own rules, and honest ones.

Loads without a model, counts without a clock but for one table. A file of runs is gone on with: what it has is not
run again.

    python benchmarks/allocators.py [--out FOLDER] [--smoke]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.allocator_studies import plots
from benchmarks.allocator_studies.runs import ROOT, header, run_all
from benchmarks.allocator_studies.tables import Table, tables

OUT = ROOT / "benchmarks" / "results" / "allocators"


def write(found: list[Table], folder: Path) -> None:
    """The tables as JSON and markdown."""
    named = {table.name: table.as_dict() for table in found}
    text = json.dumps({"header": header(), "tables": named}, indent=1)
    (folder / "tables.json").write_text(text + "\n", encoding="utf-8")
    pages = ["# Studies of allocators", "Made by `python benchmarks/allocators.py`."]
    pages += [table.markdown() for table in found]
    (folder / "tables.md").write_text("\n\n".join(pages) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder of runs, tables and figures")
    parser.add_argument("--smoke", action="store_true", help="a few cells only, for tests")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    runs = run_all(
        options.out / "runs.json",
        smoke=options.smoke,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    found = tables(runs)
    write(found, options.out)
    print("\n\n".join(table.markdown() for table in found))
    missing = plots.why_not()
    if missing is None:
        plots.draw_all(found, options.out)
    else:
        print(missing, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Allocators of KV and states: the tables of the AVMP paper (arXiv 2605.22416) by its own rules, and honest ones.

Loads without a model, counts without a clock but for one table. A file of runs is gone on with: what it has is not
run again. `--rings` makes the tables of what rings cost instead, rings.md and rings.json, in some hours of a
core.

    python benchmarks/memory/allocators.py [--rings] [--out FOLDER] [--smoke]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

from benchmarks.memory.studies import plots
from benchmarks.memory.studies.rings import Study, ring_tables
from benchmarks.memory.studies.runs import ROOT, Kept, header, run_all
from benchmarks.memory.studies.tables import Table, tables

OUT = ROOT / "benchmarks" / "results" / "memory" / "allocators"


def write(found: list[Table], folder: Path, name: str, *, title: str, command: str) -> None:
    """The tables as JSON and markdown."""
    named = {table.name: table.as_dict() for table in found}
    text = json.dumps({"header": header(), "tables": named}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    pages = [f"# {title}", f"Made by `python benchmarks/memory/allocators.py{command}`."]
    pages += [table.markdown() for table in found]
    (folder / f"{name}.md").write_text("\n\n".join(pages) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder of runs, tables and figures")
    parser.add_argument("--smoke", action="store_true", help="a few cells only, for tests")
    parser.add_argument("--rings", action="store_true", help="what rings cost, and nothing else")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    say = lambda text: print(text, file=sys.stderr, flush=True)
    runs_file = options.out / "runs.json"
    if options.rings:
        kept = Kept(runs_file, say)
        try:
            found = ring_tables(Study(kept, smoke=options.smoke))
        finally:  # what ran before a Ctrl-C is not run again
            kept.save()
        write(found, options.out, "rings", title="What rings cost", command=" --rings")
        print("\n\n".join(table.markdown() for table in found))
        return 0
    found = tables(run_all(runs_file, smoke=options.smoke, say=say))
    write(found, options.out, "tables", title="Studies of allocators", command="")
    print("\n\n".join(table.markdown() for table in found))
    missing = plots.why_not()
    if missing is None:
        plots.draw_all(found, options.out)
    else:
        print(missing, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

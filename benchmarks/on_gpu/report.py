"""What first.sh, second.sh and call_1.sh found, as markdown: the tables of docs/explain/kernels.md.

python -m benchmarks.on_gpu.report FOLDER [FOLDER ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.gpu.tables import tables
from benchmarks.kernels.report import roofline
from benchmarks.on_gpu.anatomy_tables import anatomy

FILES = (
    *("checks.json", "engines.json", "answers.json", "repeats.json", "kernels.json"),
    *("engine.json", "anatomy.json"),
)


def read(folders: list[Path]) -> dict[str, dict]:
    """The files that are there, by name; of two alike the last folder's.

    Raises:
        SystemExit: none is there, or one is no JSON.
    """
    found = {}
    for file in (folder / name for folder in folders for name in FILES):
        if file.is_file():
            try:
                found[file.name] = json.loads(file.read_text())
            except ValueError as error:
                raise SystemExit(
                    f"report: {file} is damaged: {error}; run its script again, or move it away"
                ) from error
    if not found:
        where = ", ".join(map(str, folders))
        raise SystemExit(
            f"report: none of {', '.join(FILES)} is in {where}; run first.sh, second.sh or call_1.sh"
        )
    return found


def markdown(found: dict[str, dict]) -> str:
    """The page's parts."""
    parts = []
    if any("cpu" in _run_on(report) for report in found.values()):
        parts.append(
            "**A run on a CPU: it shows that the scripts work, and says nothing about a GPU.**"
        )
    for file, what in (("checks.json", "kernel tests"), ("engines.json", "tests of engines")):
        if checks := found.get(file):
            parts.append(
                f"{_device(checks)}: {len(checks['passed'])} {what} passed, {len(checks['failed'])} failed, "
                f"{len(checks['skipped'])} skipped, in {checks.get('seconds', 0):.0f} s."
            )
            parts += [f"- failed: `{entry['test']}`" for entry in checks["failed"]]
            if file == "checks.json" and (reason := checks.get("no_triton")):
                parts.append(f"- Triton kernels: not there: {reason}")
    if answers := found.get("answers.json"):
        for case in answers["cases"]:
            result = case.get("error") or f"{case['different']} of {answers['requests']}"
            parts.append(f"- {case['model']}, {case['dtype']}: answers that differ: {result}")
    if repeats := found.get("repeats.json"):
        lines = [
            "| rows | dtype | repeats | the same bits, with command buffers and without |",
            "| --- | --- | --- | --- |",
        ]
        for case in repeats["cases"]:
            fine = "yes" if case["fine"] else f"no: {case['runs']}"
            lines.append(f"| {case['rows']} | {case['dtype']} | {repeats['repeats']} | {fine} |")
        parts.append("\n".join(lines))
    if kernels := found.get("kernels.json"):
        run = kernels["runs"][-1]
        parts.append(
            f"{run['device']}, jax {run['jax']}: a copy moves {run['copy'] / 1e12:.2f} TB/s, a bfloat16 product makes "
            f"{run['matmul'] / 1e12:.0f} TFLOP/s."
        )
        parts.append(roofline(kernels["rows"]))
    if engine := found.get("engine.json"):
        parts.append(f"```\n{tables(engine)}\n```")
    if steps := found.get("anatomy.json"):
        parts.append(anatomy(steps))
    return "\n\n".join(parts)


def _run_on(report: dict) -> str:
    """The device of a report, in small letters."""
    header = report["header"] if "header" in report else report["runs"][-1]
    return header["device"].lower()


def _device(report: dict) -> str:
    return f"{report['header']['device']}, jax {report['header']['jax']}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    print(markdown(read(parser.parse_args(argv).folders)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

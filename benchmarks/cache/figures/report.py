"""Figures as one JSON file and one page of markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common import write_json

NAME = "figures"
STAND_INS = (
    "**The traces are stand-ins.** `chat`, `short` and `agents` are drawn at random after the description of the logs "
    "behind the paper (LMSYS-Chat-1M, ShareGPT, agents on SWE-bench), with lengths set until two baselines of the "
    "published simulator hit what its authors print; only `log` comes from a real service (Mooncake), whose tokens "
    "are known by their hashes. See [traces](../../../traces/README.md). These tables compare policies; they do not "
    "measure the paper's users."
)
POLICIES = (
    "Policies as in [docs/explain/prefix_cache.md](../../../../docs/explain/prefix_cache.md): `vllm` and `sglang` "
    "stand for the paper's vLLM+ and SGLang+, `marconi` follows its text, `marconi-code` its published code, "
    "`alpha-code:1` that code's formula with a fixed weight. `adaptive` is ours, `optimal` knows the future (a lower "
    "bound of the best), `infinite` never evicts. Columns called `paper` hold the paper's numbers, on its own "
    "traces; `code` the published simulator on these traces."
)


def read(folder: Path) -> dict[str, Any]:
    """Figures made before, by name."""
    path = folder / f"{NAME}.json"
    return json.loads(path.read_text())["figures"] if path.exists() else {}


def write(folder: Path, order: list[str], figures: dict[str, Any], header: dict[str, str]) -> None:
    """Writes both files; figures that were not made again stay with the header that they had."""
    figures = {name: figures[name] for name in order if name in figures}
    write_json(folder / f"{NAME}.json", header | {"figures": figures})
    (folder / "README.md").write_text(page(folder, figures), encoding="utf-8")


def page(folder: Path, figures: dict[str, Any]) -> str:
    parts = ["# Figures of the Marconi paper on our traces", STAND_INS, POLICIES]
    parts.append(
        "Made by `python benchmarks/cache/policies.py --figures all`; rows also in "
        f"[{NAME}.json]({NAME}.json)."
    )
    for name, entry in figures.items():
        parts.append(section(name, entry, has_chart=(folder / f"{chart_name(name)}").exists()))
    return "\n\n".join(parts) + "\n"


def chart_name(name: str) -> str:
    return f"{label(name).lower().replace(' ', '_').replace('.', '')}.png"


def label(name: str) -> str:
    return {"table1": "Table 1", "check": "Check"}.get(name, f"Fig. {name}")


def section(name: str, entry: dict[str, Any], *, has_chart: bool) -> str:
    parts = [f"## {label(name)}: {entry['title']}"]
    parts.append(
        f"- Paper: {entry['paper']}\n- Here: {entry['ours']}\n- Differences: {entry['differences']}"
    )
    if has_chart:
        parts.append(f"![{label(name)}]({chart_name(name)})")
    for table in entry["tables"]:
        parts.append(f"**{table['title']}**")
        parts.append(table_text(table["rows"]))
    run = entry["run"]
    parts.append(f"commit {run['commit']}, Python {run['python']}, jax {run['jax']}")
    return "\n\n".join(parts)


def table_text(rows: list[dict[str, Any]]) -> str:
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(cell(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value + 0.0}"  # no -0.0
    return f"{value:,}" if isinstance(value, int) else str(value)

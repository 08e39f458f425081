"""Who imports whom, read from the syntax trees."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("hybrid_jax", "pallas_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}

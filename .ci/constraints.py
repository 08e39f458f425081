"""Writes the versions that the tests' environments have into constraints.txt, for Makefile's `constraints`.

    python .ci/constraints.py PYTHON...

Each PYTHON is that of an environment. A package whose version differs between them is written once for each version of
Python. jax is left out, because Makefile says which the tests run on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).with_name("constraints.txt")
LEFT_OUT = ("jax", "jaxlib", "hybrid_jax", "pip", "setuptools")
ASK = """
import importlib.metadata, json, sys
found = {d.metadata["Name"].lower().replace("-", "_"): d.version for d in importlib.metadata.distributions()}
print(json.dumps(["{}.{}".format(*sys.version_info), found]))
"""


def main(pythons: list[str]) -> None:
    asked = [subprocess.check_output([python, "-c", ASK], text=True) for python in pythons]
    environments: list[tuple[str, dict[str, str]]] = [json.loads(said) for said in asked]
    lines = []
    for name in sorted({name for _, found in environments for name in found} - {*LEFT_OUT}):
        versions = {python: found[name] for python, found in environments if name in found}
        if len(set(versions.values())) == 1:
            lines.append(f"{name}=={next(iter(versions.values()))}")
            continue
        lines += [
            f'{name}=={version}; python_version == "{python}"'
            for python, version in versions.items()
        ]
    head = "# What the tests run with. `make constraints` writes this file; users install without it.\n"
    FILE.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

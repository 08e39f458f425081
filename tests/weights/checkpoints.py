"""Goldens by name, safetensors files read and written by hand, and the bits of parameter trees."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import numpy as np

from tests.parity.goldens import GOLDENS

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}
GOLDEN = {golden.name: golden for golden in GOLDENS}
MAMBA = "backbone.layers.0.mixer"


def read(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a float32 safetensors file."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            raw, np.float32, math.prod(entry["shape"]), start + entry["data_offsets"][0]
        ).reshape(entry["shape"])
        for name, entry in header.items()
    }


def write(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file."""
    header, blobs, start = {}, [], 0
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [start, start + len(blob)],
        }
        blobs.append(blob)
        start += len(blob)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def same_bits(left: dict, right: dict) -> bool:
    """Whether two parameter trees agree in structure, dtypes and every bit."""
    if jax.tree.structure(left) != jax.tree.structure(right):
        return False
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
    )

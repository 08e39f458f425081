"""One prefix whole in one file: what `llm.cache.save` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hybrid_jax.geometry import Geometry
from hybrid_jax.tiers import parcel
from hybrid_jax.tiers.part_file import Damaged, Part, check_shapes, read_part, write_part

TOKENS = "tokens"
KIND = "prefix"


def write_prefix(
    file: Path, root: str, tokens: np.ndarray, arrays: dict[str, parcel.Pieces]
) -> None:
    """Writes a prefix.

    Args:
        file: where to; it is replaced. root: of the engine. tokens: int32[position]. arrays: what resuming takes.

    Raises:
        OSError: of the system.
    """
    marks = {"kind": KIND, "root": root, "position": str(len(tokens))}
    own = parcel.Pieces("int32", (len(tokens),), [np.asarray(tokens, np.int32)])
    write_part(file, marks, {TOKENS: own, **arrays})


def read_prefix(file: Path, root: str, geometry: Geometry) -> Part:
    """Reads a prefix of an engine with this root.

    Raises:
        Damaged: the file is damaged, or something else. ValueError: it is of another model, or of other weights or
            settings, or the engine cannot resume there. OSError: of the system.
    """
    part = read_part(file)
    if part.marks.get("kind") != KIND:
        raise Damaged(
            f"{file} is no prefix that cache.save has written, but {part.marks.get('kind')!r}"
        )
    if part.marks.get("root") != root:
        raise ValueError(
            f"{file} is of another model, or of other weights, another dtype or speculation; generate from the prompt "
            "instead"
        )
    position = int(part.marks["position"])
    if position % geometry.grain:
        raise ValueError(
            f"{file} ends after {position} tokens, and this engine resumes at multiples of {geometry.grain}; save it "
            f"with grain={geometry.grain}"
        )
    shapes = {TOKENS: parcel.Shape("int32", (position,))}
    check_shapes(file, part, shapes | parcel.prefix_shapes(geometry, position))
    return part

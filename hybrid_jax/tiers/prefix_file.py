"""One prefix whole in one file: what `llm.cache.save` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hybrid_jax.tiers import parcel
from hybrid_jax.tiers.form import Form
from hybrid_jax.tiers.part_file import Damaged, Part, check_shapes, read_part, shapes_of, write_part

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


def read_prefix(file: Path, root: str, form: Form) -> Part:
    """Reads a prefix of an engine with this root.

    Raises:
        Damaged: the file is damaged, or something else. ValueError: it is of another model, or of other weights or
            settings, or the engine cannot resume there; the message says which. OSError: of the system.
    """
    part = read_part(file)
    if part.marks.get("kind") != KIND:
        raise Damaged(
            f"{file} is no prefix that cache.save has written, but {part.marks.get('kind')!r}"
        )
    position = int(part.marks["position"])
    shapes = {
        TOKENS: parcel.Shape("int32", (position,)),
        **form.prefix_shapes(position),
    }
    if part.marks.get("root") != root:
        raise ValueError(f"{file} {_other(part, shapes)}; generate from the prompt instead")
    grain = form.geometry.grain
    if position % grain:
        raise ValueError(
            f"{file} ends after {position} tokens, and this engine resumes at multiples of {grain}; save it "
            f"with grain={grain}"
        )
    check_shapes(file, part, shapes)
    return part


def _other(part: Part, shapes: Mapping[str, parcel.Shape]) -> str:
    """What is other about a prefix that another root has, in words."""
    narrow, own_narrow = parcel.NARROW in part.arrays, parcel.NARROW in shapes
    if narrow != own_narrow:
        forms = [
            f"CacheConfig(checkpoints={'int8' if x else 'float32'!r})" for x in (narrow, own_narrow)
        ]
        return f"was saved with {forms[0]}, and this engine has {forms[1]}"
    if shapes_of(part) != dict(shapes):
        return "is of another model, or was saved with another dtype, kv_cache_dtype, speculation or cut"
    return "is of other weights, or one of the two engines is exact, or of another version"

"""The headers of safetensors files: which tensors a file has, where their bytes are, and whether it is whole.

The library's own reader does not say which bytes of a damaged file are missing. Needs no jax.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_jax.config.model_directory import dangling, pointer
from hybrid_jax.models.files import CheckpointNotFound

MAX_HEADER_BYTES = 100_000_000  # the limit of the format
MAX_AXES = 32  # of a numpy array
MAX_NUMBER = 1 << 128  # far past what the format has room for
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}


class Entry(NamedTuple):
    """One tensor: its dtype as the format names it, and its bytes [start, stop) after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The tensors of a file by name, and where their bytes begin in it."""

    begin: int
    entries: dict[str, Entry]


def read_header(file: Path) -> Header:
    """Reads 8 bytes of header length and a JSON header, and checks that all bytes that it names are there.

    Raises:
        CheckpointNotFound: there is no such file. ValueError: it is damaged, or something else. OSError: of the system.
    """
    if not file.is_file():
        what = dangling(file) if file.is_symlink() else f"{file} does not exist"
        raise CheckpointNotFound(f"load_model: {what}; the checkpoint is incomplete")
    size = file.stat().st_size
    if size < 8:
        raise ValueError(f"load_model: {file} is truncated, it has {size} bytes; fetch it again")
    with file.open("rb") as opened:
        first = opened.read(64)
        if said := pointer(first):
            raise ValueError(f"load_model: {file} {said}")
        length = int.from_bytes(first[:8], "little")
        if 8 + length > size:
            raise ValueError(
                f"load_model: {file} is truncated or not a safetensors file, its header should end at byte "
                f"{8 + length}, it has {size} bytes; fetch it again"
            )
        if length > MAX_HEADER_BYTES:
            raise ValueError(
                f"load_model: {file} is not a safetensors file, its header would have {length} bytes, the limit is "
                f"{MAX_HEADER_BYTES}; fetch it again"
            )
        opened.seek(8)
        text = opened.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_twins)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"load_model: {file} has a malformed header: {error!r}") from error
    entries = {name: _read_entry(file, name, entry) for name, entry in header.items()}
    end = 8 + length + max((entry.stop for entry in entries.values()), default=0)
    if end > size:
        raise ValueError(
            f"load_model: {file} is truncated, it should have {end} bytes, it has {size}; fetch it again"
        )
    _check_places(file, entries)
    return Header(8 + length, entries)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. ValueError if a name comes twice: the later one would hide the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twin, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{reprlib.repr(twin)} comes twice")
    return found


def _check_places(file: Path, entries: dict[str, Entry]) -> None:
    """ValueError unless each tensor has the bytes that it needs, and no two have the same ones."""
    last_stop, last_name = 0, ""
    for name, (dtype, shape, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        # numpy's product would wrap, so that a shape that fits in no memory could seem to fit
        need = math.prod(shape) * ITEM_BYTES.get(dtype, 1)
        if stop < start or (stop - start != need and dtype in ITEM_BYTES):
            raise ValueError(
                f"load_model: {file} is damaged, tensor {name} of shape {reprlib.repr(shape)} and dtype {dtype} "
                f"needs {reprlib.repr(need)} bytes, its header gives it {stop - start}; fetch it again"
            )
        if start < last_stop and stop > start:
            raise ValueError(
                f"load_model: {file} is damaged, tensors {last_name} and {name} share bytes {start} to "
                f"{min(stop, last_stop)}; fetch it again"
            )
        if stop > start:
            last_stop, last_name = stop, name


def _read_entry(file: Path, name: str, entry: Any) -> Entry:
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        start, stop = offsets
        numbers = (*shape, start, stop)
    except (KeyError, TypeError, ValueError):
        numbers = None
    if (
        numbers is None
        or not isinstance(dtype, str)
        or not all(type(n) is int for n in numbers)
        or min(numbers) < 0
    ):
        raise ValueError(
            f"load_model: {file} has a malformed header, tensor {name} must have a dtype, a shape and two "
            f"data_offsets, got {reprlib.repr(entry)}"
        )
    # Products of many or of huge numbers would take hours.
    if len(shape) > MAX_AXES:
        raise ValueError(
            f"load_model: {file} is damaged, tensor {name} has {len(shape)} axes, the limit is {MAX_AXES}; "
            "fetch it again"
        )
    if max(numbers) > MAX_NUMBER:
        raise ValueError(
            f"load_model: {file} is damaged, tensor {name} has {reprlib.repr(max(numbers))} in its shape or "
            "data_offsets, the limit is 2**128; fetch it again"
        )
    return Entry(dtype, tuple(shape), start, stop)

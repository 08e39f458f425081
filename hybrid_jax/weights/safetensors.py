"""Safetensors files, memory-mapped: what a directory holds, tensor by tensor, and whether it is whole.

The library's own reader keeps the pages of tensors that were read, so a model is in memory twice while it loads. And
it does not say which bytes of a damaged file are missing.
"""

from __future__ import annotations

import json
import math
import mmap
import reprlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hybrid_jax.config.model_directory import dangling, pointer
from hybrid_jax.models.files import CheckpointNotFound
from hybrid_jax.models.weight_files import WeightFiles

ARRAY_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
MAX_AXES = 32  # of a numpy array
MAX_NUMBER = 1 << 128  # far past what the format has room for
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a memory-mapped safetensors file: raw bytes, and what they mean."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8[bytes]
    mapping: mmap.mmap

    def let_go(self) -> None:
        """Gives the memory of the file's pages back to the system; what is read again comes from the file again.

        Without that a model would be in memory twice when it has been loaded.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)

    def array(self) -> np.ndarray:
        """A view of the file as an array.

        Raises:
            NotImplementedError: an integer or float8 tensor, that is, a quantised checkpoint.
        """
        if self.dtype not in ARRAY_DTYPES:
            raise NotImplementedError(
                f"load_model: tensor {self.name} of {self.file} has dtype {self.dtype}, only "
                f"{', '.join(ARRAY_DTYPES)} are supported; use an unquantised checkpoint"
            )
        return self.data.view(ARRAY_DTYPES[self.dtype]).reshape(self.shape)


def read_tensors(files: WeightFiles) -> Iterator[StoredTensor]:
    """Every tensor of some files. Those that are not there, although an index names them, are passed over.

    Where several files have a tensor, it is the one of the file in which the index puts it.
    """
    for file in files.files:
        if files.places and not file.is_file():
            continue
        for name, tensor in read_file(file).items():
            if files.places.get(name, file) == file:
                yield tensor


def read_file(file: Path) -> dict[str, StoredTensor]:
    """Maps a safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes."""
    if not file.is_file():
        what = dangling(file) if file.is_symlink() else f"{file} does not exist"
        raise CheckpointNotFound(f"load_model: {what}; the checkpoint is incomplete")
    size = file.stat().st_size
    if size < 8:
        raise ValueError(f"load_model: {file} is truncated, it has {size} bytes; fetch it again")
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    raw = np.frombuffer(mapping, np.uint8)
    if said := pointer(raw[:64].tobytes()):
        raise ValueError(f"load_model: {file} {said}")
    length = int(raw[:8].view("<u8")[0])
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
    try:
        header = json.loads(raw[8 : 8 + length].tobytes(), object_pairs_hook=_without_twins)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"load_model: {file} has a malformed header: {error!r}") from error
    entries = {name: _read_entry(file, name, entry) for name, entry in header.items()}
    data = raw[8 + length :]
    end = max((stop for *_, stop in entries.values()), default=0)
    if end > data.size:
        raise ValueError(
            f"load_model: {file} is truncated, it should have {8 + length + end} bytes, it has "
            f"{size}; fetch it again"
        )
    _check_places(file, entries)
    return {
        name: StoredTensor(file, name, dtype, shape, data[start:stop], mapping)
        for name, (dtype, shape, start, stop) in entries.items()
    }


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. ValueError if a name comes twice: the later one would hide the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twin, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{reprlib.repr(twin)} comes twice")
    return found


def _check_places(file: Path, entries: dict[str, tuple[str, tuple[int, ...], int, int]]) -> None:
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


def _read_entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, start, stop) of one tensor, its place in bytes after the header."""
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
    return dtype, tuple(shape), start, stop

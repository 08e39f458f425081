"""Safetensors files, memory-mapped: what a directory holds, tensor by tensor, and whether it is whole.

The library's own reader keeps the pages of tensors that were read, so a model is in memory twice while it loads. And
it does not say which bytes of a damaged file are missing.
"""

from __future__ import annotations

import json
import mmap
import reprlib
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
    try:
        header = json.loads(raw[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"load_model: {file} has a malformed header: {error!r}") from error
    entries = {name: _read_entry(file, name, entry) for name, entry in header.items()}
    data = raw[8 + length :]
    end = max((stop for *_, stop in entries.values()), default=0)
    if end > data.size:
        raise ValueError(
            f"load_model: {file} is truncated, it should have {8 + length + end} bytes, it has "
            f"{size}; fetch it again"
        )
    tensors = {}
    for name, (dtype, shape, start, stop) in entries.items():
        need = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES.get(dtype, 1)
        if stop - start != need and dtype in ITEM_BYTES:
            raise ValueError(
                f"load_model: {file} is damaged, tensor {name} of shape {shape} and dtype {dtype} "
                f"needs {need} bytes, its header gives it {stop - start}; fetch it again"
            )
        tensors[name] = StoredTensor(file, name, dtype, shape, data[start:stop], mapping)
    return tensors


def _read_entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, start, stop) of one tensor, its place in bytes after the header."""
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        start, stop = offsets
        numbers = (*shape, start, stop)
    except (KeyError, TypeError, ValueError):
        numbers = None
    good = numbers is not None and isinstance(dtype, str) and all(type(n) is int for n in numbers)
    if not good or min(numbers) < 0:
        raise ValueError(
            f"load_model: {file} has a malformed header, tensor {name} must have a dtype, a shape and two "
            f"data_offsets, got {reprlib.repr(entry)}"
        )
    return dtype, tuple(shape), start, stop

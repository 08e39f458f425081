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

from hybrid_jax.models.files import CheckpointNotFound, read_json

OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf")  # of weights that may lie there instead
ARRAY_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
LFS_POINTER = b"version https://git-lfs"
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


def read_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Every tensor of model.safetensors, or of the shards its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        yield from read_file(single).values()
        return
    if not index.is_file():
        others = sorted(file.name for file in folder.iterdir() if file.suffix in OTHER_FORMATS)
        remedy = f"convert {others[0]} to safetensors first" if others else "fetch the weights too"
        raise CheckpointNotFound(
            f"load_model: {folder} has no {single.name} and no {index.name}; {remedy}"
        )
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"load_model: {index} has no weight_map")
    shards = {}
    for name, shard in places.items():
        if shard not in shards:
            shards[shard] = read_file(folder / shard)
        if name not in shards[shard]:
            raise ValueError(f"load_model: tensor {name} is not in {shard}, where {index} puts it")
        yield shards[shard][name]


def read_file(file: Path) -> dict[str, StoredTensor]:
    """Maps a safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes."""
    if not file.is_file():
        raise CheckpointNotFound(f"load_model: {file} does not exist; the checkpoint is incomplete")
    size = file.stat().st_size
    if size < 8:
        raise ValueError(f"load_model: {file} is truncated, it has {size} bytes; fetch it again")
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    raw = np.frombuffer(mapping, np.uint8)
    if raw[: len(LFS_POINTER)].tobytes() == LFS_POINTER:
        raise ValueError(
            f"load_model: {file} is a git-lfs pointer, not the weights; run `git lfs pull` in its directory"
        )
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

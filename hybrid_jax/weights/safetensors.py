"""Safetensors files, memory-mapped: what a directory holds, tensor by tensor.

The library's own reader keeps the pages of tensors that were read, so a model is in memory twice while it loads.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from hybrid_jax.models.headers import Header, read_header
from hybrid_jax.models.weight_files import WeightFiles

ARRAY_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Of codes, their scales and what belongs to them; numpy has no powers of two.
CODE_DTYPES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


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

    def raw(self) -> np.ndarray:
        """As `array`, for codes and their scales, too."""
        return self.data.view((ARRAY_DTYPES | CODE_DTYPES)[self.dtype]).reshape(self.shape)


def read_tensors(files: WeightFiles) -> Iterator[StoredTensor]:
    """Every tensor of some files. Those that are not there, although an index names them, are passed over.

    Where several files have a tensor, it is the one of the file in which the index puts it.
    """
    for file, header in files.headers.items():
        for name, tensor in read_file(file, header).items():
            if files.places.get(name, file) == file:
                yield tensor


def read_file(file: Path, header: Header | None = None) -> dict[str, StoredTensor]:
    """Maps a safetensors file; reads its header too if it is not given."""
    begin, entries = header or read_header(file)
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapping, np.uint8)[begin:]
    return {
        name: StoredTensor(file, name, dtype, shape, data[start:stop], mapping)
        for name, (dtype, shape, start, stop) in entries.items()
    }

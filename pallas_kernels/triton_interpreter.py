"""Arrays of numpy for Triton's interpreter, which takes tensors of torch."""

from __future__ import annotations

import numpy as np


class Tensor:
    """As much of a tensor of torch on a CPU as the interpreter asks for; it reads and writes the array itself."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype.name  # Triton goes by the name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def copy_(self, other: Tensor) -> None:
        """The interpreter copies back what it worked on, here the array itself."""

    def new_empty(self, size: int, device: str) -> Tensor:
        return Tensor(self.array)

    def set_(self, storage: Tensor, offset: int, size, stride) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

"""Shapes and dtypes of arrays, before there are any."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid_jax.config.checks import one_of

FP8 = "float8_e4m3fn"
# Bytes of an element, by dtype.
ITEM_BYTES = {
    **{"float32": 4, "uint32": 4, "int32": 4},
    **{"bfloat16": 2, "float16": 2, "uint16": 2, "int16": 2, "int8": 1, "uint8": 1, FP8: 1},
}


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one device array."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        one_of(self, "dtype", tuple(ITEM_BYTES))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

"""Numbers that follow from a text, the same on every machine and with every version of numpy.

They come from a hash of the text and from operations that IEEE 754 defines to the last bit. So the files that are made
from them can be made again, and only digests of what other libraries say of them are stored.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np


def bits(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """uint16 numbers, all equally likely."""
    raw = hashlib.shake_256(key.encode()).digest(2 * math.prod(shape))
    return np.frombuffer(raw, "<u2").astype(np.uint16).reshape(shape)


def below(key: str, shape: tuple[int, ...], limit: int) -> np.ndarray:
    """Whole numbers from 0 up to `limit`, which divides 65536."""
    return (bits(key, shape) % limit).astype(np.int32)


def even(key: str, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    """float64 between two limits, all equally likely."""
    return low + (high - low) * (bits(key, shape) / 65536.0)


def bell(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 around 0 with deviation 1.15, at most 4 in size: the sum of four even ones."""
    return (bits(key, (*shape, 4)).sum(-1, dtype=np.int64) - 131070) / 32768.0


def order(key: str, count: int) -> np.ndarray:
    """The numbers below `count`, mixed."""
    return np.argsort(bits(key, (count,)), kind="stable")


def digest(array: np.ndarray) -> str:
    """Twelve letters that tell an array from others: of its values in order, the last axis fastest.

    The sign of a zero does not count: libraries differ in it.
    """
    unsigned = np.ascontiguousarray(array) + array.dtype.type(0)
    return hashlib.sha256(unsigned.tobytes()).hexdigest()[:12]

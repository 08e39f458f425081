"""Names of prefixes for marks: 64 bits for the tokens up to each grain boundary."""

from __future__ import annotations

import numpy as np

# Odd numbers, so that products modulo 2**64 lose nothing.
_FACTORS = np.random.default_rng(64).integers(1 << 62, 1 << 63, 32, np.uint64) * 2 + 1
_HALF, _LESS, _LAST = np.uint64(32), np.uint64(29), np.uint64(0x9E3779B97F4A7C15)
_PLACES = np.arange(1, 1 << 16, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)


def prefix_names(tokens: np.ndarray, grain: int) -> np.ndarray:
    """A name for every prefix of `tokens` that ends on a grain boundary.

    Two prefixes have the same name by accident once in 2**64 pairs. So a name may say where to look, and never what a
    prefix holds.

    Args:
        tokens: int32[n].
        grain: tokens between boundaries; even, and at most 64.

    Returns:
        uint64[n // grain], the shortest prefix first.

    Example:
        >>> long, short = np.arange(20, dtype=np.int32), np.arange(9, dtype=np.int32)
        >>> bool(prefix_names(long, 8)[0] == prefix_names(short, 8)[0]), len(prefix_names(long, 8))
        (True, 2)
    """
    count = len(tokens) // grain
    whole = np.ascontiguousarray(tokens[: count * grain], np.int32)
    pairs = whole.view(np.uint64).reshape(count, grain // 2)
    blocks = (pairs ^ (pairs >> _HALF)) @ _FACTORS[: grain // 2]
    blocks ^= _places(count)  # the same block elsewhere is another
    blocks *= _LAST
    blocks ^= blocks >> _LESS
    blocks *= _LAST
    return np.cumsum(blocks)


def _places(count: int) -> np.ndarray:
    """A number for each of the first blocks."""
    if count <= len(_PLACES):
        return _PLACES[:count]
    return np.arange(1, count + 1, dtype=np.uint64) * _PLACES[0]

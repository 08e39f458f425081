"""Sets of token ids as bits: uint32[ceil(V / 32)], bit t % 32 of word t // 32 for token t."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def bits_of(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """The set of the given tokens, without those outside the vocabulary.

    Example:
        >>> bits_of([0, 33, 99], 40).tolist()
        [1, 2]
    """
    ids = np.fromiter(tokens, np.int64)
    return _packed(ids[ids < vocab_size], vocab_size)


def all_bits(vocab_size: int) -> np.ndarray:
    """The set of all tokens.

    Example:
        >>> all_bits(34).tolist()
        [4294967295, 3]
    """
    return _packed(slice(vocab_size), vocab_size)


def _packed(members: np.ndarray | slice, vocab_size: int) -> np.ndarray:
    flags: np.ndarray = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    flags[members] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)

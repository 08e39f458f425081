"""Sets of token ids as bits: uint32[ceil(V / 32)], bit t % 32 of word t // 32 for token t."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def bits_of(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """The set of these tokens; those beyond the vocabulary are left out.

    Example:
        >>> bits_of([0, 33, 99], 40).tolist()
        [1, 2]
    """
    flags = np.zeros(-(-vocab_size // 32) * 32, bool)
    tokens = np.fromiter(tokens, np.int64)
    flags[tokens[tokens < vocab_size]] = True
    return words_of(flags)


def all_bits(vocab_size: int) -> np.ndarray:
    """The set of all tokens.

    Example:
        >>> all_bits(34).tolist()
        [4294967295, 3]
    """
    flags = np.zeros(-(-vocab_size // 32) * 32, bool)
    flags[:vocab_size] = True
    return words_of(flags)


def words_of(flags: np.ndarray) -> np.ndarray:
    """bool[32 n] to uint32[n]."""
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def tokens_of(bits: np.ndarray) -> np.ndarray:
    """The tokens of a set, ascending.

    Example:
        >>> tokens_of(bits_of([33, 0], 40)).tolist()
        [0, 33]
    """
    return np.flatnonzero(np.unpackbits(bits.astype("<u4").view(np.uint8), bitorder="little"))

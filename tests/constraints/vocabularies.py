"""Small tokenizers whose tokens overlap, and what a grammar allows by the definition."""

from __future__ import annotations

import itertools
import re
from os.path import commonprefix

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from hybrid_jax.text.tokenizer import Tokenizer

LETTERS = "ab0"
PAIRS = [("a", "b"), ("b", "a"), ("a", "a"), ("0", "0"), ("b", "0"), ("a", "ab")]
LONGEST = 9  # letters of the longest text that is looked at


def make_tokenizer(pairs=PAIRS, letters: str = LETTERS) -> Tokenizer:
    """Byte-level BPE over a few letters (Ġ is a space); the last id is a special token <eos>."""
    texts = [*letters, *("".join(pair) for pair in pairs)]
    vocab = {text: token for token, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(pairs)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend)


class Language:
    """All texts over the letters that a regular expression matches, up to `LONGEST`."""

    def __init__(self, regex: str) -> None:
        pattern = re.compile(regex)
        texts = (
            "".join(t) for n in range(LONGEST + 1) for t in itertools.product(LETTERS, repeat=n)
        )
        self.texts = {text for text in texts if pattern.fullmatch(text)}
        self.beginnings = {text[:n] for text in self.texts for n in range(len(text) + 1)}

    def allowed(self, text: str, tokens: dict[int, str]) -> set[int]:
        """Tokens after which some text of the language is still possible."""
        return {token for token, piece in tokens.items() if text + piece in self.beginnings}

    def forced(self, text: str) -> str:
        """What any text that goes on from here must go on with."""
        rest = [other[len(text) :] for other in self.texts if other.startswith(text)]
        return commonprefix(rest)


def tokens_of(bits: np.ndarray) -> np.ndarray:
    """The tokens of a set of bits, ascending."""
    return np.flatnonzero(np.unpackbits(bits.astype("<u4").view(np.uint8), bitorder="little"))

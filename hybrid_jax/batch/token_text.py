"""Single tokens as bytes, and where each begins in the text: what the API's logprobs ask for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from hybrid_jax.text.incremental import REPLACEMENT, IncrementalDecoder
from hybrid_jax.text.tokenizer import Tokenizer, byte_alphabet

FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece-like vocabularies name a byte
# How byte-level vocabularies do.
BYTE_LETTERS = {letter: byte for byte, letter in enumerate(byte_alphabet())}


class TokenTexts:
    """What single tokens stand for.

    Args:
        tokenizer: the model's; None when it has none.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def data(self, token: int, text: str | None) -> bytes | None:
        """The bytes of a token whose text alone is `text`; None when they cannot be told.

        A token may be a part of a character; its text then has U+FFFD where its own bytes should be.
        """
        if text is None:
            return None
        if REPLACEMENT not in text:
            return text.encode()
        name = self._tokenizer.backend.id_to_token(token) or ""
        if match := FALLBACK.fullmatch(name):
            return bytes([int(match[1], 16)])
        if all(letter in BYTE_LETTERS for letter in name):
            data = bytes(BYTE_LETTERS[letter] for letter in name)
            if data.decode(errors="replace") == text:
                return data
        return text.encode() if REPLACEMENT in name else None

    def offsets(
        self, prompt: Sequence[int], tokens: Sequence[int], *, skip_special_tokens: bool
    ) -> list[int]:
        """Where each token begins in the text of all of them, in characters.

        The tokens of one character begin at the same place. Zeros without a tokenizer.
        """
        if self._tokenizer is None:
            return [0] * len(tokens)
        decode = partial(self._tokenizer.decode, skip_special_tokens=skip_special_tokens)
        decoder = IncrementalDecoder(decode, prompt)
        offsets, length = [], 0
        for token in tokens:
            offsets.append(length)
            length += len(decoder.push(token))
        return offsets

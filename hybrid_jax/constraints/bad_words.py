"""Words that a completion must not contain, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_jax.text.tokenizer import Tokenizer


def token_sequences(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of a word at the start of a text, and those after a space.

    If one sequence ends with the other, it is left out, because the other one forbids it already.

    Example:
        >>> class Letters:
        ...     def encode(self, text, add_special_tokens):
        ...         return [ord(letter) for letter in text]
        >>> token_sequences("ab", Letters())
        [(97, 98)]
    """
    texts = dict.fromkeys((word, " " + word.lstrip()))
    found = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts}
    shortest_first = sorted(filter(None, found), key=lambda tokens: (len(tokens), tokens))
    kept: list[tuple[int, ...]] = []
    for tokens in shortest_first:
        if not any(tokens[-len(other) :] == other for other in kept):
            kept.append(tokens)
    return kept


class BadWords:
    """Finds the tokens that would complete a forbidden sequence of two or more tokens.

    Args:
        sequences: of token ids.

    Example:
        >>> BadWords([(1, 2, 3), (2, 4), (7, 7)]).completing([9, 1, 2])
        [3, 4]
    """

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        # By the token before the last, so that a step looks at few sequences.
        self._by_last: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *begin, end in sequences:
            self._by_last.setdefault(begin[-1], []).append((tuple(begin), end))

    def completing(self, output: Sequence[int]) -> list[int]:
        """The tokens that may not come next."""
        if not output:
            return []
        near = self._by_last.get(output[-1], ())
        return [end for begin, end in near if tuple(output[-len(begin) :]) == begin]

"""The tokens that may come next in one completion, by what it has so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from hybrid_jax.text.tokenizer import Tokenizer


def bits_of(tokens: Iterable[int] | None, vocab_size: int) -> np.ndarray:
    """A set of tokens as uint32[ceil(V / 32)]: bit t % 32 of word t // 32 stands for token t.

    Args:
        tokens: the set, of which those outside the vocabulary are left out; None for all tokens.
        vocab_size: of the model.

    Example:
        >>> bits_of([0, 33, 99], 40).tolist(), bits_of(None, 34).tolist()
        ([1, 2], [4294967295, 3])
    """
    flags: np.ndarray = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    if tokens is None:
        flags[:vocab_size] = True
    else:
        ids = np.fromiter(tokens, np.int64)
        flags[ids[ids < vocab_size]] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


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


class Form(Protocol):
    """Where one text stands in the form that it must have: `GrammarState`, or `AfterThoughts` around it."""

    def restart(self) -> None:
        """Back to the start."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""

    def allowed(self) -> tuple[np.ndarray, bool, str | None]:
        """uint32[ceil(V / 32)] of the tokens that continue the text, whether it may end here, and what failed."""


class BadWords:
    """Finds the tokens that would complete a forbidden sequence of two or more tokens.

    Args:
        sequences: of token ids.

    Example:
        >>> BadWords([(1, 2, 3), (2, 4), (7, 7)]).completing([9, 1, 2])
        [3, 4]
    """

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        # By what comes before the last token, so that a step looks at no more than one beginning of each length.
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for *begin, end in sequences:
            self._ends.setdefault(tuple(begin), []).append(end)
        self._lengths = sorted({len(begin) for begin in self._ends}, reverse=True)

    def completing(self, output: Sequence[int]) -> list[int]:
        """The tokens that may not come next."""
        return [
            end
            for length in self._lengths
            if length <= len(output)
            for end in self._ends.get(tuple(output[-length:]), ())
        ]


class TokenConstraint:
    """A grammar, forbidden sequences, or both, over the output of one completion; the engine's `Constraint`.

    Args:
        vocab_size: of the model.
        drawable: uint32[ceil(V / 32)] tokens that the other parameters allow.
        end_ids: the model's own stop ids, unless they are ignored. They are not part of the text.
        stop_ids: these and the caller's.
        min_tokens: before so many tokens no stop id may come.
        grammar, bad_words: each may be None.

    Attributes:
        stuck: why no token may come although the text is not complete; for the output of the last call of `mask`.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        drawable: np.ndarray,
        end_ids: frozenset[int] = frozenset(),
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        grammar: Form | None = None,
        bad_words: BadWords | None = None,
    ) -> None:
        self.stuck: str | None = None
        self._vocab_size, self._drawable = vocab_size, drawable
        self._stop_ids, self._min_tokens = stop_ids, min_tokens
        self._ends, self._stops = bits_of(end_ids, vocab_size), bits_of(stop_ids, vocab_size)
        self._grammar, self._bad_words = grammar, bad_words
        self._consumed: list[int] | None = None  # None: start over, since a call has failed
        self._answer = np.zeros_like(drawable)

    def mask(self, output: Sequence[int]) -> np.ndarray:
        """uint32[ceil(V / 32)] of the tokens that may follow; all zeros if none may.

        It is fast if `output` continues that of the call before, and immediate if it is the same.
        """
        output = list(output)
        consumed, self._consumed = self._consumed, None
        if consumed != output:
            self._follow(consumed, output)
            self._answer = self._allowed(output)
            self._answer.flags.writeable = False
        self._consumed = output
        return self._answer

    def _follow(self, consumed: list[int] | None, output: list[int]) -> None:
        if self._grammar is None:
            return
        if consumed is None or output[: len(consumed)] != consumed:
            self._grammar.restart()
            consumed = []
        text = output[len(consumed) :]
        if self._ended(output):
            text = text[:-1]
        self._grammar.advance(text)

    def _ended(self, output: list[int]) -> bool:
        return bool(output) and output[-1] in self._stop_ids

    def _allowed(self, output: list[int]) -> np.ndarray:
        self.stuck = None
        nothing = np.zeros_like(self._drawable)
        if self._ended(output):
            return nothing
        drawable, complete, early = self._drawable.copy(), False, len(output) < self._min_tokens
        if self._bad_words is not None:
            drawable &= ~bits_of(self._bad_words.completing(output), self._vocab_size)
        if early:
            drawable &= ~self._stops
        allowed = drawable
        if self._grammar is not None:
            text, complete, failure = self._grammar.allowed()
            allowed = drawable & text & ~self._ends
            if failure is not None:
                self.stuck = failure
                return nothing
        if not allowed.any():
            self.stuck = None if complete else "no token that may come next is allowed"
            return nothing
        return allowed | (drawable & self._stops) if complete else allowed

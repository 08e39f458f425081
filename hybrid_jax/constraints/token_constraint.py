"""The tokens that may come next in one completion, by what it has so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_jax.constraints.bad_words import BadWords
from hybrid_jax.constraints.grammar import GrammarState
from hybrid_jax.constraints.token_bits import bits_of


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
        grammar: GrammarState | None = None,
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

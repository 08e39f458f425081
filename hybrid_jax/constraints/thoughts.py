"""A grammar that begins after the thoughts of a model that thinks first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from hybrid_jax.constraints.grammar import GrammarState
from hybrid_jax.constraints.token_constraint import bits_of
from hybrid_jax.text.incremental import IncrementalDecoder
from hybrid_jax.text.thoughts import Thoughts
from hybrid_jax.text.tokenizer import Tokenizer

MOST_GAPS = 2  # tokens of white space between the thoughts and the form
GAPS = ("\n", "\n\n", "\r\n", " ")


class Part(Enum):
    """Where a text stands. `OPENING`: it has the first tokens of a mark that opens thoughts, and the rest must come."""

    START = "start"
    OPENING = "opening"
    THOUGHTS = "thoughts"
    GAP = "gap"
    FORM = "form"


@dataclass(frozen=True, kw_only=True)
class TokenMarks:
    """The marks of thoughts as tokens of one model.

    Attributes:
        open, close: their texts.
        open_ids: the tokens that open thoughts.
        close_ids: those that close them. If there is one, the thoughts end at that token. If there are several, the
            thoughts end where the text has the mark.
        gap_ids: tokens of white space that may come between thoughts and form.
        crossing: for each number of characters of `close` that the text ends with, uint32[ceil(V / 32)] of the tokens
            that complete it and go on with something other than white space.
    """

    open: str
    close: str
    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    gap_ids: frozenset[int]
    crossing: tuple[np.ndarray, ...]


def token_marks(thoughts: Thoughts, tokenizer: Tokenizer, vocab_size: int) -> TokenMarks:
    """What the marks of thoughts are for one model."""
    close_ids = _ids(thoughts.close, tokenizer)
    gaps = {token for gap in GAPS for token in _ids(gap, tokenizer)}
    crossing = () if len(close_ids) == 1 else _crossing(thoughts.close, tokenizer, vocab_size)
    return TokenMarks(
        open=thoughts.open,
        close=thoughts.close,
        open_ids=_ids(thoughts.open, tokenizer),
        close_ids=close_ids,
        gap_ids=frozenset(token for token in gaps if _text(token, tokenizer).isspace()),
        crossing=crossing,
    )


def _ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    token = tokenizer.backend.token_to_id(text)
    if token is not None:
        return (token,)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _text(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def _crossing(mark: str, tokenizer: Tokenizer, vocab_size: int) -> tuple[np.ndarray, ...]:
    """See `TokenMarks.crossing`."""
    found: list[list[int]] = [[] for _ in mark]
    for token in range(vocab_size):
        if mark[-1] not in tokenizer.token_name(token):
            continue
        text = _text(token, tokenizer)
        for count, tokens in enumerate(found):
            begin = mark[:count]
            end = (begin + text).find(mark) + len(mark)
            if end >= len(mark) and (begin + text)[end:].strip():
                tokens.append(token)
    return tuple(bits_of(tokens, vocab_size) for tokens in found)


class AfterThoughts:
    """Thoughts, and then a grammar: where one text stands. It has the methods of `GrammarState`.

    All tokens are allowed in thoughts, except those that would begin the form in the middle of a token. The thoughts do
    not limit where the text may end: it may end where the grammar is complete.

    Args:
        grammar: at its start.
        marks: of the thoughts.
        opened: the prompt has opened the thoughts. Otherwise the text may begin with them, or with the form.
        tokenizer: of the model.
        vocab_size: of the model.
    """

    def __init__(
        self,
        grammar: GrammarState,
        marks: TokenMarks,
        *,
        opened: bool,
        tokenizer: Tokenizer,
        vocab_size: int,
    ) -> None:
        self._grammar, self._marks, self._opened = grammar, marks, opened
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._all = bits_of(None, vocab_size)
        self._gaps = bits_of(marks.gap_ids, vocab_size)
        self.restart()

    def restart(self) -> None:
        """Back to the start."""
        self._grammar.restart()
        self._part, self._num_open, self._num_gaps = Part.START, 0, 0
        if self._opened:
            self._think()

    def _think(self) -> None:
        self._part, self._tail = Part.THOUGHTS, self._marks.open
        self._decoder = IncrementalDecoder(
            lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False)
        )

    def advance(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        for index, token in enumerate(tokens):
            if self._part is Part.FORM:
                self._grammar.advance(tokens[index:])
                return
            self._take(token)

    def _take(self, token: int) -> None:
        marks = self._marks
        if self._part is Part.THOUGHTS:
            if self._closes(token):
                self._part = Part.GAP
        elif self._part is Part.GAP and self._may_be_gap and token in marks.gap_ids:
            self._num_gaps += 1
        elif self._part is Part.OPENING or (self._part is Part.START and self._opens(token)):
            self._num_open += 1
            self._part = Part.OPENING
            if self._num_open == len(marks.open_ids):
                self._think()
        else:
            self._part = Part.FORM
            self._grammar.advance([token])

    def _closes(self, token: int) -> bool:
        """Whether the thoughts end with this token."""
        close = self._marks.close
        if len(self._marks.close_ids) == 1:
            return token == self._marks.close_ids[0]
        text = self._tail + self._decoder.push(token)
        self._tail = text[-len(close) + 1 :]
        return close in text

    @property
    def _form(self) -> np.ndarray:
        return self._grammar.allowed()[0]

    def _opens(self, token: int) -> bool:
        """Whether a first token opens thoughts. If the form may begin with it too, it begins the form."""
        return token == self._marks.open_ids[0] and not _has(self._form, token)

    @property
    def _may_be_gap(self) -> bool:
        """Whether white space may come before the form. If the form may begin with it, it is the form's."""
        return self._num_gaps < MOST_GAPS and not (self._form & self._gaps).any()

    def allowed(self) -> tuple[np.ndarray, bool, str | None]:
        """As `GrammarState.allowed`."""
        marks = self._marks
        if self._part is Part.OPENING:
            return bits_of([marks.open_ids[self._num_open]], self._vocab_size), False, None
        if self._part is Part.THOUGHTS:
            return self._all & ~self._crossing(), False, None
        form, complete, failure = self._grammar.allowed()
        if failure is None and self._part is Part.START:
            form = form | bits_of(marks.open_ids[:1], self._vocab_size)
        if failure is None and self._part is Part.GAP and self._may_be_gap:
            form = form | self._gaps
        return form, complete, failure

    def _crossing(self) -> np.ndarray:
        """Tokens that would end the thoughts and begin the form at once."""
        found = np.zeros_like(self._all)
        for count, tokens in enumerate(self._marks.crossing):
            if self._tail.endswith(self._marks.close[:count]):
                found |= tokens
        return found


def _has(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> np.uint32(token % 32) & 1)

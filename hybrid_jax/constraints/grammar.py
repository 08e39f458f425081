"""Grammars over token ids, by llguidance (the extra `structured`)."""

from __future__ import annotations

import functools
import json
import re
import reprlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from hybrid_jax.config.structured_outputs import StructuredOutputsParams
from hybrid_jax.constraints.bounds import TRIED, UNTRIED, TooLarge, check_bounds
from hybrid_jax.constraints.kept import (
    BYTES_PER_CHARACTER,
    Kept,
    Recent,
    Shelf,
    digest_of,
    token_bytes_of,
)
from hybrid_jax.constraints.patterns import portable
from hybrid_jax.constraints.refusals import in_another_notation, in_our_words, shortened
from hybrid_jax.constraints.schemas.in_lark import followed_inside
from hybrid_jax.constraints.schemas.optional_properties import ROW_ITEMS
from hybrid_jax.constraints.schemas.walk import followed
from hybrid_jax.constraints.stack import with_large_stack
from hybrid_jax.constraints.trial import NoTrial, Trial
from hybrid_jax.text.tokenizer import Tokenizer
from hybrid_jax.text.tokenizer_bounds import without_panic

INSTALL = "pip install 'hybrid_jax[structured]'"
END = "<|end of the grammar|>"
# Before 1.8, llguidance repeats white space without limit, and before 1.7.6 it ends some constants too early.
OLDEST = (1, 9)
KNOWN_FORMS = 4096  # of which is kept that they were refused, or announced
MAX_IDS = 1 << 22  # of a tokenizer; for each one llguidance has an entry, and each mask a bit
# Of a grammar, and of each step that follows it; llguidance's own defaults. Beyond them a text ends with "abort".
LIMITS: dict[str, int | bool] = {
    "max_items_in_row": ROW_ITEMS,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 250_000,  # of 1 to 3 kB each, of all texts that share a compiled grammar
    "max_grammar_size": 500_000,
}
TOO_MANY_STATES = "too many states"  # what llguidance says when texts have used up max_lexer_states


# How each kind of form becomes a grammar in llguidance's own notation, from LLMatcher and the form's value.
SOURCES: dict[str, Callable[[Any, Any], str]] = {
    "json": lambda matcher, schema: matcher.grammar_from_json_schema(followed(schema)),
    "regex": lambda matcher, text: matcher.grammar_from_regex(portable(text, ecma=False)),
    "choice": lambda matcher, texts: matcher.grammar_from_regex("|".join(map(re.escape, texts))),
    "grammar": lambda matcher, text: matcher.grammar_from_lark(followed_inside(text)),
    "json_object": lambda matcher, _: matcher.grammar_from_json_schema(
        followed(json.dumps({"type": "object"}))
    ),
}


class Grammars:
    """Compiles grammars for one tokenizer and keeps those used last, as `Shelf` says. Threads may share it.

    Args:
        tokenizer: of the model.
        vocab_size: tokens for which the model gives logits. Those without a text are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._shelf = Shelf()
        self._turns: weakref.WeakValueDictionary[StructuredOutputsParams, _Turn] = (
            weakref.WeakValueDictionary()
        )
        self._refused: Recent[str] = Recent(KNOWN_FORMS)
        self._foreseen: Recent[bool] = Recent(KNOWN_FORMS)
        self._reading = threading.Lock()
        self._ahead: deque[StructuredOutputsParams] = deque()
        self._looks_ahead = False  # a thread does
        self._looking = threading.Lock()

    def state(self, wanted: StructuredOutputsParams) -> GrammarState:
        """A grammar at its start. It is compiled unless it was kept. Calls for another grammar do not wait.

        Raises:
            ValueError: the grammar is wrong or not supported, it takes too much to compile, or llguidance is not
                installed or cannot read the tokenizer.
        """
        kept = self._kept(wanted)
        return GrammarState(kept, -(-self._vocab_size // 32), functools.partial(self._anew, wanted))

    def has(self, wanted: StructuredOutputsParams) -> bool:
        """Whether `state` returns or raises at once, because the grammar or its refusal is kept."""
        is_kept = self._shelf.get(wanted) is not None
        return is_kept or self._refused.get(digest_of(wanted)) is not None

    def _kept(self, wanted: StructuredOutputsParams) -> Kept:
        kept = self._shelf.get(wanted)
        if kept is None:
            with self._looking:
                turn = self._turns.setdefault(wanted, _Turn())
            with turn.lock:
                kept = self._shelf.get(wanted)
                if kept is None:
                    try:
                        kept = self._compile(wanted)
                    except RuntimeError as error:
                        raise ValueError(
                            f"structured_outputs: no thread can be started to compile a form ({error}); "
                            "end other threads"
                        ) from error
                    self._shelf.put(wanted, kept)
        return kept

    def _anew(self, wanted: StructuredOutputsParams, spent: Kept) -> Kept:
        """A grammar in place of one whose lexer is full."""
        self._shelf.drop(wanted, spent)
        return self._kept(wanted)

    def foresee(self, wanted: StructuredOutputsParams) -> None:
        """Has a grammar tried that will be needed. Returns at once; a later call for it waits less, or not at all."""
        if not self._foreseen.note(digest_of(wanted), True):
            return
        with self._looking:
            self._ahead.append(wanted)
            if self._looks_ahead:
                return
            self._looks_ahead = True
        threading.Thread(target=self._look_ahead, name="hybrid_jax forms", daemon=True).start()

    def _look_ahead(self) -> None:
        """Tries what was foreseen, until nothing is left."""
        while True:
            with self._looking:
                if not self._ahead:
                    self._looks_ahead = False
                    return
                wanted = self._ahead.popleft()
            with suppress(Exception):  # it shows when the form is asked for
                self._tried(wanted)

    def close(self) -> None:
        """Ends the process that tries grammars, unless others use it."""
        with self._looking:
            self._ahead.clear()
        with self._reading:
            opened = self.__dict__.get("_opened")
        if opened is not None:
            opened.trial.close()

    def _vocabulary(self) -> _Vocabulary:
        with self._reading:
            return self._opened

    @functools.cached_property
    def _opened(self) -> _Vocabulary:
        return _read_vocabulary(_llguidance(), self._tokenizer, self._vocab_size)

    def _compile(self, wanted: StructuredOutputsParams) -> Kept:
        library, source = _llguidance(), self._tried(wanted)
        vocabulary = self._vocabulary()
        start = with_large_stack(lambda: _matcher(library, vocabulary, source))
        if start.is_error():
            raise self._refusal(wanted, self._in_our_words(wanted, start.get_error()))
        return Kept(
            start,
            vocabulary.end,
            source_bytes=len(source) * BYTES_PER_CHARACTER[wanted.kind],
            token_bytes=token_bytes_of(wanted),
        )

    def _tried(self, wanted: StructuredOutputsParams) -> str:
        """A grammar in llguidance's own notation that can be compiled here. ValueError if it cannot."""
        library = _llguidance()
        known = self._refused.get(digest_of(wanted))
        if known is not None:
            raise ValueError(known)
        try:
            check_bounds(wanted, TRIED)
            source = with_large_stack(lambda: _source(library.LLMatcher, wanted))
        except ValueError as error:
            raise self._refusal(wanted, str(error)) from error
        try:
            refused = self._vocabulary().trial.refusal(source)
        except NoTrial:
            too_large = _untried(wanted)
            if too_large is not None:
                raise self._refusal(wanted, too_large) from None
            return source
        if refused is not None:
            raise self._refusal(wanted, self._in_our_words(wanted, refused))
        return source

    def _in_our_words(self, wanted: StructuredOutputsParams, message: str) -> str:
        return with_large_stack(lambda: in_our_words(wanted, message, self._asked))

    def _asked(self, schema: str) -> str | None:
        """What llguidance says of a part of a JSON schema alone; None if it compiles."""
        library, vocabulary = _llguidance(), self._vocabulary()
        source = library.LLMatcher.grammar_from_json_schema(schema)
        try:
            return vocabulary.trial.refusal(source)
        except NoTrial:  # the whole was small, and has been compiled here
            return with_large_stack(lambda: _error_of(library, vocabulary, source))

    def _refusal(self, wanted: StructuredOutputsParams, message: str) -> ValueError:
        """Why a form cannot be followed, and what to do, which is kept for whoever asks for it again."""
        text = (
            f"structured_outputs.{wanted.kind} {reprlib.repr(wanted.value)} cannot be followed: "
            f"{in_another_notation(wanted) or message}"
        )
        self._refused.note(digest_of(wanted), text)
        return ValueError(text)


class _Turn:
    """Who has the lock compiles a form; others that ask for it wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@dataclass(frozen=True)
class _Vocabulary:
    """A tokenizer as llguidance reads it, the id of END, and what tries grammars with both."""

    tokens: Any
    end: int
    trial: Trial


class GrammarState:
    """Where one text stands in its grammar.

    Args:
        kept: the grammar, at its start.
        num_words: ceil(V / 32).
        anew: compiles the grammar again in place of one whose lexer is full. All texts that share a grammar fill it,
            and what they did must not end this one.
    """

    def __init__(self, kept: Kept, num_words: int, anew: Callable[[Kept], Kept]) -> None:
        self._kept, self._num_words, self._anew = kept, num_words, anew
        self._num_own = 0  # tokens that this text has added to the grammar's
        self.restart()

    def restart(self) -> None:
        """Back to the start."""
        self._text: list[int] = []
        self._failure: str | None = None
        self._matcher = self._kept.start.deep_copy()

    def advance(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        if tokens and not self._failed():
            self._text += tokens
            self._consume(self._text[-len(tokens) :])
            self._failed()

    def _consume(self, tokens: list[int]) -> None:
        self._kept.num_tokens += len(tokens)
        self._num_own += len(tokens)
        self._matcher.consume_tokens(tokens)

    def allowed(self) -> tuple[np.ndarray, bool, str | None]:
        """uint32[ceil(V / 32)] of the tokens that continue the text, whether it may end here, and what failed, or None.

        It fails if the text has left the grammar, or if following the grammar costs too much. Tokens outside the
        model's vocabulary may be among those returned, because the tokenizer may know more of them.
        """
        words: np.ndarray | None = None
        while words is None and not self._failed():
            words = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
            if self._matcher.is_error():
                words = None
        if words is None:
            return np.zeros(self._num_words, np.uint32), False, self._failure
        words = words.copy()  # at least as many as the model's
        word, end = self._kept.end // 32, np.uint32(1 << self._kept.end % 32)
        may_end = bool(words[word] & end)
        words[word] &= ~end
        return words[: self._num_words], may_end, None

    def _failed(self) -> bool:
        while self._failure is None and self._matcher.is_error():
            error = self._matcher.get_error()
            if TOO_MANY_STATES in error and self._num_own < self._kept.num_tokens:
                self._begin_anew()
            else:
                self._failure = shortened(error)
        return self._failure is not None

    def _begin_anew(self) -> None:
        """The same text in a grammar whose lexer has room."""
        try:
            self._kept, self._num_own = self._anew(self._kept), 0
        except ValueError as error:
            self._failure = shortened(str(error))
            return
        self._matcher = self._kept.start.deep_copy()
        if self._text:
            self._consume(self._text)


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ValueError(f"structured outputs need llguidance; {INSTALL}") from error
    if tuple(map(int, re.findall(r"\d+", llguidance.__version__)[:2])) < OLDEST:
        raise ValueError(
            f"structured outputs need llguidance {'.'.join(map(str, OLDEST))} or newer, "
            f"{llguidance.__version__} is installed; {INSTALL} --upgrade"
        )
    return llguidance


def _read_vocabulary(library: Any, tokenizer: Tokenizer, vocab_size: int) -> _Vocabulary:
    """The tokenizer with one more token that means the end and nothing else.

    The model's stop ids cannot be used for that: a model may have none, or use an ordinary token as one.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    known = set(backend.get_vocab(with_added_tokens=True).values())
    try:
        if max(known) >= MAX_IDS:
            raise ValueError(f"it has the id {max(known)}, the limit is {MAX_IDS}")
        backend.add_special_tokens([END])
        end = backend.token_to_id(END)
        if end is None or end in known:
            raise ValueError(f"its ids have gaps, so {end} came twice")
        most, text = max(vocab_size, max(known) + 1, end + 1), backend.to_str()
        trial = Trial(library, text, vocab_size=most, end=end, limits=LIMITS)
        with suppress(NoTrial):  # then forms are refused that need one
            trial.start()  # it reads the tokenizer while this process does
        tokens = without_panic(lambda: library.LLTokenizer(text, n_vocab=most, eos_token=end))
        return _Vocabulary(tokens, end, trial)
    except ValueError as error:
        raise ValueError(
            f"structured_outputs: llguidance cannot use this model's tokenizer.json: "
            f"{shortened(str(error))}; use free text with this model"
        ) from error


def _untried(wanted: StructuredOutputsParams) -> str | None:
    """Why a form is too large for a machine on which none can be tried; None if it is not."""
    try:
        check_bounds(wanted, UNTRIED)
    except TooLarge as error:
        return f"{error.what} where no other process can try it; {error.remedy}"
    return None


def _matcher(library: Any, vocabulary: _Vocabulary, source: str) -> Any:
    """A compiled grammar, or its error."""
    limits = library.LLParserLimits(**LIMITS)
    return library.LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits)


def _error_of(library: Any, vocabulary: _Vocabulary, source: str) -> str | None:
    matcher = _matcher(library, vocabulary, source)
    return matcher.get_error() if matcher.is_error() else None


def _source(matcher: Any, wanted: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own notation."""
    return SOURCES[wanted.kind](matcher, wanted.value)

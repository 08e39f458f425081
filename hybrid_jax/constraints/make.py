"""Turns sampling parameters into limits on the tokens of each completion, and checks them before anything runs."""

from __future__ import annotations

import functools
import reprlib
from dataclasses import dataclass

import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.constraints.grammar import Grammars, GrammarState
from hybrid_jax.constraints.thoughts import AfterThoughts, TokenMarks, token_marks
from hybrid_jax.constraints.token_constraint import (
    BadWords,
    Form,
    TokenConstraint,
    bits_of,
    token_sequences,
)
from hybrid_jax.text.thoughts import MARKS, Thoughts, first_named
from hybrid_jax.text.tokenizer import Tokenizer

TOKENIZER = "a tokenizer, which this model lacks; put a tokenizer.json beside its config.json"


@dataclass(frozen=True, kw_only=True)
class TokenLimits:
    """What limits the tokens of a prompt's completions.

    Attributes:
        forbidden_ids: tokens that are never drawn.
        constraints: one for each completion, since each follows a text of its own. Empty if there are none.
    """

    forbidden_ids: frozenset[int] = frozenset()
    constraints: tuple[TokenConstraint, ...] = ()


class Constraints:
    """Makes the limits of each prompt, and keeps compiled grammars.

    Args:
        tokenizer: of the model; None if it came without one.
        config: of the model.
    """

    def __init__(self, tokenizer: Tokenizer | None, config: ModelConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._grammars = None if tokenizer is None else Grammars(tokenizer, config.vocab_size)
        self._marks: dict[tuple[str, str], TokenMarks] = {}

    def limits(
        self,
        index: int,
        params: SamplingParams,
        stop_ids: frozenset[int],
        thoughts: Thoughts | None = None,
    ) -> TokenLimits:
        """The limits on the tokens of one prompt's completions.

        Args:
            index: of the prompt, for messages.
            params: of the prompt.
            stop_ids: ids that end the completions, with the model's own unless they are ignored.
            thoughts: those that come before the answer, as the prompt says.

        Raises:
            ValueError: a grammar is wrong or not supported, parameters contradict each other, or the tokenizer or
                llguidance is missing.
        """
        _check_token_ids(index, params, self._config.vocab_size)
        sequences = self._bad_sequences(index, params)
        forbidden = frozenset(tokens[0] for tokens in sequences if len(tokens) == 1)
        longer = [tokens for tokens in sequences if len(tokens) > 1]
        plain = not longer and params.structured_outputs is None
        if plain and params.allowed_token_ids is None:  # most; no sets of the whole vocabulary
            return TokenLimits(forbidden_ids=forbidden)
        drawable = self._drawable(index, params, forbidden, stop_ids)
        if plain:
            return TokenLimits(forbidden_ids=forbidden)
        make = functools.partial(
            TokenConstraint,
            self._config.vocab_size,
            drawable=drawable,
            end_ids=stop_ids & set(() if params.ignore_eos else self._config.eos_token_ids),
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
            bad_words=BadWords(longer) if longer else None,
        )
        thoughts = self._before(index, params, thoughts, drawable)
        constraints = tuple(
            make(grammar=self._after(thoughts, self._grammar(index, params)))
            for _ in range(params.n)
        )
        start = constraints[0] if thoughts is None else make(grammar=self._grammar(index, params))
        if not start.mask([]).any():
            raise ValueError(
                f"prompt {index}: {_what(params)} lets no token come first{_together(params)}; "
                "allow a token that can begin it, or give it a text that is not empty"
            )
        return TokenLimits(forbidden_ids=forbidden, constraints=constraints)

    def must_try(self, params: SamplingParams) -> bool:
        """Whether `limits` waits until the form of these parameters has been tried and compiled."""
        wanted, known = params.structured_outputs, self._grammars
        return wanted is not None and known is not None and not known.has(wanted.form)

    def foresee(self, params: SamplingParams) -> None:
        """Announces a prompt with these parameters, and returns at once. Its form is tried in the background."""
        if params.structured_outputs is not None and self._grammars is not None:
            self._grammars.foresee(params.structured_outputs.form)

    def close(self) -> None:
        """Ends the process that tries forms, unless others use it."""
        if self._grammars is not None:
            self._grammars.close()

    def _bad_sequences(self, index: int, params: SamplingParams) -> list[tuple[int, ...]]:
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise ValueError(f"prompt {index}: bad_words need {TOKENIZER}")
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            sequences = token_sequences(word, self._tokenizer)
            size = self._config.vocab_size
            sequences = [tokens for tokens in sequences if max(tokens) < size]
            if not sequences:
                raise ValueError(
                    f"prompt {index}: bad_words has {reprlib.repr(word)}, for which this model's "
                    "tokenizer has no tokens that the model can draw; leave it out"
                )
            found |= dict.fromkeys(sequences)
        return list(found)

    def _drawable(
        self,
        index: int,
        params: SamplingParams,
        forbidden: frozenset[int],
        stop_ids: frozenset[int],
    ) -> np.ndarray:
        """uint32[ceil(V / 32)] of the tokens that may come at all. One of them must be possible at the start."""
        size, allowed = self._config.vocab_size, params.allowed_token_ids
        drawable = bits_of(allowed, size) & ~bits_of(forbidden, size)
        late = bits_of(stop_ids if params.min_tokens else (), size)
        if allowed is not None and not (drawable & ~late).any():
            raise ValueError(
                f"prompt {index}: nothing may come first{_together(params)}; change one of them"
            )
        return drawable

    def _before(
        self,
        index: int,
        params: SamplingParams,
        thoughts: Thoughts | None,
        drawable: np.ndarray,
    ) -> Thoughts | None:
        """The thoughts after which the form begins; None if it begins at once.

        Args:
            index, params, thoughts: as in `limits`. drawable: as in `TokenConstraint`.
        """
        wanted = params.structured_outputs
        if wanted is None or wanted.after_thoughts is False or self._tokenizer is None:
            return None
        if thoughts is None and wanted.after_thoughts:
            thoughts = self._of_model()
            if thoughts is None:
                raise ValueError(
                    f"prompt {index}: structured_outputs.after_thoughts=True needs marks of thoughts, such as "
                    f"{MARKS[0][0]}, but neither the prompt nor the model's chat template has any; leave it out"
                )
        if thoughts is None:
            return None
        marks, size = self._marks_of(thoughts), self._config.vocab_size
        needed = marks.close_ids + marks.open_ids * (not thoughts.opened)
        if max(needed) >= size or (bits_of(needed, size) & ~drawable).any():
            if thoughts.opened:
                raise ValueError(
                    f"prompt {index}: it opens thoughts with {thoughts.open}, and {thoughts.close} may not come"
                    f"{_together(params)}; allow it, or set structured_outputs.after_thoughts=False"
                )
            return None
        return thoughts

    def _of_model(self) -> Thoughts | None:
        """Thoughts as the model's chat templates or its vocabulary have them."""
        assert self._tokenizer is not None, "there are grammars"
        found = first_named("\n".join(self._tokenizer.chat_templates.values()))
        if found is not None:
            return found
        known = self._tokenizer.backend.token_to_id
        return next(
            (
                Thoughts(open=opens, close=closes, opened=False)
                for opens, closes in MARKS
                if None not in (known(opens), known(closes))
            ),
            None,
        )

    def _marks_of(self, thoughts: Thoughts) -> TokenMarks:
        assert self._tokenizer is not None, "there are grammars"
        key = thoughts.open, thoughts.close
        if key not in self._marks:
            self._marks[key] = token_marks(thoughts, self._tokenizer, self._config.vocab_size)
        return self._marks[key]

    def _after(self, thoughts: Thoughts | None, grammar: GrammarState | None) -> Form | None:
        if thoughts is None or grammar is None:
            return grammar
        assert self._tokenizer is not None, "there are grammars"
        return AfterThoughts(
            grammar,
            self._marks_of(thoughts),
            opened=thoughts.opened,
            tokenizer=self._tokenizer,
            vocab_size=self._config.vocab_size,
        )

    def _grammar(self, index: int, params: SamplingParams) -> GrammarState | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise ValueError(f"prompt {index}: structured_outputs need {TOKENIZER}")
        try:
            return self._grammars.state(params.structured_outputs.form)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error


def _check_token_ids(index: int, params: SamplingParams, vocab_size: int) -> None:
    """ValueError if a parameter names a token outside the vocabulary."""
    named = {
        "stop_token_ids": params.stop_token_ids or (),
        "logit_bias": dict(params.logit_bias or ()),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, tokens in named.items():
        wrong = next((token for token in tokens if token >= vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"prompt {index}: {name} must name token ids below the vocabulary's {vocab_size}, "
                f"got {reprlib.repr(wrong)}"
            )


def _together(params: SamplingParams) -> str:
    """The parameters that limit tokens in the whole text, in words."""
    names = ("allowed_token_ids", "bad_words", "min_tokens")
    given = [
        f"{name}={reprlib.repr(getattr(params, name))}" for name in names if getattr(params, name)
    ]
    return f" with {' and '.join(given)}" if given else ""


def _what(params: SamplingParams) -> str:
    wanted = params.structured_outputs
    if wanted is None:
        return f"bad_words {reprlib.repr(params.bad_words)}"
    return f"structured_outputs.{wanted.kind} {reprlib.repr(wanted.value)}"

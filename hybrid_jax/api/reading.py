"""What is read of prompts in place of new tokens: how likely tokens are, and hidden states; and the calls for it."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args, overload

import numpy as np

from hybrid_jax.api.arguments import checks_arguments
from hybrid_jax.api.completions import Job
from hybrid_jax.api.intake import Errors, Intake
from hybrid_jax.api.progress_bar import ProgressOption
from hybrid_jax.api.threads import questions
from hybrid_jax.api.threads.front import Front
from hybrid_jax.config import ModelConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.geometry import PROMPT_POSITIONS
from hybrid_jax.schedule.request import Pooling
from hybrid_jax.text.prompts import (
    Prompt,
    Prompts,
    check_length,
    check_unicode,
    listed_prompts,
    read_prompt,
    read_prompts,
)
from hybrid_jax.text.tokenizer import Tokenizer

# After which tokens of a prompt the next one is asked for.
Positions = Literal["last", "all"]


@dataclass(frozen=True, kw_only=True)
class Score:
    """How likely a continuation is after its prompt. Made by `LLM.score`.

    Attributes:
        token_ids: the tokens of the continuation.
        token_logprobs: the natural logarithm of the probability of each, from the model's own logits, without a
            temperature.
        ranks: the place of each among all tokens, by likelihood; 1 for the likeliest. Of equally likely ones the
            lower id comes first.

    Example:
        >>> score = Score(token_ids=(7, 8), token_logprobs=(-1.5, -0.5), ranks=(3, 1))
        >>> score.logprob, score.is_greedy
        (-2.0, False)
        >>> score
        Score(logprob=-2.0, token_ids=(7, 8), token_logprobs=(-1.5, -0.5), ranks=(3, 1))
    """

    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    ranks: tuple[int, ...]

    def __repr__(self) -> str:
        shown = {"logprob": self.logprob, **vars(self)}
        return f"Score({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def logprob(self) -> float:
        """The logarithm of the probability of the whole continuation: the sum over its tokens."""
        return sum(self.token_logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have written the continuation: each token was the likeliest."""
        return all(rank == 1 for rank in self.ranks)


class Pair(NamedTuple):
    """A prompt with its continuation.

    Attributes:
        whole: both together.
        first: how many tokens come before the continuation.
    """

    whole: Prompt
    first: int


def read_pairs(
    prompts: Prompts,
    continuations: Prompts,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    longest: int,
) -> list[Pair | Exception]:
    """Pairs prompts with continuations, one with one, or one with all; see `LLM.score`.

    In place of a pair of which one is empty or malformed there is a ValueError.

    Raises:
        ValueError: there are not as many of both.
    """
    firsts, seconds = _listed("prompts", prompts), _listed("continuations", continuations)
    if len(firsts) != len(seconds) and 1 not in (len(firsts), len(seconds)):
        raise ValueError(
            f"score: {len(firsts)} prompts and {len(seconds)} continuations do not pair; give as many of both, "
            "or one of either"
        )
    read: list[Prompt | Exception] = []
    for index, first in enumerate(firsts):
        try:
            beginning = _or_beginning(first, tokenizer)
            read.append(read_prompt(index, beginning, tokenizer, vocab_size, longest))
        except ValueError as error:
            read.append(error)
    # What `render_chat` made is whole: its text has all special tokens that belong there.
    whole = [isinstance(first, Prompt) for first in firsts]
    if len(read) == 1:
        read, whole = read * len(seconds), whole * len(seconds)
    elif len(seconds) == 1:
        seconds = seconds * len(read)
    pairs: list[Pair | Exception] = []
    for index, (prompt, second, is_whole) in enumerate(zip(read, seconds, whole, strict=True)):
        where, special = f"continuation {index}", not is_whole
        try:
            if isinstance(prompt, Exception):
                raise prompt
            pairs.append(
                _pair(where, prompt, second, tokenizer, vocab_size, longest, add_special=special)
            )
        except ValueError as error:
            pairs.append(error)
    return pairs


def _listed(what: str, given: Any) -> list[Any]:
    """One prompt as a list of one, several as a list."""
    listed = listed_prompts(given)
    if listed is None:
        raise ValueError(
            f"score: {what} must be text, token ids, or a list of these, got {reprlib.repr(given)}"
        )
    return listed


def _or_beginning(first: Any, tokenizer: Tokenizer | None) -> Any:
    """A prompt; in place of an empty text, the token that texts begin with, if the tokenizer has one."""
    bos = tokenizer.bos_token_id if first == "" and tokenizer is not None else None
    return first if bos is None else [bos]


def _pair(
    where: str,
    prompt: Prompt,
    second: Any,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    longest: int,
    *,
    add_special: bool,
) -> Pair:
    """A prompt and what goes on after it.

    Text after text is tokenized together with it. `add_special` says whether special tokens may be put in front.
    """
    if isinstance(second, Mapping) and second.keys() == {"prompt"}:
        second = second["prompt"]
    if not hasattr(second, "__iter__"):
        raise ValueError(
            f"score: {where} must be text or token ids, got {type(second).__name__} {reprlib.repr(second)}"
        )
    if isinstance(second, str) and not second:
        raise ValueError(f"score: {where} is empty; there is nothing to score")
    if not isinstance(second, str) or tokenizer is None:
        [read] = read_prompts([second], tokenizer, vocab_size=vocab_size)
        before, ids = len(prompt.token_ids), (*prompt.token_ids, *read.token_ids)
    elif prompt.text is None:
        check_length(f"score: {where}", tokenizer, second, longest)
        plain = tokenizer.encode(second, add_special_tokens=False)
        before, ids = len(prompt.token_ids), (*prompt.token_ids, *plain)
    else:
        text = prompt.text + second
        check_unicode(f"score: {where}", text)
        check_length(f"score: {where}", tokenizer, text, longest)
        ids = _open_ended(tokenizer, text, add_special=add_special)
        counts = tokenizer.count_within(text, ids, [len(prompt.text)])
        if counts is None:
            raise ValueError(
                f"score: {where}: where it begins is not known, because the tokenizer does not give back the text that "
                "it was given; give token ids"
            )
        [before] = counts
        if not before:
            raise ValueError(
                f"score: {where} shares its first token with all of its prompt {reprlib.repr(prompt.text)}, so no "
                "token comes before it; give a longer prompt, or token ids"
            )
    if before >= len(ids):
        raise ValueError(f"score: {where} adds no token to its prompt; there is nothing to score")
    return Pair(_declared(ids, before), before)


def _open_ended(tokenizer: Tokenizer, text: str, *, add_special: bool) -> tuple[int, ...]:
    """The tokens of a text, with the special tokens that come before it and without those that end it."""
    plain = tuple(tokenizer.encode(text, add_special_tokens=False))
    whole = tuple(tokenizer.encode(text)) if add_special else plain
    starts = range(len(whole) - len(plain) + 1)
    first = next((n for n in starts if whole[n : n + len(plain)] == plain), None)
    return whole if first is None else whole[: first + len(plain)]


def _declared(token_ids: Sequence[int], first: int) -> Prompt:
    """A prompt of which others will share the tokens before the continuation."""
    return Prompt(None, tuple(token_ids), (first,))


def score_of(job: Job) -> Score:
    """The score of a finished prompt's last part, the tokens from `logprobs_from` on."""
    request = job.completions[0].request
    found = request.output.prompt_logprobs[request.logprobs_from :]
    return Score(
        token_ids=tuple(entry.token_id for entry in found),
        token_logprobs=tuple(entry.logprob for entry in found),
        ranks=tuple(entry.rank for entry in found),
    )


def check_pooling(pooling: str) -> None:
    """ValueError for a pooling that does not exist."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"embed: pooling must be 'last', 'mean' or 'none', got {pooling!r}")


def check_positions(positions: str) -> None:
    """ValueError for positions that do not exist."""
    if positions not in get_args(Positions):
        raise ValueError(f"logprobs: positions must be 'last' or 'all', got {positions!r}")


def hidden_of(job: Job) -> np.ndarray:
    """What a finished prompt's pooling asked for, as `Output.pooled` has it."""
    pooled = job.completions[0].request.output.pooled
    assert pooled is not None, "its prompt was computed"
    return pooled


def vector_of(job: Job, *, normalize: bool) -> np.ndarray:
    """The vector of a finished prompt, float32[width], or with pooling "none" one for each token."""
    request, vectors = job.completions[0].request, hidden_of(job)
    if request.pooling == "mean":
        vectors = vectors / len(request.prompt)
    if normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return np.asarray(vectors, np.float32)


def all_logprobs(
    hidden: Sequence[np.ndarray | Exception],
    vocab_size: int,
    compute: Callable[[np.ndarray], np.ndarray],
    where_damaged: Callable[[], str],
) -> list[Any]:
    """Log-probabilities of all tokens after hidden states.

    Args:
        hidden: for each prompt float32[D], float32[T, D], or an error, which stays.
        compute: makes float32[N, V] of float32[N, D], for N up to `PROMPT_POSITIONS`.
        where_damaged: says where to look if numbers are not finite.

    Returns:
        For each prompt float32[V], or float32[T, V], or its error, which may be a FloatingPointError.
    """
    given = [states for states in hidden if not isinstance(states, Exception)]
    if not given:
        return list(hidden)
    joined = np.concatenate([np.atleast_2d(states) for states in given])
    found: np.ndarray = np.empty((len(joined), vocab_size), np.float32)
    for begin in range(0, len(joined), PROMPT_POSITIONS):
        part = slice(begin, begin + PROMPT_POSITIONS)
        found[part] = compute(joined[part])
    made: list[Any] = []
    done = 0
    for index, states in enumerate(hidden):
        if isinstance(states, Exception):
            made.append(states)
            continue
        num = len(np.atleast_2d(states))
        own = found[done : done + num].reshape(*states.shape[:-1], vocab_size)
        done += num
        if np.isfinite(own).all():
            made.append(own)
            continue
        text = f"prompt {index}: log-probabilities are not finite (NaN or infinity)"
        made.append(FloatingPointError(f"{text}; {where_damaged()}"))
    return made


# --- the calls ------------------------------------------------------------------------------------

# One token is drawn, and thrown away.
READING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


class Reader:
    """What `LLM` can do without generating. An `LLM` provides the attributes."""

    model_config: ModelConfig
    _intake: Intake
    _thread: Front
    _run: Callable[..., list[Any]]

    @checks_arguments
    def score(
        self,
        prompts: Prompts,
        continuations: Prompts,
        *,
        progress: ProgressOption = None,
        errors: Errors = "raise",
    ) -> list[Score]:
        """How likely continuations are, each after its prompt. Nothing is generated.

        Prompts that begin alike are computed once, through the prefix cache.

        Args:
            prompts, continuations: as many of one as of the other, or one prompt and several continuations, or the
                reverse. Each is text or token ids. If both are text, the tokens are those of the two texts joined. A
                token that holds characters of both then counts as part of the continuation.
            progress, errors: as in `generate`.

        Raises:
            ValueError: a prompt or a continuation is empty or malformed, or there are not as many of both.
            FloatingPointError: as in `generate`.

        Example:
            >>> llm = LLM()
            >>> scores = llm.score("import nump", ["y as np", "q as zz"])
            >>> scores[0].logprob > scores[1].logprob
            True
        """
        read = read_pairs(
            prompts,
            continuations,
            self._intake.tokenizer,
            vocab_size=self.model_config.vocab_size,
            longest=self._thread.facts.longest_prompt,
        )
        accepted = self._intake.accepted(
            [pair if isinstance(pair, Exception) else pair.whole for pair in read],
            replace(READING, prompt_logprobs=0),
            logprobs_from=[1 if isinstance(pair, Exception) else pair.first for pair in read],
            errors=errors,
        )
        return self._run(accepted, progress, "scoring", score_of, errors)

    @checks_arguments
    def logprobs(
        self,
        prompts: Prompts,
        *,
        positions: Positions = "last",
        progress: ProgressOption = None,
        errors: Errors = "raise",
    ) -> list[np.ndarray]:
        """How likely each token of the vocabulary is to come next. Nothing is generated.

        Args:
            prompts: as in `generate`.
            positions: "last" for what comes after the whole prompt, which may use the prefix cache, or "all" for what
                comes after each token, for which all of the prompt is computed.
            progress, errors: as in `generate`.

        Returns:
            For each prompt the natural logarithms of the probabilities, from the model's own logits, without a
            temperature: float32[vocab_size], or with "all" float32[tokens, vocab_size].

        Raises:
            ValueError: something is wrong with a prompt, or positions is neither.
            FloatingPointError: as in `generate`.

        Example:
            >>> llm = LLM()
            >>> [after] = llm.logprobs("import os\\nimport sy")
            >>> after.shape == (llm.model_config.vocab_size,), llm.decode([after.argmax()])
            (True, 's')
        """
        check_positions(positions)
        pooling: Pooling = "last" if positions == "last" else "none"
        accepted = self._intake.accepted(prompts, READING, pooling=pooling, errors=errors)
        hidden = self._run(accepted, progress, "reading", hidden_of, errors)
        ask = self._thread.ask
        found = all_logprobs(
            hidden,
            self.model_config.vocab_size,
            functools.partial(ask, questions.all_logprobs),
            functools.partial(ask, questions.where_damaged),
        )
        if errors == "raise":
            for error in found:
                if isinstance(error, Exception):
                    raise error
        return found

    @overload
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Literal["last", "mean"] = "last",
        normalize: bool = True,
        progress: ProgressOption = None,
        errors: Literal["raise"] = "raise",
    ) -> np.ndarray: ...

    @overload
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        progress: ProgressOption = None,
        errors: Errors = "raise",
    ) -> list[np.ndarray]: ...

    @checks_arguments
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        progress: ProgressOption = None,
        errors: Errors = "raise",
    ) -> np.ndarray | list[np.ndarray]:
        """Vectors for prompts, made of hidden states after the model's last norm: float32[prompts, width].

        Args:
            prompts: as in `generate`.
            pooling: "last" for the hidden state of the last token, which may use the prefix cache; "mean" for the
                mean over all tokens, or "none" for the hidden states of all tokens, for which all of the prompt is
                computed. With "none" the result is a list with float32[tokens, width] for each prompt.
            normalize: scale each vector to length 1.
            progress, errors: as in `generate`. With errors="return" the result is a list, of a vector float32[width] or
                an exception for each prompt.

        Raises:
            ValueError: something is wrong with a prompt, or there is no such pooling.
            FloatingPointError: as in `generate`.

        Example:
            >>> llm = LLM()
            >>> vectors = llm.embed(["import os", "import sys", "x = [1, 2]"], pooling="mean")
            >>> vectors.shape == (3, llm.model_config.width)
            True
            >>> bool(vectors[0] @ vectors[1] > vectors[0] @ vectors[2])
            True
        """
        check_pooling(pooling)
        accepted = self._intake.accepted(prompts, READING, pooling=pooling, errors=errors)
        read = functools.partial(vector_of, normalize=normalize)
        vectors = self._run(accepted, progress, "embedding", read, errors)
        if errors == "return" or pooling == "none":
            return vectors
        return np.stack(vectors) if vectors else np.zeros((0, self.model_config.width), np.float32)

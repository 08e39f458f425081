"""Prompts as callers write them, checked and turned into token ids before anything runs."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid_jax.byte_sizes import counted
from hybrid_jax.config.checks import integers_of, is_integer
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.text.thoughts import Thoughts, thoughts_of_text
from hybrid_jax.text.tokenizer import Tokenizer, beyond

KEYS = {"prompt", "prompt_token_ids"}
BREAKPOINTS = "cache_breakpoints"
TOKENIZER_REMEDY = "put one beside its config.json, or pass {'prompt_token_ids': [...]}"


OR_RAISE = ", or raise max_model_len or memory"  # of no use where the model itself takes no more


class TooLong(ValueError):
    """A prompt and its completion together exceed the longest sequence that model and memory allow."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        text: its text, if it had any.
        token_ids: its tokens.
        cache_breakpoints: numbers of leading tokens with which other prompts will begin as well.
        thoughts: those that come before the answer, as the text or its chat template says; None for none.
    """

    text: str | None
    token_ids: tuple[int, ...]
    cache_breakpoints: tuple[int, ...] = ()
    thoughts: Thoughts | None = None


PromptLike = str | Mapping[str, Any] | Prompt | Sequence[int]
# One prompt or several. A list of token ids is covered by the items, and is not a type of its own (`Sequence[int]`),
# because with two kinds of lists to choose from, a type checker reports a list of a text and a dict.
Prompts = str | Mapping[str, Any] | Prompt | Iterable[PromptLike | int]


def read_prompts(
    prompts: Prompts,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    longest: int | None = None,
) -> list[Prompt]:
    """Makes `Prompt`s of text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or of several of these.

    A list of integers is one prompt, and a list of such lists is one prompt each. A dict may also have
    "cache_breakpoints": where prefixes end with which other prompts will begin, in characters of a text or in tokens.

    Args:
        prompts, tokenizer, vocab_size: what is read, and by what.
        longest: the longest sequence in tokens. A text that is far longer is not read to its end; None reads any.

    Raises:
        TooLong: a text is far longer than `longest`.
        ValueError: a prompt is malformed, empty or not valid Unicode, has an id outside the vocabulary or a breakpoint
            outside the prompt, or is text while there is no tokenizer. The message names its index.
    """
    return [
        read_prompt(index, prompt, tokenizer, vocab_size, longest)
        for index, prompt in enumerate(several_prompts(prompts))
    ]


def several_prompts(prompts: Any) -> list[Any]:
    """One prompt as a list of one, several as a list, unread.

    Raises:
        ValueError: it is neither.
    """
    listed = listed_prompts(prompts)
    if listed is None:
        raise ValueError(
            f"prompts must be text, token ids, or a list of prompts, got {reprlib.repr(prompts)}"
        )
    return listed


def listed_prompts(prompts: Any) -> list[Any] | None:
    """One prompt as a list of one, several as a list; None for what is neither."""
    if isinstance(prompts, str | Mapping | Prompt):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        return None
    listed = list(prompts)
    return [listed] if listed and all(map(is_integer, listed)) else listed


def check_unicode(where: str, text: str) -> None:
    """ValueError if a text cannot be UTF-8: it has half of a surrogate pair, or a byte that was not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # The range in which Python keeps bytes that it could not decode.
        what = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}"
        raise ValueError(
            f"{where}: is not valid UTF-8, it has {what} at character {error.start}; convert it first"
        ) from None


def read_prompt(
    index: int,
    prompt: PromptLike,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    longest: int | None = None,
) -> Prompt:
    """Makes a `Prompt` of one prompt; see `read_prompts`. Messages name its index."""
    where = f"prompt {index}"
    if isinstance(prompt, Prompt):
        read = _of_ids(where, prompt.token_ids, prompt.cache_breakpoints, vocab_size, prompt.text)
        return replace(read, thoughts=prompt.thoughts)
    declared: Any = ()
    if isinstance(prompt, Mapping):
        keys = prompt.keys() - {BREAKPOINTS}
        if len(keys) != 1 or not keys <= KEYS:
            raise ValueError(
                f"{where}: a prompt as a dict must have one key, 'prompt' or 'prompt_token_ids', and may have "
                f"{BREAKPOINTS!r}, got {sorted(map(str, prompt))}"
            )
        declared = () if prompt.get(BREAKPOINTS) is None else prompt[BREAKPOINTS]
        if "prompt_token_ids" in prompt:
            return _of_ids(where, prompt["prompt_token_ids"], declared, vocab_size)
        prompt = prompt["prompt"]
    if isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes | bytearray):
        return _of_ids(where, prompt, declared, vocab_size)
    if not isinstance(prompt, str):
        raise ValueError(
            f"{where}: must be text or token ids, or a dict with 'prompt' or 'prompt_token_ids', got "
            f"{type(prompt).__name__} {reprlib.repr(prompt)}"
        )
    if tokenizer is None:
        raise ValueError(
            f"{where}: is text, but this model came without a tokenizer.json; {TOKENIZER_REMEDY}"
        )
    check_unicode(where, prompt)
    check_length(where, tokenizer, prompt, longest)
    characters = _breakpoints(where, declared, len(prompt), "characters")
    token_ids = _token_ids(where, tokenizer.encode(prompt), vocab_size)
    leading = leading_tokens(tokenizer, prompt, token_ids, characters)
    return Prompt(prompt, token_ids, leading, thoughts_of_text(prompt))


def check_length(
    where: str, tokenizer: Tokenizer, text: str, longest: int | None, *, shown: int = 0
) -> None:
    """TooLong for a text of far more than `longest` tokens, before it takes time and memory to read it.

    Args:
        where, tokenizer, text: its place for messages, what would read it, and itself.
        longest: the longest sequence, in tokens; None allows any.
        shown: tokens that a text may have in any case, because it is looked at and not run.
    """
    if longest is not None and tokenizer.is_far_beyond(text, most := max(longest, shown)):
        raise TooLong(
            f"{where}: its {len(text)} characters are more than {beyond(most)} tokens, but the longest sequence is "
            f"{longest}; shorten it{OR_RAISE}"
        )


def _of_ids(
    where: str, ids: Any, declared: Any, vocab_size: int, text: str | None = None
) -> Prompt:
    """A prompt given as token ids, with breakpoints counted in tokens."""
    token_ids = _token_ids(where, ids, vocab_size)
    return Prompt(text, token_ids, _breakpoints(where, declared, len(token_ids), "tokens"))


def leading_tokens(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], characters: Sequence[int]
) -> tuple[int, ...]:
    """For each number of leading characters of a text, how many of its tokens end within them, where any does.

    Empty if the tokenizer cannot say.
    """
    if not characters:
        return ()
    counts = tokenizer.count_within(text, token_ids, characters)
    return tuple(sorted({count for count in counts or () if count}))


def _breakpoints(where: str, given: Any, length: int, unit: str) -> tuple[int, ...]:
    points = integers_of(given)
    if points is None:
        raise ValueError(
            f"{where}: {BREAKPOINTS} must be a list of integers, got {reprlib.repr(given)}"
        )
    wrong = next((point for point in points if not 0 < point <= length), None)
    if wrong is not None:
        raise ValueError(
            f"{where}: {BREAKPOINTS} must lie between 1 and the prompt's {length} {unit}, got {wrong}"
        )
    return tuple(sorted(set(points)))


def _token_ids(where: str, given: Any, vocab_size: int) -> tuple[int, ...]:
    ids = integers_of(given)
    if ids is None:
        raise ValueError(f"{where}: prompt_token_ids must be integers, got {reprlib.repr(given)}")
    if not ids:
        raise ValueError(f"{where}: is empty; a prompt needs at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(f"{where}: token ids must lie between 0 and {vocab_size - 1}, got {wrong}")
    return ids


def pair_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """One `SamplingParams` per prompt: the same for all, or a list of equal length.

    Raises:
        ValueError: the lengths differ, or an entry is something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise ValueError(
            f"sampling_params must be SamplingParams or a list of them, got {reprlib.repr(params)}"
        )
    if len(params) != count:
        raise ValueError(
            f"sampling_params: {counted(count, 'prompt')} and {len(params)} SamplingParams; give one, or one for each "
            "prompt"
        )
    for index, entry in enumerate(params):
        if not isinstance(entry, SamplingParams):
            raise ValueError(
                f"sampling_params[{index}] must be SamplingParams, got {reprlib.repr(entry)}"
            )
    return list(params)

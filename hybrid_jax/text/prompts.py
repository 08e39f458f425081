"""Prompts as callers write them, checked and turned into token ids before anything runs."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_jax.config.checks import is_integer
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.text.tokenizer import Tokenizer

KEYS = {"prompt", "prompt_token_ids"}
BREAKPOINTS = "cache_breakpoints"
TOKENIZER_REMEDY = "put one beside its config.json, or pass {'prompt_token_ids': [...]}"


@dataclass(frozen=True)
class Prompt:
    """One prompt: its text, if it had any, and its token ids.

    Attributes:
        cache_breakpoints: numbers of leading tokens that other prompts will begin with as well.
    """

    text: str | None
    token_ids: tuple[int, ...]
    cache_breakpoints: tuple[int, ...] = ()


PromptLike = str | Mapping[str, Any] | Prompt | Sequence[int]
# One prompt or several. Token ids stand among the items, and not beside them as `Sequence[int]`: a type checker that
# has two kinds of lists to choose from reports a list of a text and a dict.
Prompts = str | Mapping[str, Any] | Prompt | Iterable[PromptLike | int]


def read_prompts(prompts: Prompts, tokenizer: Tokenizer | None, *, vocab_size: int) -> list[Prompt]:
    """Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or several of these, to `Prompt`s.

    A list of integers is one prompt, a list of such lists one prompt each. A dict may have "cache_breakpoints" too:
    where a prefix ends that other prompts will begin with, in characters of a text or in tokens.

    Raises:
        ValueError: a prompt is malformed, empty, not valid Unicode, holds an id outside the vocabulary, or is
            text while there is no tokenizer; a breakpoint lies outside of it. The message names its index.
    """
    if isinstance(prompts, str | Mapping | Prompt):
        prompts = [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise ValueError(
            f"prompts must be text, token ids, or a list of prompts, got {type(prompts).__name__}"
        )
    prompts = list(prompts)
    if prompts and all(is_integer(token) for token in prompts):
        prompts = [prompts]
    return [_read(i, p, tokenizer, vocab_size) for i, p in enumerate(prompts)]


def check_unicode(where: str, text: str) -> None:
    """ValueError where a text cannot be UTF-8: half of a surrogate pair, or a byte that was no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # How Python carries a byte that it could not decode.
        what = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}"
        raise ValueError(
            f"{where}: is not valid UTF-8, it has {what} at character {error.start}; convert it first"
        ) from None


def _read(index: int, prompt: PromptLike, tokenizer: Tokenizer | None, vocab_size: int) -> Prompt:
    where = f"prompt {index}"
    if isinstance(prompt, Prompt):
        return _of_ids(where, prompt.token_ids, prompt.cache_breakpoints, vocab_size, prompt.text)
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
    characters = _breakpoints(where, declared, len(prompt), "characters")
    token_ids = _token_ids(where, tokenizer.encode(prompt), vocab_size)
    return Prompt(prompt, token_ids, leading_tokens(tokenizer, prompt, token_ids, characters))


def _of_ids(
    where: str, ids: Any, declared: Any, vocab_size: int, text: str | None = None
) -> Prompt:
    """A prompt given as token ids, its breakpoints counted in them."""
    token_ids = _token_ids(where, ids, vocab_size)
    return Prompt(text, token_ids, _breakpoints(where, declared, len(token_ids), "tokens"))


def leading_tokens(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], characters: Sequence[int]
) -> tuple[int, ...]:
    """How many tokens end within so many leading characters of a text, for each of several numbers of them."""
    if not characters:
        return ()
    ends = tokenizer.token_ends(text, token_ids)
    beyond = [next((i for i, end in enumerate(ends) if end > c), len(ends)) for c in characters]
    return tuple(sorted({count for count in beyond if count}))


def _breakpoints(where: str, given: Any, length: int, unit: str) -> tuple[int, ...]:
    good = isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray | Mapping)
    points = tuple(given) if good else ()
    if not good or not all(is_integer(point) for point in points):
        raise ValueError(
            f"{where}: {BREAKPOINTS} must be a list of integers, got {reprlib.repr(given)}"
        )
    points = tuple(map(operator.index, points))
    wrong = next((point for point in points if not 0 < point <= length), None)
    if wrong is not None:
        raise ValueError(
            f"{where}: {BREAKPOINTS} must lie between 1 and the prompt's {length} {unit}, got {wrong}"
        )
    return tuple(sorted(set(points)))


def _token_ids(where: str, ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    good = isinstance(ids, Iterable) and not isinstance(ids, str | bytes | bytearray)
    given = tuple(ids) if good else ids
    if not good or not all(is_integer(token) for token in given):
        raise ValueError(f"{where}: prompt_token_ids must be integers, got {reprlib.repr(ids)}")
    read = tuple(map(operator.index, given))
    if not read:
        raise ValueError(f"{where}: is empty; a prompt needs at least one token")
    wrong = next((token for token in read if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"{where}: token ids must lie between 0 and {vocab_size - 1}, got {wrong}")
    return read


def pair_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """One `SamplingParams` per prompt: the same for all, or a list of equal length.

    Raises:
        ValueError: the lengths differ, or an entry is something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if not isinstance(params, Sequence):
        raise ValueError(
            f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}"
        )
    if len(params) != count:
        raise ValueError(f"sampling_params: {count} prompts need as many, got {len(params)}")
    for index, entry in enumerate(params):
        if not isinstance(entry, SamplingParams):
            raise ValueError(
                f"sampling_params[{index}] must be SamplingParams, got {type(entry).__name__}"
            )
    return list(params)

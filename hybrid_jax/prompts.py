"""Prompts as callers write them, checked and turned into token ids before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.tokenizer import Tokenizer

KEYS = {"prompt", "prompt_token_ids"}


@dataclass(frozen=True)
class Prompt:
    """One prompt: its text, if it had any, and its token ids."""

    text: str | None
    token_ids: tuple[int, ...]


PromptLike = str | Mapping[str, Any] | Prompt


def read_prompts(
    prompts: PromptLike | Sequence[PromptLike], tokenizer: Tokenizer | None, *, vocab_size: int
) -> list[Prompt]:
    """Text, {"prompt": text}, {"prompt_token_ids": ids}, or a sequence of these, to `Prompt`s.

    Raises:
        ValueError: a prompt is malformed, empty, holds an id outside the vocabulary, or is text while
            there is no tokenizer. The message names its index.
    """
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be text or a list, got {type(prompts).__name__}")
    return [_read(i, p, tokenizer, vocab_size) for i, p in enumerate(prompts)]


def _read(index: int, prompt: PromptLike, tokenizer: Tokenizer | None, vocab_size: int) -> Prompt:
    where = f"prompt {index}"
    if isinstance(prompt, Prompt):
        return Prompt(prompt.text, _token_ids(where, prompt.token_ids, vocab_size))
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= KEYS:
            raise ValueError(
                f"{where}: a prompt as a dict must have one key, 'prompt' or 'prompt_token_ids', "
                f"got {sorted(map(str, prompt))}"
            )
        if "prompt_token_ids" in prompt:
            return Prompt(None, _token_ids(where, prompt["prompt_token_ids"], vocab_size))
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        raise ValueError(
            f"{where}: must be text or {{'prompt_token_ids': [...]}}, got {type(prompt).__name__}"
        )
    if tokenizer is None:
        raise ValueError(
            f"{where}: is text, but this model came without a tokenizer.json; "
            "put one beside its config.json, or pass {'prompt_token_ids': [...]}"
        )
    return Prompt(prompt, _token_ids(where, tokenizer.encode(prompt), vocab_size))


def _token_ids(where: str, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    try:
        read = tuple(map(operator.index, ids))
    except TypeError:
        raise ValueError(f"{where}: prompt_token_ids must be integers, got {_shown(ids)}") from None
    if not read:
        raise ValueError(f"{where}: is empty; a prompt needs at least one token")
    wrong = next((token for token in read if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"{where}: token ids must lie between 0 and {vocab_size - 1}, got {wrong}")
    return read


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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

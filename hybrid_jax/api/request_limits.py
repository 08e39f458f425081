"""Where one completion ends at the latest: its stop ids and most tokens, checked against model and memory."""

from __future__ import annotations

import reprlib

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.pack import MAX_STOP_IDS


class TooLong(ValueError):
    """A prompt and what is to follow it exceed the longest sequence that model and memory allow."""


def resolve_stop_ids(index: int, params: SamplingParams, config: ModelConfig) -> frozenset[int]:
    """The token ids that end a completion: the caller's, and the model's own unless they are ignored.

    Args:
        index: the prompt's, for the message.

    Raises:
        ValueError: an id outside the vocabulary, or more of them than the engine looks for.
    """
    for token in params.stop_token_ids:
        if token >= config.vocab_size:
            raise ValueError(
                f"prompt {index}: stop_token_ids must lie below the vocabulary's {config.vocab_size}, "
                f"got {reprlib.repr(token)}"
            )
    eos_ids = () if params.ignore_eos else config.eos_token_ids
    stops = frozenset((*eos_ids, *params.stop_token_ids))
    if len(stops) > MAX_STOP_IDS:
        raise ValueError(
            f"prompt {index}: at most {MAX_STOP_IDS} stop token ids are supported, the "
            f"model's own included, got {len(stops)}"
        )
    return stops


def resolve_max_tokens(
    index: int,
    prompt_len: int,
    params: SamplingParams,
    max_model_len: int,
    default: int | None = None,
) -> int:
    """Most tokens of a completion: what was asked for, or all that fit behind the prompt.

    Args:
        index: the prompt's, for the message. prompt_len, max_model_len: tokens.
        default: the model's own `max_tokens`; asked for so many, fewer do where no more fit.

    Raises:
        TooLong: no token fits, or fewer than `max_tokens` or `min_tokens` ask for.
    """
    room = max_model_len - prompt_len
    if room < 1:
        raise TooLong(
            f"prompt {index}: has {prompt_len} tokens and needs room for one more, but the longest "
            f"sequence is {max_model_len}; shorten it, or raise max_model_len or memory"
        )
    if params.min_tokens > room:
        raise TooLong(
            f"prompt {index}: {prompt_len} tokens and min_tokens={params.min_tokens} exceed the "
            f"longest sequence of {max_model_len}; lower min_tokens to {room} at most"
        )
    if params.max_tokens is None or params.max_tokens == default:
        return min(room, params.max_tokens or room)
    if params.max_tokens > room:
        raise TooLong(
            f"prompt {index}: {prompt_len} tokens and max_tokens={params.max_tokens} exceed the "
            f"longest sequence of {max_model_len}; lower max_tokens to {room} or leave it out"
        )
    return params.max_tokens

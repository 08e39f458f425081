"""Answers as bodies: OpenAI's objects of chat completions and text completions, made of outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hybrid_jax.api.outputs import CompletionOutput, Logprob, RequestOutput
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.openai.errors import RequestError
from hybrid_jax.openai.fields import CHAT, COMPLETIONS
from hybrid_jax.text.incremental import REPLACEMENT, IncrementalDecoder
from hybrid_jax.text.tokenizer import Tokenizer, byte_alphabet

OBJECTS = {CHAT: "chat.completion", COMPLETIONS: "text_completion"}
ID_PREFIXES = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-"}
FINISHED = ("stop", "length")  # the only ends of a text that the API knows
LEAST_LOGPROB = -9999.0  # what the API writes for minus infinity, which JSON does not have
FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # a byte in vocabularies like SentencePiece's
# A byte in byte-level vocabularies.
BYTE_LETTERS = {letter: byte for byte, letter in enumerate(byte_alphabet())}


def answer(
    outputs: Sequence[RequestOutput],
    params: SamplingParams,
    url: str,
    *,
    answer_id: str,
    model: str,
    created: int,
    texts: TokenTexts,
) -> dict[str, Any]:
    """The body of the answer to a request.

    Args:
        outputs: one for each prompt of the request.
        params: of each of them.
        url: CHAT or COMPLETIONS.
        answer_id: its id; it begins with the url's prefix in `ID_PREFIXES`.
        model: the name of the model.
        created: seconds since 1970.
        texts: tells what single tokens stand for.

    Raises:
        RequestError: a completion has not ended in a way that the API knows.
    """
    choices = [(output, choice) for output in outputs for choice in output.outputs]
    for _, choice in choices:
        if choice.finish_reason not in FINISHED:
            raise RequestError(
                f"a completion ended early: {choice.stop_reason or choice.finish_reason}; change "
                "the form, bad_words or allowed_token_ids",
                code="ended_early",
                param="structured_outputs",
            )
    make = _chat_choice if url == CHAT else _text_choice
    return {
        "id": answer_id,
        "object": OBJECTS[url],
        "created": created,
        "model": model,
        "choices": [
            {"index": index} | make(output, choice, params, texts)
            for index, (output, choice) in enumerate(choices)
        ],
        "usage": _usage(outputs),
    }


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    new_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in outputs)},
    }


# --- choices --------------------------------------------------------------------------------------


def _chat_choice(
    output: RequestOutput, choice: CompletionOutput, params: SamplingParams, texts: TokenTexts
) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        content = [
            _chat_token(token, position, params.logprobs or 0, texts)
            for token, position in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
        logprobs = {"content": content, "refusal": None}
    return {
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _chat_token(
    token: int, position: Mapping[int, Logprob], num_top: int, texts: TokenTexts
) -> dict[str, Any]:
    best = sorted(position.items(), key=lambda entry: entry[1].rank)[:num_top]
    return _token_entry(token, position[token], texts) | {
        "top_logprobs": [_token_entry(other, found, texts) for other, found in best]
    }


def _token_entry(token: int, found: Logprob, texts: TokenTexts) -> dict[str, Any]:
    data = texts.data(token, found.decoded_token)
    return {
        "token": _text_of(token, found),
        "logprob": _finite(found.logprob),
        "bytes": None if data is None else list(data),
    }


def _text_choice(
    output: RequestOutput, choice: CompletionOutput, params: SamplingParams, texts: TokenTexts
) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        pairs = list(zip(choice.token_ids, choice.logprobs, strict=True))
        logprobs = {
            "text_offset": texts.offsets(
                output.prompt_token_ids,
                choice.token_ids,
                skip_special_tokens=params.skip_special_tokens,
            ),
            "token_logprobs": [_finite(position[token].logprob) for token, position in pairs],
            "tokens": [_text_of(token, position[token]) for token, position in pairs],
            "top_logprobs": [
                {_text_of(token, found): _finite(found.logprob) for token, found in best.items()}
                for _, best in pairs
            ],
        }
    return {"text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _text_of(token: int, found: Logprob) -> str:
    return f"token_id:{token}" if found.decoded_token is None else found.decoded_token


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


# --- tokens ---------------------------------------------------------------------------------------


class TokenTexts:
    """Single tokens as bytes, and where each begins in the text: the API's logprobs show both.

    Args:
        tokenizer: of the model; None if it has none.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def data(self, token: int, text: str | None) -> bytes | None:
        """The bytes of a token that decodes to `text` when it stands alone; None if they cannot be told.

        If a token is only a part of a character, its text has U+FFFD in place of those bytes.
        """
        if text is None or self._tokenizer is None:
            return None
        if REPLACEMENT not in text:
            return text.encode()
        name = self._tokenizer.token_name(token)
        if match := FALLBACK.fullmatch(name):
            return bytes([int(match[1], 16)])
        if all(letter in BYTE_LETTERS for letter in name):
            data = bytes(BYTE_LETTERS[letter] for letter in name)
            if data.decode(errors="replace") == text:
                return data
        return text.encode() if REPLACEMENT in name else None

    def offsets(
        self, prompt: Sequence[int], tokens: Sequence[int], *, skip_special_tokens: bool
    ) -> list[int]:
        """Where each token begins in the text of all of them, in characters.

        The tokens of one character all begin where it begins. Zeros without a tokenizer.
        """
        if self._tokenizer is None:
            return [0] * len(tokens)
        decode = partial(self._tokenizer.decode, skip_special_tokens=skip_special_tokens)
        decoder = IncrementalDecoder(decode, prompt)
        offsets, length = [], 0
        for token in tokens:
            offsets.append(length)
            length += len(decoder.push(token))
        return offsets

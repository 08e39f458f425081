"""Output lines: those of OpenAI's batch API, with its chat completion or text completion objects inside."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybrid_jax.api.outputs import CompletionOutput, Logprob, RequestOutput
from hybrid_jax.batch.fields import CHAT, LineError
from hybrid_jax.batch.requests import BatchRequest
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.text.incremental import REPLACEMENT, IncrementalDecoder
from hybrid_jax.text.tokenizer import Tokenizer, byte_alphabet

LEAST_LOGPROB = -9999.0  # what the API writes for minus infinity, which JSON does not have
# Allowed inside JSON strings, but some readers end a line at them. Half a surrogate pair has no UTF-8.
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # a byte in vocabularies like SentencePiece's
# A byte in byte-level vocabularies.
BYTE_LETTERS = {letter: byte for byte, letter in enumerate(byte_alphabet())}


@dataclass(frozen=True)
class AnswerIds:
    """The ids in the answer to one line. They are the same whenever that line of that file is answered.

    Attributes:
        digest: of the input.
        index: of the line among those that are not blank, from 0.
    """

    digest: str
    index: int

    @property
    def line_id(self) -> str:
        """The id of the output line."""
        return self.id("batch_req_")

    def id(self, prefix: str) -> str:
        """The id of another object in the answer, which begins with the given prefix."""
        data = f"{prefix}{self.index}/{self.digest}".encode()
        return prefix + hashlib.blake2b(data, digest_size=16).hexdigest()


def success(
    ids: AnswerIds, custom_id: str | None, body: Mapping[str, Any], *, status_code: int = 200
) -> dict[str, Any]:
    """The line of a request that was answered."""
    return {
        "id": ids.line_id,
        "custom_id": custom_id,
        "response": {
            "status_code": status_code,
            "request_id": ids.id("req_"),
            "body": body,
        },
        "error": None,
    }


def failure(
    ids: AnswerIds, custom_id: str | None, error: LineError, *, number: int, status_code: int = 400
) -> dict[str, Any]:
    """The line of a request that cannot be answered; `number` is the number of its line in the file, from 1."""
    message = f"line {number}: {error}"
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    body = {"message": message, "type": kind, "param": error.param, "code": error.code}
    line = success(ids, custom_id, {"error": body}, status_code=status_code)
    return line | {"error": {"code": error.code, "message": message}}


def answer(
    ids: AnswerIds,
    request: BatchRequest,
    outputs: Sequence[RequestOutput],
    *,
    model: str,
    created: int,
    texts: TokenTexts,
) -> dict[str, Any]:
    """The body of an answered request.

    Args:
        ids: the ids to give.
        request: what was asked.
        outputs: one per prompt of the request.
        model: the name of the model, if the request does not give one.
        created: seconds since 1970.
        texts: tells what single tokens stand for.
    """
    chat = request.url == CHAT
    choices = [(output, choice) for output in outputs for choice in output.outputs]
    params = request.params[0]  # the others differ in the seed only
    make = _chat_choice if chat else _text_choice
    return {
        "id": ids.id("chatcmpl-" if chat else "cmpl-"),
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model if request.model is None else request.model,
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


# --- bytes ----------------------------------------------------------------------------------------


def as_line(value: Mapping[str, Any]) -> bytes:
    """A line of JSON in UTF-8, with its line end."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode() + b"\n"

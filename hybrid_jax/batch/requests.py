"""From the bytes of one line to prompts and sampling parameters."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybrid_jax.api.completions import derive_seed
from hybrid_jax.api.llm import LLM
from hybrid_jax.batch.input_file import MAX_LINE_BYTES, Line
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.openai.errors import RequestError, brief, require
from hybrid_jax.openai.fields import CHAT, COMPLETIONS
from hybrid_jax.openai.requests import read_body, read_object
from hybrid_jax.text.prompts import read_prompts
from hybrid_jax.text.thoughts import Thoughts

MAX_CHOICES = 1024  # completions one line may ask for
ENVELOPE = ("custom_id", "method", "url", "body")
# What to do instead of asking for something that a batch file cannot have.
REMEDIES = {
    "stream": "a batch line is answered as a whole; leave it out or set it to false",
    "chat_template": "name one for the whole run: --chat-template FILE",
}


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """What one line asks for.

    Attributes:
        url: CHAT or COMPLETIONS.
        model: the name that the line gives the model, or None.
        prompts: int32[n] token ids of each prompt. A chat line has one, a completions line may have several.
        breakpoints: cache breakpoints of each prompt, in tokens.
        thoughts: those that come before the answer to each prompt; see `Prompt`.
        params: of each prompt, with its seed.
    """

    url: str
    model: str | None
    prompts: list[np.ndarray]
    breakpoints: list[tuple[int, ...]]
    thoughts: list[Thoughts | None]
    params: list[SamplingParams]


def note_id(seen: set[bytes], custom_id: str) -> bool:
    """Adds a digest of an id, of 16 bytes, to those seen so far, and returns whether it is new."""
    data = custom_id.encode(errors="surrogatepass")
    known = len(seen)
    seen.add(hashlib.blake2b(data, digest_size=16).digest())
    return len(seen) > known


def read_envelope(line: Line) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        RequestError: the line is not a JSON object.
    """
    if line.data is None:
        raise RequestError(
            f"longer than {MAX_LINE_BYTES >> 20} MiB, the most a line may have",
            code="line_too_long",
        )
    return read_object(line.data, code="invalid_json_line")


def custom_id_of(envelope: Mapping[str, Any]) -> str | None:
    """The id of a line; None if it has none that can be used."""
    custom_id = envelope.get("custom_id")
    return custom_id if isinstance(custom_id, str) and custom_id else None


def read_request(
    envelope: Mapping[str, Any], llm: LLM, *, is_new: bool, chat_template: str | None
) -> BatchRequest:
    """What the object of a line asks for.

    Args:
        envelope: the object.
        llm: will answer it. It gives the seed of the run and the sampling parameters that the body leaves out.
        is_new: no earlier line has its id.
        chat_template: for conversations, instead of the model's own.

    Raises:
        RequestError: something is wrong or not supported.
        ValueError: something is wrong with a prompt.
    """
    custom_id = _checked_id(envelope, is_new)
    url, body = envelope["url"], envelope["body"]
    asked = read_body(
        body,
        url,
        defaults=llm.get_default_sampling_params(),
        render_chat=functools.partial(llm.render_chat, chat_template=chat_template),
        remedies=REMEDIES,
    )
    prompts, params = asked.prompts, asked.params
    num_choices = len(prompts) * params.n
    if num_choices > MAX_CHOICES:
        raise RequestError(
            f"asks for {num_choices} completions, the most of one line is {MAX_CHOICES}; "
            "spread them over several lines",
            param="n" if params.n > 1 else "prompt",
        )
    if params.seed is None:
        # Seeds depend on nothing else, so a run that goes on after an interruption gives the same texts, and so does a
        # file whose lines were put in another order.
        base, names = llm.engine_config.seed, [f"{i}/{custom_id}" for i in range(len(prompts))]
        each = [replace(params, seed=derive_seed(base, name)) for name in names]
    else:
        each = [params] * len(prompts)
    # Many requests wait for their turn, and arrays take a tenth of the memory of tuples.
    read = read_prompts(
        prompts,
        llm.get_tokenizer(),
        vocab_size=llm.model_config.vocab_size,
        longest=llm.max_model_len,
    )
    return BatchRequest(
        url=url,
        model=asked.model,
        prompts=[np.array(prompt.token_ids, np.int32) for prompt in read],
        breakpoints=[prompt.cache_breakpoints for prompt in read],
        thoughts=[prompt.thoughts for prompt in read],
        params=each,
    )


def _checked_id(envelope: Mapping[str, Any], is_new: bool) -> str:
    """The id of a line whose envelope is as it must be."""
    missing = [name for name in ENVELOPE if name not in envelope]
    if missing:
        raise RequestError(
            f"has no {missing[0]}; a line needs {', '.join(ENVELOPE)}",
            code="missing_required_parameter",
            param=missing[0],
        )
    custom_id, method, url, body = (envelope[name] for name in ENVELOPE)
    usable = custom_id_of(envelope) is not None
    require(usable, "custom_id", "a non-empty string", custom_id)
    if not is_new:
        raise RequestError(
            f"custom_id {brief(custom_id)} was used by an earlier line; ids must be unique",
            code="duplicate_custom_id",
            param="custom_id",
        )
    require(method == "POST", "method", '"POST"', method, code="invalid_method")
    known = url in (CHAT, COMPLETIONS)
    require(known, "url", f"{CHAT} or {COMPLETIONS}", url, code="invalid_url")
    require(isinstance(body, dict), "body", "an object", body)
    strange = next((name for name in envelope if name not in ENVELOPE), None)
    if strange is not None:
        raise RequestError(
            f"has an unknown key {brief(strange)} beside {', '.join(ENVELOPE)}; does it belong "
            "in the body?",
            code="unknown_parameter",
            param=strange[:60],
        )
    return custom_id

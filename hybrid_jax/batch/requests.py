"""From the bytes of one line to prompts and sampling parameters."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybrid_jax.api.completions import derive_seed
from hybrid_jax.api.llm import LLM
from hybrid_jax.batch.fields import (
    CHAT,
    COMPLETIONS,
    LineError,
    brief,
    read_params,
    require,
    unsupported,
)
from hybrid_jax.batch.input_file import MAX_LINE_BYTES, Line
from hybrid_jax.config.checks import refuse_constant
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.text.conversation import ConversationError, check_tools
from hybrid_jax.text.prompts import PromptLike, read_prompts
from hybrid_jax.text.templates import NoTemplate
from hybrid_jax.text.thoughts import Thoughts

MAX_CHOICES = 1024  # completions one line may ask for
ENVELOPE = ("custom_id", "method", "url", "body")
SAME_NAMES = (
    *("add_generation_prompt", "cache_breakpoints", "chat_template_kwargs"),
    *("continue_final_message", "tools"),
)
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


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
        LineError: the line is not a JSON object.
    """
    if line.data is None:
        raise LineError(
            f"longer than {MAX_LINE_BYTES >> 20} MiB, the most a line may have",
            code="line_too_long",
        )
    try:
        envelope = json.loads(line.data.decode(), parse_constant=refuse_constant)
        if ESCAPED_SURROGATE.search(line.data):
            json.dumps(envelope, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise _malformed(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise _malformed(
            "half of a surrogate pair (\\ud800 to \\udfff) is not a character"
        ) from error
    except RecursionError as error:
        raise _malformed("nested too deeply") from error
    except ValueError as error:
        raise _malformed(f"not JSON: {error}") from error
    if not isinstance(envelope, dict):
        raise _malformed(f"must be a JSON object, got {brief(envelope)}")
    return envelope


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
        LineError: something is wrong or not supported.
        ValueError: something is wrong with a prompt.
    """
    custom_id = _checked_id(envelope, is_new)
    url, body = envelope["url"], envelope["body"]
    model = body.get("model")
    require(model is None or isinstance(model, str), "model", "a string", model)
    params = read_params(body, url, llm.get_default_sampling_params())
    if url == CHAT:
        prompts = [_rendered(llm, chat_template, body)]
    else:
        prompts = _read_prompts(body)
    num_choices = len(prompts) * params.n
    if num_choices > MAX_CHOICES:
        raise LineError(
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
        model=model,
        prompts=[np.array(prompt.token_ids, np.int32) for prompt in read],
        breakpoints=[prompt.cache_breakpoints for prompt in read],
        thoughts=[prompt.thoughts for prompt in read],
        params=each,
    )


def _checked_id(envelope: Mapping[str, Any], is_new: bool) -> str:
    """The id of a line whose envelope is as it must be."""
    missing = [name for name in ENVELOPE if name not in envelope]
    if missing:
        raise LineError(
            f"has no {missing[0]}; a line needs {', '.join(ENVELOPE)}",
            code="missing_required_parameter",
            param=missing[0],
        )
    custom_id, method, url, body = (envelope[name] for name in ENVELOPE)
    usable = custom_id_of(envelope) is not None
    require(usable, "custom_id", "a non-empty string", custom_id)
    if not is_new:
        raise LineError(
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
        raise LineError(
            f"has an unknown key {brief(strange)} beside {', '.join(ENVELOPE)}; does it belong "
            "in the body?",
            code="unknown_parameter",
            param=strange[:60],
        )
    return custom_id


def _read_prompts(body: Mapping[str, Any]) -> list[PromptLike]:
    """A text, a list of texts, token ids, or a list of lists of these."""
    prompt = body.get("prompt")
    if prompt is None:
        raise LineError("the body has no prompt", code="missing_required_parameter", param="prompt")
    listed = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
    texts = isinstance(listed, list) and all(isinstance(entry, str) for entry in listed)
    good = isinstance(listed, list) and bool(listed) and (texts or all(map(_are_ids, listed)))
    what = "a string, a list of strings, a list of token ids or a list of such lists, none of them empty"
    require(good, "prompt", what, prompt)
    key = "prompt" if texts else "prompt_token_ids"
    return [{key: entry, "cache_breakpoints": body.get("cache_breakpoints")} for entry in listed]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


def _rendered(llm: LLM, chat_template: str | None, body: Mapping[str, Any]) -> PromptLike:
    try:
        return llm.render_chat(**chat_arguments(body), chat_template=chat_template)
    except ConversationError as error:
        text = error.what
        if isinstance(error.__cause__, NoTemplate):
            text = f"{text.partition('; ')[0]}; name one for the whole run: --chat-template FILE"
        raise LineError(text, code=error.code, param=error.param) from error


def chat_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM.render_chat` that a body holds. Null is the same as leaving a field out.

    Raises:
        LineError: there are no messages, or tool_choice or parallel_tool_calls asks for what is not supported.
        ConversationError: tools are not a list of JSON schemas.
    """
    if body.get("messages") is None:
        raise LineError(
            "the body has no messages", code="missing_required_parameter", param="messages"
        )
    given = {name: body[name] for name in SAME_NAMES if body.get(name) is not None}
    tools = given.get("tools", [])
    check_tools(tools)  # also if tool_choice leaves them out
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", choice, 'use "auto" or "none"')
    parallel = body.get("parallel_tool_calls")
    is_flag = parallel is None or isinstance(parallel, bool)
    require(is_flag, "parallel_tool_calls", "true or false", parallel)
    if choice == "none":
        given.pop("tools", None)
    elif tools and parallel is False:
        raise unsupported("parallel_tool_calls", False, "leave it out")
    return {"messages": body["messages"], **given}


def _malformed(what: str) -> LineError:
    return LineError(what, code="invalid_json_line")

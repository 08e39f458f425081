"""From the body of a request to prompts and sampling parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_jax.config.checks import refuse_constant
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.openai.errors import RequestError, brief, require, unsupported
from hybrid_jax.openai.fields import CHAT, read_params
from hybrid_jax.text.conversation import ConversationError, check_tools
from hybrid_jax.text.prompts import Prompt, PromptLike
from hybrid_jax.text.templates import NoTemplate

SAME_NAMES = (
    *("add_generation_prompt", "cache_breakpoints", "chat_template_kwargs"),
    *("continue_final_message", "tools"),
)
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True)
class APIRequest:
    """What a body asks for.

    Attributes:
        model: the name that it gives the model, or None.
        prompts: as `LLM.generate` takes them. A chat has one, a completion may have several.
        params: of each of them. Without a seed if the body gives none.
    """

    model: str | None
    prompts: Sequence[PromptLike]
    params: SamplingParams


def read_object(data: bytes, *, code: str) -> dict[str, Any]:
    """The JSON object that a caller sent.

    Args:
        data: UTF-8 text.
        code: of the error.

    Raises:
        RequestError: it is not a JSON object.
    """
    try:
        value = json.loads(data.decode(), parse_constant=refuse_constant)
        if ESCAPED_SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        what = f"not UTF-8: {error.reason} at byte {error.start}"
        raise RequestError(what, code=code) from error
    except UnicodeEncodeError as error:
        what = "half of a surrogate pair (\\ud800 to \\udfff) is not a character"
        raise RequestError(what, code=code) from error
    except RecursionError as error:
        raise RequestError("nested too deeply", code=code) from error
    except ValueError as error:
        raise RequestError(f"not JSON: {error}", code=code) from error
    if not isinstance(value, dict):
        raise RequestError(f"must be a JSON object, got {brief(value)}", code=code)
    return value


def read_body(
    body: Mapping[str, Any],
    url: str,
    *,
    defaults: SamplingParams,
    render_chat: Callable[..., Prompt],
    remedies: Mapping[str, str],
) -> APIRequest:
    """What a body asks for. Nothing but a chat becomes token ids here.

    Args:
        body: of the request.
        url: CHAT or COMPLETIONS.
        defaults: the parameters that it may leave out.
        render_chat: makes a prompt of a conversation, as `LLM.render_chat`.
        remedies: what to do instead, by field, where that depends on who serves the API.

    Raises:
        RequestError: something is wrong or not supported.
        ValueError: something is wrong with the prompt that a conversation gives.
    """
    model = body.get("model")
    require(model is None or isinstance(model, str), "model", "a string", model)
    params = read_params(body, url, defaults, remedies)
    is_chat = url == CHAT
    prompts = [_rendered(render_chat, body, remedies)] if is_chat else _read_prompts(body)
    return APIRequest(model=model, prompts=prompts, params=params)


def _read_prompts(body: Mapping[str, Any]) -> list[PromptLike]:
    """A text, a list of texts, token ids, or a list of lists of these."""
    prompt = body.get("prompt")
    if prompt is None:
        raise _missing("prompt")
    listed = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
    texts = isinstance(listed, list) and all(isinstance(entry, str) for entry in listed)
    good = isinstance(listed, list) and bool(listed) and (texts or all(map(_are_ids, listed)))
    what = "a string, a list of strings, a list of token ids or a list of such lists, none of them empty"
    require(good, "prompt", what, prompt)
    key = "prompt" if texts else "prompt_token_ids"
    return [{key: entry, "cache_breakpoints": body.get("cache_breakpoints")} for entry in listed]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


def _rendered(
    render_chat: Callable[..., Prompt], body: Mapping[str, Any], remedies: Mapping[str, str]
) -> Prompt:
    try:
        return render_chat(**_chat_arguments(body))
    except ConversationError as error:
        text = error.what
        if isinstance(error.__cause__, NoTemplate) and "chat_template" in remedies:
            text = f"{text.partition('; ')[0]}; {remedies['chat_template']}"
        raise RequestError(text, code=error.code, param=error.param) from error


def _chat_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM.render_chat` that a body holds. Null is the same as leaving a field out.

    Raises:
        RequestError: there are no messages, or tool_choice or parallel_tool_calls asks for what is not supported.
        ConversationError: tools are not a list of JSON schemas.
    """
    if body.get("messages") is None:
        raise _missing("messages")
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


def _missing(name: str) -> RequestError:
    return RequestError(f"the body has no {name}", code="missing_required_parameter", param=name)

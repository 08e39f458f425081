"""The fields of a request's body: which become sampling parameters, how the others are treated, what can be wrong.

The checks of values are those of `SamplingParams`. A pydantic model would state them again, and word them otherwise.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.config.structured_outputs import FORMS, StructuredOutputsParams
from hybrid_jax.openai.errors import RequestError, brief, require, unsupported

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


# --- readers: from a JSON value to what SamplingParams takes --------------------------------------


def _plain(name: str, value: Any) -> Any:
    return value  # SamplingParams checks it


def _must_be(kind: Any, what: str) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        require(isinstance(value, kind), name, what, value)
        return value

    return read


_boolean = _must_be(bool, "true or false")
_strings = _must_be(str | list, "a string or a list of strings")
_list = _must_be(list, "a list")


def _bias(name: str, value: Any) -> dict[int, Any]:
    """Token ids come as strings, because JSON has no integer keys."""
    whole = isinstance(value, dict) and all(k.isascii() and k.isdigit() for k in value)
    require(whole, name, "an object from token ids to numbers", value)
    return {int(token): bias for token, bias in value.items()}


def _response_format(name: str, value: Any) -> StructuredOutputsParams | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    described = value.get("json_schema") if kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, dict) else None
    what = 'of type "text", "json_object", or "json_schema" with json_schema.schema, an object'
    require(isinstance(schema, dict), name, what, value)
    return StructuredOutputsParams(json=schema)


def _structured(name: str, value: Any) -> StructuredOutputsParams:
    known = (*FORMS, "after_thoughts")
    what = f"an object with one of {', '.join(FORMS)}, and perhaps after_thoughts"
    require(isinstance(value, dict) and value.keys() <= set(known), name, what, value)
    return StructuredOutputsParams(**value)


def _guided(kind: str) -> Callable[[str, Any], StructuredOutputsParams]:
    return lambda name, value: StructuredOutputsParams(**{kind: value})


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Field:
    """How one field of a body is treated.

    Attributes:
        to: the field of SamplingParams that it sets. If it sets none, a body is refused unless the value of this field
            asks for nothing.
        read: makes the value of that field.
        nothing: values that ask for nothing, for a field that sets none.
        only: the one url that has this field; None for both.
        remedy: what to do instead, unless that depends on who serves the API.
    """

    to: str | None = None
    read: Callable[[str, Any], Any] = _plain
    nothing: tuple[Any, ...] = ()
    only: str | None = None
    remedy: str = "leave it out"


TEXT_ONLY = "this engine reads and writes text; leave it out"
TEMPLATE = "templates that know it get it through chat_template_kwargs"

FIELDS = {
    # fields of SamplingParams
    **{
        name: Field(to=name)
        for name in (
            *("n", "seed", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        )
    },
    "max_completion_tokens": Field(to="max_tokens"),
    "stop": Field(to="stop", read=_strings),
    "stop_token_ids": Field(to="stop_token_ids", read=_list),
    "ignore_eos": Field(to="ignore_eos", read=_boolean),
    "include_stop_str_in_output": Field(to="include_stop_str_in_output", read=_boolean),
    "skip_special_tokens": Field(to="skip_special_tokens", read=_boolean),
    "logit_bias": Field(to="logit_bias", read=_bias),
    "allowed_token_ids": Field(to="allowed_token_ids", read=_list),
    "bad_words": Field(to="bad_words", read=_list),
    "response_format": Field(to="structured_outputs", read=_response_format),
    "structured_outputs": Field(to="structured_outputs", read=_structured),
    **{
        f"guided_{kind}": Field(to="structured_outputs", read=_guided(kind))
        for kind in ("json", "regex", "choice", "grammar")
    },
    # valid, but only with a value that asks for nothing
    "stream": Field(nothing=(False,), remedy="leave it out or set it to false"),
    "output_kind": Field(nothing=("final_only",)),
    "echo": Field(nothing=(False,), remedy="join prompt and text yourself"),
    "suffix": Field(nothing=("",), only=COMPLETIONS),
    "use_beam_search": Field(nothing=(False,)),
    "length_penalty": Field(nothing=(1,)),
    "prompt_logprobs": Field(),
    "truncate_prompt_tokens": Field(remedy="shorten the prompt yourself"),
    "spaces_between_special_tokens": Field(nothing=(True,)),
    "add_special_tokens": Field(),
    "functions": Field(only=CHAT, remedy="write tools instead"),
    "function_call": Field(nothing=("none", "auto"), only=CHAT, remedy="write tool_choice instead"),
    "modalities": Field(nothing=(["text"],), only=CHAT, remedy=TEXT_ONLY),
    "audio": Field(only=CHAT, remedy=TEXT_ONLY),
    "web_search_options": Field(only=CHAT),
    "reasoning_effort": Field(only=CHAT, remedy=TEMPLATE),
    "verbosity": Field(nothing=("medium",), only=CHAT, remedy=TEMPLATE),
    "chat_template": Field(only=CHAT),
}
# About accounts, storage and speed: no answer depends on them.
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "stream_options"),
    *("prompt_cache_key", "prompt_cache_retention", "prediction", "priority"),
}
# Fields that are ignored, or read elsewhere, together with others on which they depend.
ELSEWHERE = {
    CHAT: IGNORED
    | {
        *("model", "messages", "logprobs", "top_logprobs", "tools", "tool_choice"),
        *("parallel_tool_calls", "chat_template_kwargs", "add_generation_prompt"),
        "continue_final_message",
        "cache_breakpoints",
    },
    COMPLETIONS: IGNORED | {"model", "prompt", "logprobs", "best_of", "cache_breakpoints"},
}


def read_params(
    body: Mapping[str, Any], url: str, defaults: SamplingParams, remedies: Mapping[str, str]
) -> SamplingParams:
    """The sampling parameters of a body. Fields that are left out or null come from `defaults`.

    `remedies` says what to do instead, by field, where that depends on who serves the API.

    Raises:
        RequestError: a field is unknown, not supported, or has a wrong value.
    """
    given: dict[str, tuple[str, Any]] = {}  # field of SamplingParams to the body's name and value
    for name, value in body.items():
        if value is None or name in ELSEWHERE[url]:
            continue
        field = FIELDS.get(name)
        if field is None or field.only not in (None, url):
            raise _unknown(name, url)
        if field.to is not None:
            _add(given, field.to, name, _read(field, name, value))
        elif not any(_same(value, nothing) for nothing in field.nothing):
            raise unsupported(name, value, remedies.get(name, field.remedy))
    _add_logprobs(given, body, url)
    try:
        params = replace(defaults, **{to: value for to, (_, value) in given.items()})
    except (ValueError, NotImplementedError) as error:
        text = str(error).removeprefix("SamplingParams: ").replace("must be None or ", "must be ")
        to = text.partition(" ")[0]
        param = given[to][0] if to in given else None
        raise RequestError(text.replace(to, param, 1) if param else text, param=param) from error
    _check_best_of(body.get("best_of") if url == COMPLETIONS else None, params.n)
    return params


def _read(field: Field, name: str, value: Any) -> Any:
    try:
        return field.read(name, value)
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"{name}: {error}", param=name) from error


def _add(given: dict[str, tuple[str, Any]], to: str, name: str, value: Any) -> None:
    if to in given and given[to][1] != value:
        other, earlier = given[to]
        raise RequestError(
            f"{other} and {name} set the same parameter and must agree, got {brief(earlier)} and "
            f"{brief(value)}; leave one out",
            param=name,
        )
    given[to] = name, value


def _add_logprobs(given: dict[str, tuple[str, Any]], body: Mapping[str, Any], url: str) -> None:
    """Chats have logprobs: true and top_logprobs: k; completions have logprobs: k."""
    asked = body.get("logprobs")
    if url == COMPLETIONS:
        if asked is not None:
            given["logprobs"] = "logprobs", asked
        return
    top = body.get("top_logprobs")
    if asked is not None:
        _boolean("logprobs", asked)
    if asked:
        given["logprobs"] = "top_logprobs", 0 if top is None else top
    elif top is not None and not _same(top, 0):
        raise RequestError(
            f"top_logprobs needs logprobs to be true, got {brief(asked)}", param="top_logprobs"
        )


def _check_best_of(best_of: Any, n: int) -> None:
    if best_of is not None and not _same(best_of, n):
        raise RequestError(
            f"best_of={brief(best_of)} is not supported unless it equals n={n}; leave it out",
            code="unsupported_parameter",
            param="best_of",
        )


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal as JSON, where false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _unknown(name: str, url: str) -> RequestError:
    known = [n for n, field in FIELDS.items() if field.only in (None, url)] + sorted(ELSEWHERE[url])
    near = difflib.get_close_matches(name[:60], known, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    return RequestError(
        f"{url} has no field {brief(name)}; {hint}", code="unknown_parameter", param=name[:60]
    )

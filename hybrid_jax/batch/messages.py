"""The conversation of a chat request, as chat templates expect it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybrid_jax.batch.errors import LineError, shown, unsupported
from hybrid_jax.message_ends import read_indices


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a body: text parts joined by line ends, tool calls' arguments as objects.

    Raises:
        LineError: a message is malformed, or holds something other than text.
    """
    messages = body.get("messages")
    if messages is None:
        raise LineError(
            "the body has no messages", code="missing_required_parameter", param="messages"
        )
    if not isinstance(messages, list) or not messages:
        raise LineError(
            f"messages must be a non-empty list, got {shown(messages)}", param="messages"
        )
    return [_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise LineError(
            f"{where} must be an object with a role and a content, got {shown(message)}",
            param=where,
        )
    read = dict(message)
    if message.get("content") is not None:
        read["content"] = _content(f"{where}.content", message["content"])
    elif message["role"] != "assistant":
        raise LineError(f"{where} has no content", code="missing_required_parameter", param=where)
    if message.get("tool_calls") is not None:
        read["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"])
    return read


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise LineError(
            f"{where} must be a string or a list of parts, got {shown(content)}", param=where
        )
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = shown(part.get("type")) if isinstance(part, dict) else shown(part)
            raise LineError(
                f"{where}[{place}] must be a part of type 'text', the only one supported, got {kind}",
                code="unsupported_parameter",
                param=f"{where}[{place}]",
            )
        if not isinstance(part.get("text"), str):
            got = shown(part.get("text"))
            raise LineError(f"{where}[{place}].text must be a string, got {got}", param=where)
    return "\n".join(part["text"] for part in content)


def _tool_calls(where: str, calls: Any) -> list[Any]:
    """The API writes the arguments of a call as JSON text, templates write them out themselves."""
    if not isinstance(calls, list):
        raise LineError(f"{where} must be a list, got {shown(calls)}", param=where)
    read = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise LineError(
                f"{where}[{place}] must have a function, got {shown(call)}", param=where
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError) as error:
                raise LineError(
                    f"{where}[{place}].function.arguments must be JSON, got {shown(arguments)}",
                    param=where,
                ) from error
        read.append(call | {"function": function | {"arguments": arguments}})
    return read


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """What else `LLM.render_chat` gets: tools, add_generation_prompt, cache_breakpoints, and chat_template_kwargs.

    Raises:
        LineError: one of them is malformed, or tool_choice asks for what is not supported.
    """
    options = dict(_checked(body, "chat_template_kwargs", dict, {}))
    for name in (
        *("messages", "tools", "chat_template", "add_generation_prompt"),
        "cache_breakpoints",
    ):
        if name in options:
            raise LineError(
                f"chat_template_kwargs must not hold {name}", param="chat_template_kwargs"
            )
    options["add_generation_prompt"] = _checked(body, "add_generation_prompt", bool, True)
    if body.get("cache_breakpoints") is not None:
        options["cache_breakpoints"] = _message_indices(body)
    tools = _checked(body, "tools", list, None)
    for place, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise LineError(f"tools[{place}] must be an object, got {shown(tool)}", param="tools")
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", choice, 'use "auto" or "none"')
    if _checked(body, "parallel_tool_calls", bool, True) is False and tools and choice != "none":
        raise unsupported("parallel_tool_calls", False, "leave it out")
    if tools and choice != "none":
        options["tools"] = tools
    return options


def _message_indices(body: Mapping[str, Any]) -> list[int]:
    try:
        return read_indices(body["cache_breakpoints"], len(body["messages"]))
    except ValueError as error:
        text = str(error).removeprefix("chat: ")
        raise LineError(text, param="cache_breakpoints") from error


def _checked(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        what = {dict: "an object", list: "a list", bool: "true or false"}[kind]
        raise LineError(f"{name} must be {what}, got {shown(value)}", param=name)
    return value

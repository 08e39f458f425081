"""Conversations as callers write them, checked and brought into the form that chat templates expect."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

Conversation = Sequence[Mapping[str, Any]]

COMMON_ROLES = ("system", "user", "assistant", "tool")
ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("ai", "bot", "gpt", "model"), "assistant"),
    "function": "tool",
}
# What `LLM.chat` takes by name, so that chat_template_kwargs may not bring it a second time.
NAMED = ("add_generation_prompt", "cache_breakpoints", "chat_template", "messages", "tools")


class ConversationError(ValueError):
    """A conversation cannot become a prompt.

    Args:
        what: names the place, the value and the remedy.
        place: what it is about, such as "messages[0].content[1]".
        code: what kind of mistake, in one word for programs.

    Attributes:
        conversation: index of the conversation where several were given, else None.

    Example:
        >>> error = ConversationError("messages[1] has no content", place="messages[1]")
        >>> error.conversation = 3
        >>> print(error)
        chat: conversation 3: messages[1] has no content
    """

    def __init__(self, what: str, *, place: str = "messages", code: str = "invalid_value") -> None:
        super().__init__(what)
        self.place, self.code = place, code
        self.conversation: int | None = None

    @property
    def what(self) -> str:
        return self.args[0]

    def __str__(self) -> str:
        where = "" if self.conversation is None else f"conversation {self.conversation}: "
        return f"chat: {where}{self.what}"


def are_several(messages: Any) -> bool:
    """Whether this is a list of conversations, and not one."""
    return _is_list(messages) and len(messages) > 0 and _is_list(messages[0])


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of one conversation: text parts joined by line ends, tool calls' arguments as objects.

    Raises:
        ConversationError: a message is malformed, or holds something other than text.

    Example:
        >>> parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
        >>> read_messages([{"role": "user", "content": parts}])
        [{'role': 'user', 'content': 'hello\\nthere'}]
    """
    if not _is_list(messages) or not messages:
        raise ConversationError(f"messages must be a non-empty list, got {reprlib.repr(messages)}")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def check_roles(messages: Conversation, others: frozenset[str]) -> None:
    """ConversationError for a role that is neither a common one nor one of `others`, the chat template's own."""
    for index, message in enumerate(messages):
        role = message["role"]
        if role in ROLES or role in others:
            continue
        name = role.lower()
        near = OTHER_ROLES.get(name) or next(iter(get_close_matches(name, ROLES, n=1)), None)
        hint = f"; did you mean {near}?" if near else ""
        raise ConversationError(
            f"messages[{index}].role must be one of {', '.join(ROLES)}, or another that the chat template "
            f"names, got {reprlib.repr(role)}{hint}",
            place=f"messages[{index}].role",
        )


def check_shown(messages: Conversation, text: str) -> None:
    """ConversationError where a template has left out a message, as many do with a role that they do not know.

    Messages of the four roles that every template knows are not looked at: some of them change their text.
    """
    for index, message in enumerate(messages):
        if message["role"] in COMMON_ROLES:
            continue
        content = message["content"].strip()
        if not any(
            form in text for form in (content, json.dumps(content, ensure_ascii=False)[1:-1])
        ):
            raise ConversationError(
                f"messages[{index}] is left out by the chat template, which does not know the role "
                f"{reprlib.repr(message['role'])}; use {' or '.join(COMMON_ROLES)}",
                place=f"messages[{index}].role",
            )


def check_tools(tools: Any) -> None:
    """ConversationError for Python functions and what else is no JSON schema: a template would print its repr."""
    if not _is_list(tools):
        raise ConversationError(
            f"tools must be a list of JSON schemas, got {reprlib.repr(tools)}", place="tools"
        )
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ConversationError(
                f"tools[{index}] must be a JSON schema like {{'type': 'function', 'function': ...}}, got "
                f"{reprlib.repr(tool)}",
                place="tools",
            )


def template_options(
    *,
    add_generation_prompt: Any = True,
    chat_template: Any = None,
    chat_template_kwargs: Any = None,
    tools: Any = None,
) -> dict[str, Any]:
    """Arguments of `Tokenizer.apply_chat_template`; an empty list of tools is none.

    Raises:
        ConversationError: one of them is not what it should be, or `chat_template_kwargs` holds what has a
            name of its own.
    """
    if not isinstance(add_generation_prompt, bool):
        raise ConversationError(
            f"add_generation_prompt must be true or false, got {reprlib.repr(add_generation_prompt)}",
            place="add_generation_prompt",
        )
    if chat_template is not None and not isinstance(chat_template, str):
        raise ConversationError(
            "chat_template must be Jinja source or the name of one of the model's templates, got "
            f"{reprlib.repr(chat_template)}",
            place="chat_template",
        )
    if tools is not None:
        check_tools(tools)
    more = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(more, Mapping) or not all(isinstance(name, str) for name in more):
        raise ConversationError(
            f"chat_template_kwargs must map names to values, got {reprlib.repr(more)}",
            place="chat_template_kwargs",
        )
    twice = next((name for name in NAMED if name in more), None)
    if twice is not None:
        raise ConversationError(
            f"chat_template_kwargs must not hold {twice}; give {twice} beside it",
            place="chat_template_kwargs",
        )
    return {
        "add_generation_prompt": add_generation_prompt,
        "chat_template": chat_template,
        "tools": list(tools) if tools else None,
        **more,
    }


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConversationError(
            f"{where} must have a role and a content, got {reprlib.repr(message)}", place=where
        )
    read = dict(message)
    if message.get("content") is not None:
        read["content"] = _content(f"{where}.content", message["content"])
    elif message["role"] != "assistant":
        raise ConversationError(
            f"{where} has no content", place=where, code="missing_required_parameter"
        )
    elif not message.get("tool_calls"):
        raise ConversationError(
            f"{where} has no content and no tool_calls; an assistant's message needs one of them",
            place=where,
            code="missing_required_parameter",
        )
    calls = read.pop("tool_calls", None)
    if calls is not None and (calls := _tool_calls(f"{where}.tool_calls", calls)):
        read["tool_calls"] = calls  # templates take an empty list for calls
    return read


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise ConversationError(
            f"{where} must be a string or a list of parts, got {reprlib.repr(content)}",
            place=where,
        )
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part["type"] if isinstance(part, Mapping) and "type" in part else part
            raise ConversationError(
                f"{where}[{index}] must be a part of type 'text', the only one supported, got "
                f"{reprlib.repr(kind)}",
                place=f"{where}[{index}]",
                code="unsupported_parameter",
            )
        if not isinstance(part.get("text"), str):
            raise ConversationError(
                f"{where}[{index}].text must be a string, got {reprlib.repr(part.get('text'))}",
                place=where,
            )
    return "\n".join(part["text"] for part in content)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not _is_list(calls):
        raise ConversationError(f"{where} must be a list, got {reprlib.repr(calls)}", place=where)
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ConversationError(
                f"{where}[{index}] must have a function, got {reprlib.repr(call)}", place=where
            )
        arguments = _arguments(f"{where}[{index}]", function.get("arguments"), place=where)
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _arguments(where: str, given: Any, *, place: str) -> Mapping[str, Any]:
    """The API writes the arguments of a call as JSON text; templates get the object and write it themselves."""
    arguments = given
    if given is None or given == "":
        arguments = {}
    elif isinstance(given, str):
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise ConversationError(
            f"{where}.function.arguments must be JSON of an object, got {reprlib.repr(given)}",
            place=place,
        )
    return arguments

"""The form of a conversation that a chat template reads, found by rendering small ones. Others are converted to it.

Clients write one thing in several ways: a content as text or as a list of parts, arguments of a call as an object or as
its JSON text, no content as null or as an empty text. Many templates know one of them, and print the others as they
are, or lose them. So each template is tried once with words that occur nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid_jax.text.template_limits import LimitExceeded

Message = Mapping[str, Any]
Messages = Sequence[Message]
Render = Callable[[Messages], str]

FIRST, SECOND, NAME, KEY, VALUE = "kqfirst", "kqsecond", "kqname", "kqkey", "kqvalue"
PARTS = [{"type": "text", "text": FIRST}, {"type": "text", "text": SECOND}]
TRIAL_TOOL = {
    "type": "function",
    "function": {
        "name": "kqtool",
        "description": "kqtool",
        "parameters": {"type": "object", "properties": {}},
    },
}
ABSENT = ("", None)  # what may stand for the content of a message that only calls tools


@dataclass(frozen=True)
class TemplateForm:
    """What a template reads.

    Attributes:
        contents: for each role, whether its contents are read as text, as parts, or as both.
        arguments: whether arguments of calls are read as an object or as JSON text.
        no_content: what stands for the content of a message that only calls tools.
    """

    contents: Mapping[str, Literal["text", "parts", "both"]] = field(default_factory=dict)
    arguments: Literal["object", "text"] = "object"
    no_content: str | None = ""

    def fit(self, messages: Messages) -> list[dict[str, Any]]:
        """Messages in this form. They must be as `read_messages` gives them; the given ones stay as they are."""
        return [self._fitted(message) for message in messages]

    def _fitted(self, message: Message) -> dict[str, Any]:
        fitted, calls = dict(message), message.get("tool_calls")
        if calls:
            read = as_text if self.arguments == "text" else as_object
            fitted["tool_calls"] = [_with_arguments(call, read) for call in calls]
        if calls and not message.get("content"):
            fitted["content"] = self.no_content
        if "content" in fitted:
            fitted["content"] = self._content(message.get("role"), fitted["content"])
        return fitted

    def _content(self, role: Any, content: Any) -> Any:
        # A role of which nothing is known is read as all others are.
        alike = {*self.contents.values()}
        read = self.contents.get(role, "parts" if alike == {"parts"} else "text")
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if read == "parts" else content
        if read == "text" and _are_parts(content):
            return "\n".join(part["text"] for part in content)
        return [*content] if isinstance(content, list) else content


def _are_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    )


def _with_arguments(call: Any, read: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": read(function.get("arguments"))}}


def as_object(arguments: Any) -> Any:
    """The arguments of a call as an object, if they are one or its JSON text; else as they are."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            return json.loads(arguments)
    return arguments


def as_text(arguments: Any) -> str:
    """The arguments of a call as JSON text. What a client wrote as text stays as it is."""
    if isinstance(arguments, str) and arguments:
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)


# --- trying a template ------------------------------------------------------------------------------


def form_of(render: Render) -> TemplateForm:
    """The form that a template reads.

    Args:
        render: makes text of messages, and may raise any exception.
    """
    try:
        absent, arguments = _calls(render)
        call = _call({KEY: VALUE} if arguments == "object" else json.dumps({KEY: VALUE}), absent)
        roles = ("system", "developer", "user", "assistant", "tool")
        contents = {role: read for role in roles if (read := _contents(render, role, call))}
    except LimitExceeded:
        return TemplateForm()  # nor will it finish with what it is meant for
    return TemplateForm(contents, arguments, absent)


def _says(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _call(arguments: Any, content: Any) -> dict[str, Any]:
    function = {"name": NAME, "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _rendered(render: Render, messages: Messages) -> str:
    """The text of messages; empty if the template refuses them, because some know no tools, or no system."""
    try:
        return render(
            deepcopy(messages)
        )  # Jinja's filter `indent` adds a line end to a list itself
    except Exception as error:
        if isinstance(error.__cause__, LimitExceeded):
            raise error.__cause__ from None
        return ""


def _calls(render: Render) -> tuple[str | None, Literal["object", "text"]]:
    """What stands for no content, and how arguments are read: the first with which a call is printed in full."""
    text = json.dumps({KEY: VALUE})
    for absent in ABSENT:
        for messages in _around_a_call(_call({KEY: VALUE}, absent)):
            printed = _rendered(render, messages)
            if NAME in printed and VALUE in printed and f"'{KEY}'" not in printed:
                return absent, "object"
        for messages in _around_a_call(_call(text, absent)):
            printed = _rendered(render, messages)
            if NAME in printed and text in printed and "'arguments'" not in printed:
                return absent, "text"
    return "", "object"


def _around_a_call(call: Message) -> Iterator[Messages]:
    yield [_says("user", "a"), call]
    yield [_says("user", "a"), call, _says("tool", "b") | {"tool_call_id": "call00001"}]


def _contents(render: Render, role: str, call: Message) -> Literal["text", "parts", "both"] | None:
    """How the contents of a role are read in every place where it may stand; None if it may stand nowhere."""
    text, parts, tried = True, True, False
    for plain, listed in zip(_places(role, FIRST, call), _places(role, PARTS, call), strict=True):
        of_text, of_parts = _rendered(render, plain), _rendered(render, listed)
        is_text = FIRST in of_text
        is_parts = FIRST in of_parts and SECOND in of_parts and not _shows_keys(of_parts)
        if is_text or is_parts:
            text, parts, tried = text and is_text, parts and is_parts, True
    if not tried:
        return None
    if parts:
        return "both" if text else "parts"
    return "text"


def _shows_keys(text: str) -> bool:
    """Whether a list of parts was printed as it is, by Python or as JSON."""
    return "'text'" in text or '"text"' in text or '\\"text' in text


def _places(role: str, content: Any, call: Message) -> Iterator[Messages]:
    """Conversations in which a role has this content."""
    user, answer, tried = _says("user", "a"), _says("assistant", "b"), _says(role, content)
    if role in ("system", "developer"):
        yield [tried, user]
    elif role == "user":
        yield [tried]
        yield [_says("system", "c"), tried]
        yield [user, answer, tried]
    elif role == "assistant":
        yield [user, tried]
        yield [user, tried, user]
    else:
        tried["tool_call_id"] = "call00001"
        yield [user, call, tried]
        yield [user, call, tried, answer, user]

"""Conversations as callers write them: checked, converted to the form that templates expect, and their ends found."""

from __future__ import annotations

import itertools
import json
import reprlib
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from hybrid_jax.config.checks import integers_of
from hybrid_jax.text.template_forms import as_object
from hybrid_jax.text.thoughts import closing_mark, first_named

Conversation = Sequence[Mapping[str, Any]]

SYSTEM_ROLES = ("system", "developer")
COMMON_ROLES = ("system", "user", "assistant", "tool")
ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("ai", "bot", "gpt", "model"), "assistant"),
    "function": "tool",
}
# Parameters of `LLM.chat`, which chat_template_kwargs must not give a second time.
NAMED = (
    *("add_generation_prompt", "cache_breakpoints", "chat_template", "continue_final_message"),
    *("messages", "tools"),
)
# Names that Python, Jinja or a tokenizer's own method of that kind takes.
TAKEN = ("self", "conversation", "tokenize", "return_dict", "return_tensors")
# Names of a message's thoughts. Servers write one and templates read another.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Names under which servers write them as well, and no template reads them.
MORE_THOUGHTS = (
    *("reasoning_details", "reasoning_text", "thinking_blocks", "thinking_content"),
    *("thought", "thoughts"),
)
# Types of parts: those that are text, by the field that holds it, and those that are thoughts.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THOUGHT_PARTS = (
    *("reasoning", "reasoning.summary", "reasoning.text", "reasoning_text", "summary_text"),
    *("text", "thinking"),
)
IN_THOUGHT_PARTS = ("thinking", "reasoning", "text", "summary")
# How an interface marks a message or a part; the mark of a message here is "cache": true.
CACHE_CONTROL, EPHEMERAL = "cache_control", {"type": "ephemeral"}
# Fields that are read, or that say nothing to a model.
READ = frozenset(("role", "content", "tool_calls", "tool_call_id", "refusal", "id", "name", "type"))
READ |= {*THOUGHTS, *MORE_THOUGHTS}
# Fields that carry something that a model is meant to see. Templates of models of text do not read them.
CARRYING = frozenset(
    "attachments audio audios documents file files image image_url images input_audio video videos".split()
)


class ConversationError(ValueError):
    """A conversation cannot become a prompt.

    Args:
        what: names the argument and the value, and says what to do.
        param: the argument that is wrong, such as "messages[0].content[1]".
        code: the kind of mistake, as one word for programs.

    Attributes:
        conversation: index of the conversation if several were given, else None.

    Example:
        >>> error = ConversationError("messages[1] has no content", param="messages[1]")
        >>> error.conversation = 3
        >>> print(error)
        chat: conversation 3: messages[1] has no content
    """

    def __init__(self, what: str, *, param: str = "messages", code: str = "invalid_value") -> None:
        super().__init__(what)
        self.param, self.code = param, code
        self.conversation: int | None = None

    @property
    def what(self) -> str:
        """The message without the index of the conversation."""
        return self.args[0]

    def __str__(self) -> str:
        where = "" if self.conversation is None else f"conversation {self.conversation}: "
        return f"chat: {where}{self.what}"


def _wrong(what: str, got: Any, param: str, *, code: str = "invalid_value") -> ConversationError:
    """The error for a value that is not what it must be."""
    return ConversationError(f"{what}, got {reprlib.repr(got)}", param=param, code=code)


def are_several(messages: Any) -> bool:
    """Whether this is a list of conversations, and not one."""
    return _is_list(messages) and len(messages) > 0 and _is_list(messages[0])


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of one conversation, checked, as dicts without nulls. Thoughts stand under each of their names.

    The form of contents and of arguments is left to the chat template: see `TemplateForm`. A marked message has
    "cache": True, in whatever form the mark came; `take_marks` takes it out.

    Args:
        messages: dicts, or objects of a client's library: dataclasses, or with a method `model_dump`.

    Raises:
        ConversationError: a message is malformed, or holds something other than text.

    Example:
        >>> read_messages([{"role": "user", "content": "hi", "name": None}])
        [{'role': 'user', 'content': 'hi'}]
        >>> [answer] = read_messages([{"role": "assistant", "content": "4", "reasoning": "2 + 2"}])
        >>> answer["thinking"], answer["reasoning_content"]
        ('2 + 2', '2 + 2')
    """
    if not _is_list(messages) or not messages:
        raise _wrong("messages must be a non-empty list", messages, "messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def take_marks(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Takes the marks out of messages, because no template may see them; returns the indices of the marked ones.

    Example:
        >>> messages = read_messages([{"role": "user", "content": "hi", "cache": True}])
        >>> take_marks(messages), messages
        ([0], [{'role': 'user', 'content': 'hi'}])
    """
    return [index for index, message in enumerate(messages) if message.pop("cache", False)]


def check_roles(messages: Conversation, others: frozenset[str]) -> None:
    """ConversationError for a role that is neither in `ROLES` nor one of `others`, those of the chat template."""
    for index, message in enumerate(messages):
        role = message["role"]
        if role in ROLES or role in others:
            continue
        name = role[:60].lower()  # a comparison takes long for a long text
        near = OTHER_ROLES.get(name) or next(iter(get_close_matches(name, ROLES, n=1)), None)
        hint = f"; did you mean {near}?" if near else ""
        raise ConversationError(
            f"messages[{index}].role must be one of {', '.join(ROLES)}, or another that the chat template "
            f"names, got {reprlib.repr(role)}{hint}",
            param=f"messages[{index}].role",
        )


def check_rendered(messages: Conversation, text: str) -> None:
    """ConversationError if a template left out a message, as many do with a role that they do not know.

    The four roles that every template knows are not checked, because some templates change the text of their messages.
    """
    position = 0  # where the last one was found; most templates print messages in order
    for index, message in enumerate(messages):
        if message["role"] in COMMON_ROLES:
            continue
        for content in map(str.strip, text_of(message["content"])):
            found = text.find(content, position)
            position = max(found, position)
            if found >= 0 or _stands_in(text, content):
                continue
            raise ConversationError(
                f"messages[{index}] is left out by the chat template, which does not know the role "
                f"{reprlib.repr(message['role'])}; use {' or '.join(COMMON_ROLES)}",
                param=f"messages[{index}].role",
            )


def unread_fields(messages: Conversation, source: str, text: str) -> set[str]:
    """The names of fields that stand in messages, and that neither the engine nor the chat template reads.

    Args:
        messages: of the conversation.
        source: of the template.
        text: that it has made. One that prints whole messages prints the names of all fields.

    Raises:
        ConversationError: such a field carries more than text, as `images` does.
    """
    unread = {
        name
        for name in set().union(*messages) - READ
        if name not in source and f"'{name}'" not in text and f'"{name}"' not in text
    }
    for index, message in enumerate(messages):
        for name in message.keys() & unread & CARRYING:
            if message[name] not in ("", [], {}):
                where = f"messages[{index}].{name}"
                what = f"{where} is not read by the chat template; write what it says into the content, or leave it out"
                raise _wrong(what, message[name], where, code="unsupported_parameter")
    return unread


def _stands_in(text: str, content: str) -> bool:
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def check_tools(tools: Any) -> None:
    """ConversationError for tools that are not JSON schemas. A template would print the repr of a Python function."""
    if not _is_list(tools):
        raise _wrong("tools must be a list of JSON schemas", tools, "tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            what = "must be a JSON schema like {'type': 'function', 'function': ...}"
            raise _wrong(f"tools[{index}] {what}", tool, "tools")


def template_options(
    *,
    add_generation_prompt: Any = None,
    chat_template: Any = None,
    chat_template_kwargs: Any = None,
    continue_final_message: Any = False,
    tools: Any = None,
) -> dict[str, Any]:
    """Arguments of `Tokenizer.apply_chat_template`. An empty list of tools becomes None.

    Raises:
        ConversationError: an argument is not what it must be, or `chat_template_kwargs` holds one that has a parameter
            of its own.
    """
    if not isinstance(continue_final_message, bool):
        what = "continue_final_message must be true or false"
        raise _wrong(what, continue_final_message, "continue_final_message")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    if not isinstance(add_generation_prompt, bool):
        what = "add_generation_prompt must be true or false"
        raise _wrong(what, add_generation_prompt, "add_generation_prompt")
    check_continuation(continue_final_message, add_generation_prompt)
    if chat_template is not None and not isinstance(chat_template, str):
        what = "chat_template must be Jinja source or the name of one of the model's templates"
        raise _wrong(what, chat_template, "chat_template")
    if tools is not None:
        check_tools(tools)
    more = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(more, Mapping) or not all(isinstance(name, str) for name in more):
        what = "chat_template_kwargs must map names to values"
        raise _wrong(what, more, "chat_template_kwargs")
    taken = next((name for name in TAKEN if name in more), None)
    if taken is not None:
        raise ConversationError(
            f"chat_template_kwargs must not hold {taken}, a name that means something else; call it otherwise",
            param="chat_template_kwargs",
        )
    twice = next((name for name in NAMED if name in more), None)
    if twice is not None:
        raise ConversationError(
            f"chat_template_kwargs must not hold {twice}; give {twice} beside it",
            param="chat_template_kwargs",
        )
    return {
        "add_generation_prompt": add_generation_prompt,
        "chat_template": chat_template,
        "continue_final_message": continue_final_message,
        "tools": list(tools) if tools else None,
        **more,
    }


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _message(where: str, message: Any) -> dict[str, Any]:
    try:
        message = _as_dict(message)
    except RecursionError:
        what = f"{where} holds values in values in values, too many to be read; write it flatter"
        raise ConversationError(what, param=where) from None
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _wrong(f"{where} must have a role and a content", message, where)
    read = {key: value for key, value in message.items() if value is not None}
    if "function_call" in read:
        what = f"{where}.function_call is not read; write tool_calls instead"
        raise _wrong(what, read["function_call"], where, code="unsupported_parameter")
    if _is_marked(where, read):
        read["cache"] = True
    calls = _tool_calls(f"{where}.tool_calls", read.pop("tool_calls", []))
    if calls:
        read["tool_calls"] = calls  # an empty list would look like calls to a template
    is_answer = message["role"] == "assistant"
    thoughts: list[str] = []
    if "content" in read:
        content = _content(f"{where}.content", read["content"], thoughts if is_answer else None)
        read["content"] = content
    elif read["role"] == "tool":
        read["content"] = ""  # it worked, and there is nothing to say
    elif is_answer and isinstance(read.get("refusal"), str):
        # The interface that has this field gives no content beside it.
        read["content"] = read["refusal"]
    elif is_answer and (calls or any(name in read for name in (*THOUGHTS, *MORE_THOUGHTS))):
        read["content"] = ""
    else:
        what = f"{where} has no content"
        if is_answer:
            what += " and no tool_calls; an assistant's message needs one of them"
        raise ConversationError(what, param=where, code="missing_required_parameter")
    return _with_thoughts(read | _found_thoughts(where, read, thoughts) if is_answer else read)


def _is_marked(where: str, message: dict[str, Any]) -> bool:
    """Whether a message, or its last part, is marked as one after which conversations go on differently.

    Takes the marks out of the message. `_content` takes them out of its parts.

    Raises:
        ConversationError: a mark says something else, or stands on a part before the last.
    """
    marked = message.pop("cache", False)
    if not isinstance(marked, bool):
        what = (
            f"{where}.cache must be true, to keep a checkpoint at the end of the message, or false"
        )
        raise _wrong(what, marked, f"{where}.cache")
    content: Any = message.get("content")
    parts = [*content] if _is_list(content) else []
    marks = [(where, message.pop(CACHE_CONTROL, None))]
    marks += [
        (f"{where}.content[{index}]", part.get(CACHE_CONTROL))
        for index, part in enumerate(parts)
        if isinstance(part, Mapping)
    ]
    for holder, mark in marks:
        if mark is None:
            continue
        place = f"{holder}.{CACHE_CONTROL}"
        if mark != EPHEMERAL:
            what = f"{place} must be {EPHEMERAL}, without a time to live"
            raise _wrong(what, mark, place)
        if holder not in (where, f"{where}.content[{len(parts) - 1}]"):
            what = f"{place} stands before the end of the message; put it on the last part"
            raise _wrong(what, mark, place, code="unsupported_parameter")
        marked = True
    return marked


def _as_dict(value: Any) -> Any:
    """Objects of a client's library as dicts, with all that is inside of them; everything else as it is."""
    if isinstance(value, Mapping):
        return {key: _as_dict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_dict(inner) for inner in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _as_dict(getattr(value, entry.name)) for entry in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return _as_dict(dump())
    return value


def _found_thoughts(where: str, message: Mapping[str, Any], of_parts: list[str]) -> dict[str, str]:
    """The thoughts of an answer as text, under the first of their names and under those where they stand already.

    Raises:
        ConversationError: they cannot be read, or stand in several places and differ.
    """
    named = {
        name: _thought(f"{where}.{name}", message[name])
        for name in (*THOUGHTS, *MORE_THOUGHTS)
        if name in message
    }
    found = {name: text for name, text in named.items() if name in THOUGHTS}
    others = {name: text for name, text in named.items() if name in MORE_THOUGHTS}
    others["content"] = "\n".join(of_parts)
    known = [text for text in found.values() if text]
    for name, text in others.items():
        if text and text.strip() not in map(str.strip, known or [text]):
            raise _wrong(
                f"{where} has other thoughts under {name} than elsewhere; give them once",
                text,
                where,
            )
        known = known or [text] * bool(text)
    return found if any(found.values()) or not known else found | {THOUGHTS[0]: known[0]}


def _thought(where: str, value: Any, *, deepest: int = 2) -> str:
    """Thoughts as text: a text, a part that holds one, or a list of these. A part may hold such a list."""
    if isinstance(value, str):
        return value
    if _is_list(value) and deepest:
        return "\n".join(
            _thought(f"{where}[{index}]", part, deepest=deepest - 1)
            for index, part in enumerate(value)
        )
    if isinstance(value, Mapping) and value.get("type") in THOUGHT_PARTS:
        inner = next(
            (value[name] for name in IN_THOUGHT_PARTS if value.get(name) is not None), None
        )
        if isinstance(inner, str) or _is_list(inner):
            return _thought(where, inner, deepest=deepest)
    what = f"{where} must be text, or parts of text; leave it out if it is not meant to be read"
    raise _wrong(what, value, where, code="unsupported_parameter")


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its thoughts under each name under which a template may look for them."""
    given = [text for name in THOUGHTS if isinstance(text := message.get(name), str)]
    if not given:
        return message
    thoughts = next(filter(None, given), "")
    return dict.fromkeys(THOUGHTS, thoughts) | {
        key: value for key, value in message.items() if key not in THOUGHTS or value
    }


def _content(where: str, content: Any, thoughts: list[str] | None) -> str | list[Any]:
    """A content without the thoughts in it, which are put into the given list; None if there may be none."""
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise _wrong(f"{where} must be a string or a list of parts", content, where)
    read = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if thoughts is not None and kind in ("thinking", "reasoning"):
            thoughts.append(_thought(f"{where}[{index}]", part))
            continue
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            what = f"{where}[{index}] must be a part of type 'text', the only one supported"
            given = part if kind is None else kind
            raise _wrong(what, given, f"{where}[{index}]", code="unsupported_parameter")
        if not isinstance(part.get(field), str):
            raise _wrong(f"{where}[{index}].{field} must be a string", part.get(field), where)
        text = {key: value for key, value in part.items() if key != CACHE_CONTROL}
        read.append(text if kind == "text" else {"type": "text", "text": part[field]})
    return read or ""


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not _is_list(calls):
        raise _wrong(f"{where} must be a list", calls, where)
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise _wrong(f"{where}[{index}] must have a function", call, where)
        if not isinstance(as_object(function.get("arguments")), Mapping):
            what = f"{where}[{index}].function.arguments must be JSON of an object"
            raise _wrong(what, function["arguments"], where)
        given = {key: value for key, value in call.items() if value is not None}
        read.append(given | {"function": {k: v for k, v in function.items() if v is not None}})
    return read


def text_of(content: Any) -> list[str]:
    """The texts of a content: one, or those of its parts."""
    return [content] if isinstance(content, str) else [part["text"] for part in content or ()]


# --- a last message that goes on --------------------------------------------------------------------

# Stands at the end of the last message while a template renders it. A template that trims takes the space away.
MARK = "kq-the-last-message-goes-on-here-kq"


def check_continuation(continue_final_message: bool, add_generation_prompt: bool) -> None:
    """ConversationError if the last message is to be continued and another is to begin after it."""
    if continue_final_message and add_generation_prompt:
        raise ConversationError(
            "continue_final_message goes on with the last message, and add_generation_prompt begins another one, got "
            "true for both; leave one of them out",
            param="continue_final_message",
        )


def render_open(render: Callable[[Conversation], str], messages: Conversation) -> str:
    """The text of a conversation up to the end of the last message's content, so that the model continues it.

    Spaces at its end are there only if the template keeps them.

    Args:
        render: makes text of messages, without the beginning of another.
        messages: of the conversation, in the form that the template reads.

    Raises:
        ConversationError: the last message has no content, or calls after it, or the template does not print it as
            it is.
    """
    *others, last = messages
    texts = text_of(last.get("content"))
    if last.get("tool_calls"):
        raise ConversationError(
            f"messages[{len(others)}] has tool_calls behind its content, so continue_final_message cannot go on with "
            "it; leave continue_final_message out",
            param="continue_final_message",
        )
    if not texts:
        raise ConversationError(
            f"messages[{len(others)}] has no content to go on with, as continue_final_message asks; write its "
            "beginning, or leave continue_final_message out",
            param="continue_final_message",
        )
    content = last["content"]
    if isinstance(content, str):
        marked: Any = f"{content}{MARK} "
    else:
        marked = [*content[:-1], {**content[-1], "text": f"{texts[-1]}{MARK} "}]
    text = render([*others, {**last, "content": marked}])
    beginning, found, after = text.rpartition(MARK)
    if not found or texts[-1].strip() not in beginning:
        raise ConversationError(
            f"messages[{len(others)}] is changed or left out by the chat template, so continue_final_message cannot go "
            "on with it; leave continue_final_message out",
            param="continue_final_message",
        )
    return beginning if after.startswith(" ") else beginning.rstrip()


# --- where messages end ---------------------------------------------------------------------------


def message_ends(
    render: Callable[..., str],
    messages: Conversation,
    indices: Sequence[int] | None,
    marked: Sequence[int],
    text: str,
    template: dict[str, Any],
) -> list[int]:
    """Where messages end in the text of their conversation. Others that begin like it have the same text up to there.

    A template may trim, move or drop parts of a message, so the text is not searched. Instead the conversation is
    rendered again with the content and the thoughts of the next message changed. Up to where the two texts differ,
    nothing depends on it.

    Args:
        render: makes text of messages and of the options of a template, which are keywords.
        messages: the conversation.
        indices: of the messages, negative ones counted from the end; None for the system messages at the beginning,
            if the template can render them.
        marked: indices of further messages, those that have a mark.
        text: of the whole conversation.
        template: the options it was rendered with.

    Returns:
        A number of leading characters for each of these messages.

    Raises:
        ConversationError: there is no such message, or the template refuses to render the conversation with another
            content.
    """
    named = None if indices is None else _read_indices(indices, len(messages))
    ends = []
    for index in sorted({*(named or ()), *marked}):
        try:
            ends.append(_end(render, messages, index, text, template))
        except Exception as error:
            where = f"messages[{index}].cache" if index in marked else "cache_breakpoints"
            what = f"{where}: the template does not tell where messages end ({error})"
            remedy = "leave it out" if index in marked else "leave them out"
            raise ConversationError(f"{what}; {remedy}", param=where) from error
    if named is not None:
        return ends
    opening = itertools.takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages)
    count = sum(1 for _ in opening)
    if count in (0, len(messages)) or count - 1 in marked:
        return ends
    try:
        return [_end(render, messages, count - 1, text, template), *ends]
    except Exception:  # a template is a program, which here met a content that nobody wrote
        return ends  # and nobody asked for this


def thoughts_cut(
    render: Callable[..., str],
    messages: Conversation,
    text: str,
    template: dict[str, Any],
    source: str,
) -> int | None:
    """Where the next prompt of a conversation will leave the text of this one, because thoughts are cut.

    Once the user goes on, templates of models that think drop the thoughts of the turns before, and often what opens
    them at the end of this text, too. Others keep them, but many clients do not. So the conversation is rendered as it
    will be when an answer without thoughts and a message of the user have come.

    Args:
        render, messages, text, template: as in `message_ends`.
        source: of the template, which is rendered only if that names thoughts; empty if nothing is known of it.

    Returns:
        A number of leading characters; None if the whole text stays, or the template refuses such a conversation.
    """
    if source and not first_named(source) and not any(name in source for name in THOUGHTS):
        return None
    other = _unlike(text[-1000:])
    if template["continue_final_message"]:
        *before, last = messages
        texts = text_of(last["content"])
        texts.append(closing_mark("".join(texts)) + other)
        whole = [{"type": "text", "text": part} for part in texts]
        answered = [*before, {**last, "content": whole}]
    else:
        answered = [*messages, {"role": "assistant", "content": other}]
    options = template | {"add_generation_prompt": True, "continue_final_message": False}
    try:
        following = render([*answered, {"role": "user", "content": other}], **options)
    except Exception:  # as above
        return None
    same = common_length(text, following)
    return same if same < len(text) else None


def _read_indices(given: Any, count: int) -> list[int]:
    """Indices of messages, all in [0, count), each once; given ones may be negative, to count from the end."""
    indices = integers_of(given)
    if indices is None:
        what = "cache_breakpoints must be a list of message indices"
        raise _wrong(what, given, "cache_breakpoints")
    if len(indices) > count:
        raise ConversationError(
            f"cache_breakpoints has {len(indices)} entries for a conversation of {count} messages; name each message "
            "once at most",
            param="cache_breakpoints",
        )
    wrong = next((index for index in indices if not -count <= index < count), None)
    if wrong is not None:
        raise ConversationError(
            f"cache_breakpoints: there is no message {wrong} in a conversation of {count}",
            param="cache_breakpoints",
        )
    return sorted({index % count for index in indices})


def _end(
    render: Callable[..., str],
    messages: Conversation,
    index: int,
    text: str,
    template: dict[str, Any],
) -> int:
    if index == len(messages) - 1:
        other = render(messages, **template | {"add_generation_prompt": False})
    else:
        following = messages[index + 1]
        said = [name for name in ("content", *THOUGHTS) if following.get(name)] or ["content"]
        changed = {**following, **{name: _unlike(following.get(name)) for name in said}}
        other = render([*messages[: index + 1], changed, *messages[index + 2 :]], **template)
    return common_length(text, other)


def common_length(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning.

    Example:
        >>> common_length("one and two", "one and three")
        9
    """
    same, size = 0, 1
    while one[same : same + size] == other[same : same + size]:
        same += size
        if same >= len(one):
            return min(len(one), len(other))
        size *= 2
    while size > 1:  # they differ within so many characters
        size //= 2
        if one[same : same + size] == other[same : same + size]:
            same += size
    return same


def _unlike(content: str | Sequence[Any] | None) -> str:
    """A text of one character that this content does not begin with, whatever a template trims from it."""
    beginning = "".join(text_of(content))[:1000]
    return next((letter for letter in string.ascii_letters if letter not in beginning), "\x00")

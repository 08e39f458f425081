"""Where the messages of a conversation end in its text: what other conversations that begin like it will share.

A template may trim, move or drop parts of a message, so nothing is looked for in the text. The conversation is rendered
again with the next message's content changed: up to where the two texts part, nothing depends on it.
"""

from __future__ import annotations

import itertools
import operator
import os
import reprlib
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hybrid_jax.config.checks import is_integer
from hybrid_jax.text.messages import Conversation, ConversationError

SYSTEM_ROLES = ("system", "developer")


def message_ends(
    render: Callable[..., str],
    messages: Conversation,
    indices: Sequence[int] | None,
    text: str,
    template: dict[str, Any],
) -> list[int]:
    """Leading characters of a conversation's text that depend on nothing behind some of its messages.

    Args:
        render: messages and the options of a template, as keywords, to text.
        indices: of the messages, negative ones from the end; None for the system messages that it opens with, where
            the template can tell.
        text: of the whole conversation.
        template: the options it was rendered with.

    Raises:
        ConversationError: there is no such message, or the template refuses to render the conversation with another
            content.
    """
    if indices is not None:
        places = _read_indices(indices, len(messages))
        try:
            return [_end(render, messages, place, text, template) for place in places]
        except Exception as error:
            raise ConversationError(
                f"cache_breakpoints: the template does not tell where messages end ({error}); leave them out",
                place="cache_breakpoints",
            ) from error
    opening = itertools.takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages)
    count = sum(1 for _ in opening)
    if count in (0, len(messages)):
        return []
    try:
        return [_end(render, messages, count - 1, text, template)]
    except Exception:  # a template is a program, here run on a content that nobody wrote
        return []  # nor did anybody ask for it


def _read_indices(given: Any, count: int) -> list[int]:
    """Indices of a conversation's messages, negative ones from the end: each in [0, count)."""
    good = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    given = list(given) if good else given
    if not good or not all(is_integer(index) for index in given):
        raise ConversationError(
            f"cache_breakpoints must be a list of message indices, got {reprlib.repr(given)}",
            place="cache_breakpoints",
        )
    wrong = next((index for index in given if not -count <= index < count), None)
    if wrong is not None:
        raise ConversationError(
            f"cache_breakpoints: there is no message {wrong} in a conversation of {count}",
            place="cache_breakpoints",
        )
    return [operator.index(index) % count for index in given]


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
        changed = {**following, "content": _unlike(following.get("content"))}
        other = render([*messages[: index + 1], changed, *messages[index + 2 :]], **template)
    return len(os.path.commonprefix((text, other)))


def _unlike(content: Any) -> str:
    """A text that begins with another character than this content, whatever a template trims or takes from it."""
    beginning = str(content)[:1000]
    return next((letter for letter in string.ascii_letters if letter not in beginning), "\x00")

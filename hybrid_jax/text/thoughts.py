"""Where models that think first begin and end their thoughts, and what a prompt says about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What opens thoughts, and what closes them. A mark may be one token or several.
MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
SWITCHES = ("enable_thinking", "thinking", "reasoning")  # variables of templates


@dataclass(frozen=True, kw_only=True)
class Thoughts:
    """The thoughts that may come before an answer.

    Attributes:
        open, close: what opens them and closes them.
        opened: the prompt has opened them, so they must come. Otherwise the model may open them first of all.
    """

    open: str
    close: str
    opened: bool


def thoughts_of_text(text: str) -> Thoughts | None:
    """The thoughts that a prompt ends with; None unless it ends with a mark that opens them."""
    end = text.rstrip()
    marks = next((marks for marks in MARKS if end.endswith(marks[0])), None)
    return None if marks is None else Thoughts(open=marks[0], close=marks[1], opened=True)


def closing_mark(text: str) -> str:
    """What closes the thoughts that a text has opened last, and not closed; empty for none.

    Example:
        >>> closing_mark("<think>a</think>b<think>c"), closing_mark("<think>a</think>b")
        ('</think>', '')
    """
    return next((closes for opens, closes in MARKS if text.rfind(opens) > text.rfind(closes)), "")


def thoughts_of_chat(text: str, template: str, options: Mapping[str, Any]) -> Thoughts | None:
    """The thoughts before the answer in a conversation; None if there are none.

    Args:
        text: the conversation as the template has written it.
        template: its source.
        options: its variables. One that turns thoughts off is believed, unless the text has opened them.

    Example:
        >>> source = "{{ messages }}<|assistant|>{# without its <think>...</think> #}"
        >>> thoughts_of_chat("hello<|assistant|>", source, {})
        Thoughts(open='<think>', close='</think>', opened=False)
        >>> thoughts_of_chat("hello<|assistant|><think>\\n\\n</think>\\n\\n", source, {}) is None
        True
    """
    if found := thoughts_of_text(text):
        return found
    off = any(options.get(name) is False for name in SWITCHES)
    closed = any(text.rstrip().endswith(close) for _, close in MARKS)
    if off or closed or options.get("add_generation_prompt") is False:
        return None
    return first_named(template)


def first_named(text: str) -> Thoughts | None:
    """Thoughts that a model may open, by the first pair of marks of which a text has one."""
    for opens, closes in MARKS:
        if opens in text or closes in text:
            return Thoughts(open=opens, close=closes, opened=False)
    return None

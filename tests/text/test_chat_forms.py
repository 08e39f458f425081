"""Templates of published forms, and conversations as clients write them: the texts are those of transformers.

`chat_goldens.py` makes the goldens. Where clients write one thing in several ways, transformers was asked with the one
that the template reads.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from hybrid_jax.text import tokenizer as tokenizer_module
from hybrid_jax.text.conversation import THOUGHTS, ConversationError, read_messages
from hybrid_jax.text.template_forms import TemplateForm
from hybrid_jax.text.templates import ChatTemplate
from hybrid_jax.text.thoughts import thoughts_of_chat
from hybrid_jax.text.tokenizer import Tokenizer
from tests.llms import byte_tokenizer
from tests.text.chat_forms import (
    CONVERSATIONS,
    FORMS,
    SPECIAL_TOKENS,
    TEMPLATES,
    call,
    parts,
    says,
)

GOLDENS = json.loads(Path(__file__).with_name("chat_goldens.json").read_text(encoding="utf-8"))[
    "texts"
]


def tokenizer_with(template: str) -> Tokenizer:
    return Tokenizer(
        byte_tokenizer().backend,
        special_tokens=SPECIAL_TOKENS,
        chat_templates={"default": template},
    )


def rendered(tokenizer: Tokenizer, messages, options) -> str | None:
    try:
        return tokenizer.apply_chat_template(read_messages(messages), **options)
    except ValueError:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_makes_the_text_that_transformers_makes(name):
    assert GOLDENS.keys() == TEMPLATES.keys()
    tokenizer = tokenizer_with(TEMPLATES[name])
    texts = {about: rendered(tokenizer, *given) for about, given in CONVERSATIONS.items()}
    assert texts == GOLDENS[name]


# Which templates open thoughts by themselves, let the model open them, and what turns that off. The others name none.
OPENED = dict.fromkeys(("deepseek_r1", "minimax", "nemotron_h", "qwen3_5"), True)
MAY_OPEN = dict.fromkeys(("glm", "lfm2", "qwen3", "smollm3"), False)
OPENED_ON_REQUEST = {"deepseek_v3": "thinking"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_thoughts_before_an_answer_are_those_of_the_template(name):
    def opened(**options) -> bool | None:
        text = rendered(tokenizer, [says("user", "hi")], {"add_generation_prompt": True} | options)
        assert text is not None
        found = thoughts_of_chat(text, TEMPLATES[name], options)
        assert found is None or (found.open, found.close) == ("<think>", "</think>")
        return None if found is None else found.opened

    tokenizer, switch = tokenizer_with(TEMPLATES[name]), OPENED_ON_REQUEST.get(name)
    assert opened() == (OPENED | MAY_OPEN).get(name)
    if switch is not None:
        assert opened(**{switch: True}) is True
    if name in MAY_OPEN or name == "qwen3_5":
        assert opened(enable_thinking=False) is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_that_a_template_reads_is_found(name):
    contents, arguments, absent = FORMS.get(name, ("text", "object", ""))
    form = tokenizer_with(TEMPLATES[name])._form(None, None)
    assert form.arguments == arguments and form.no_content == absent
    assert form.contents.get("user", "text") == contents


# --- one conversation, written in several ways ------------------------------------------------------


@dataclass
class AsDataclass:
    """A message as an object of a client's library."""

    role: str
    content: str
    name: str | None = None


class Dumped:
    """A message as an object of pydantic."""

    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self):
        return {"name": None, "refusal": None} | self.fields


def calling(**more):
    return {"role": "assistant", "tool_calls": [call(1, {"width": 2.5})], **more}


def answering(**more):
    return says("assistant", "4", **more)


def part(kind, **more):
    return {"type": kind, **more}


TEXT = '{"width": 2.5}'
SAME = {
    "no content beside a call": [
        *(calling(content=content) for content in (None, "", [])),
        calling(),
        calling(content=None, name=None, refusal=None, audio=None, function_call=None),
        calling(tool_calls=[call(1, TEXT)]),
        calling(tool_calls=[call(1, TEXT) | {"index": None}], reasoning=None),
        Dumped(**calling(content=None)),
    ],
    "thoughts": [
        answering(reasoning="2 + 2"),
        answering(reasoning_content="2 + 2"),
        answering(thinking="2 + 2"),
        answering(thinking=None, reasoning_content="", reasoning="2 + 2"),
        answering(reasoning="2 + 2", tool_calls=[]),
        answering(reasoning_content="2 + 2", thinking="2 + 2", tool_calls=None),
        Dumped(**answering(reasoning="2 + 2")),
    ],
    "thoughts without an answer": [
        {"role": "assistant", "reasoning": "2 + 2"},
        says("assistant", None, reasoning_content="2 + 2"),
        says("assistant", "", thinking="2 + 2"),
        says("assistant", [], thinking="2 + 2"),
    ],
    "thoughts of other interfaces": [
        answering(reasoning="2\n+ 2"),
        answering(reasoning_text="2\n+ 2"),
        answering(thought="2\n+ 2"),
        answering(thoughts=["2", "+ 2"]),
        answering(thinking_content="2\n+ 2"),
        answering(reasoning=[part("thinking", thinking="2"), part("thinking", thinking="+ 2")]),
        answering(thinking_blocks=[part("thinking", thinking="2\n+ 2", signature="x")]),
        answering(reasoning_details=[part("reasoning.text", text="2\n+ 2")]),
        answering(reasoning="2\n+ 2", reasoning_details=[part("reasoning.text", text="2\n+ 2")]),
        says(
            "assistant",
            [part("thinking", thinking="2\n+ 2", signature="x"), part("text", text="4")],
        ),
        says("assistant", [part("thinking", thinking=parts("2", "+ 2")), *parts("4")]),
        says(
            "assistant",
            [part("reasoning", summary=[part("summary_text", text="2\n+ 2")]), *parts("4")],
        ),
        says(
            "assistant", [part("reasoning", text="2"), part("reasoning", text="+ 2"), *parts("4")]
        ),
    ],
    "a part": [
        answering(),
        says("assistant", parts("4")),
        says("assistant", [part("output_text", text="4", annotations=[])]),
        says("assistant", [part("input_text", text="4")]),
        AsDataclass("assistant", "4"),
    ],
    "a refusal": [
        says("assistant", "no"),
        says("assistant", None, refusal="no"),
        says("assistant", [part("refusal", refusal="no")]),
    ],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_means_the_same_in_whatever_form_it_is_written(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    for about, ways in SAME.items():
        texts = {rendered(tokenizer, [says("user", "hi"), way], {}) for way in ways}
        assert len(texts) == 1, (about, texts)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_tool_that_says_nothing_says_an_empty_text(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    answer = {"role": "tool", "tool_call_id": "call00001"}
    texts = {
        rendered(tokenizer, [says("user", "hi"), calling(), answer | more], {})
        for more in ({"content": ""}, {"content": None}, {"content": []}, {})
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    "message, complaint",
    [
        (answering(reasoning={"effort": "low"}), "[0].reasoning must be text, or parts of text; leave it out if"),
        (answering(thinking=True), "[0].thinking must be text, or parts of text; leave it out if"),
        (
            answering(reasoning_details=[part("reasoning.encrypted", data="x")]),
            "[0].reasoning_details[0] must be text, or parts of text; leave it out if",
        ),
        (says("assistant", [part("thinking", thinking=None)]), "[0].content[0] must be text, or parts of text"),
        (says("assistant", [part("redacted_thinking", data="x")]), "[0].content[0] must be a part of type 'text'"),
        (says("user", [part("thinking", thinking="x")]), "[0].content[0] must be a part of type 'text'"),
        (says("user", [part(["text"], text="x")]), "[0].content[0] must be a part of type 'text'"),
        (says("user", [part("input_text", text=3)]), "[0].content[0].text must be a string, got 3"),
        (answering(reasoning="a", thought="b"), "[0] has other thoughts under thought than elsewhere; give them once"),
        (
            says("assistant", [part("thinking", thinking="b"), *parts("4")], reasoning="a"),
            "[0] has other thoughts under content than elsewhere; give them once, got 'b'",
        ),
    ],
)  # fmt: skip
def test_thoughts_and_parts_that_cannot_be_read_are_named(message, complaint):
    with pytest.raises(ConversationError, match=f"^chat: messages{re.escape(complaint)}"):
        read_messages([message])


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_nulls_beside_a_content_are_as_if_they_were_not_there(name, role):
    tokenizer = tokenizer_with(TEMPLATES[name])
    nulls = dict.fromkeys(
        (*("name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call"), *THOUGHTS)
    )
    before = [says("user", "hi"), calling()] if role == "tool" else []
    texts = {
        rendered(tokenizer, [*before, says(role, "6", **more), says("user", "so")], {})
        for more in ({}, nulls)
    }
    assert len(texts) == 1


def test_the_text_of_parts_stands_alone_where_a_template_knows_only_text():
    texts = {
        "{{ messages[0].content }}": "a\nb",
        "{{ '' + messages[0].content }}": "a\nb",
        "{{ messages[0].content if messages[0].content is string }}": "a\nb",
        "{{ messages[0].content | trim }}": "a\nb",
        "{{ messages[0].content | tojson }}": '"a\\nb"',
        "{% for part in messages[0].content %}{{ part.text }}{% endfor %}": "ab",
        "{% for part in messages[0].content %}<{{ part['text'] }}>{% endfor %}": "<a><b>",
        "{{ messages[0].content | map(attribute='text') | join('+') }}": "a+b",
    }
    user = [says("user", parts("a", "b"))]
    found = {template: rendered(tokenizer_with(template), user, {}) for template in texts}
    assert found == texts


def test_a_text_is_a_part_where_a_template_knows_only_parts():
    template = "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}"
    assert rendered(tokenizer_with(template), [says("user", "hi")], {}) == "<hi>"


def test_arguments_are_objects_or_text_as_the_template_reads_them():
    as_text = "{{ '>' + m.tool_calls[0].function.arguments }}{{ m.tool_calls[0].function.name }}"
    as_object = "{{ m.tool_calls[0].function | tojson }}"
    for template, head, tail in (
        (as_text, ">", "area"),
        (as_object, '{"name": "area", "arguments": ', "}"),
    ):
        tokenizer = tokenizer_with(
            "{% set m = messages | selectattr('tool_calls') | first %}" + template
        )
        for arguments in ({"é": 1}, '{"é": 1}'):
            message = calling(tool_calls=[call(1, arguments)])
            assert rendered(tokenizer, [message], {}) == f'{head}{{"é": 1}}{tail}'


def test_a_call_is_not_lost_by_a_template_that_asks_for_no_content():
    """Some look for calls only in messages whose content is none."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
        "{% for c in m.tool_calls %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for content in ("", None, []):
        message = calling(content=content)
        assert rendered(tokenizer_with(template), [message], {}) == '!area{"width": 2.5}'


def test_the_form_of_a_template_that_refuses_everything_is_the_usual_one():
    form = tokenizer_with("{{ raise_exception('no') }}")._form(None, None)
    assert form == TemplateForm()


def test_the_time_of_all_trials_of_a_template_is_limited(monkeypatch):
    tokenizer = tokenizer_with(
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    given = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate,
        "render",
        lambda self, variables, seconds: (
            given.append(seconds) or render(self, variables, seconds=seconds)
        ),
    )
    assert tokenizer._form(None, None).contents["user"] == "parts"
    assert given[-1] <= tokenizer_module.SECONDS_OF_A_TRIAL
    del given[:]
    monkeypatch.setattr(tokenizer_module, "SECONDS_OF_TRIALS", 0.0)
    tokenizer._forms.clear()
    assert tokenizer._form(None, None) == TemplateForm()
    assert len(given) == 1


def test_a_tool_that_takes_a_text_does_not_pass_for_a_part():
    template = (
        "{% for m in messages %}{{ tools | tojson }}"
        "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    )
    tool = {
        "type": "function",
        "function": {"name": "say", "parameters": {"text": {"type": "string"}}},
    }
    for tools in ([tool], None):
        made = tokenizer_with(template).apply_chat_template(
            [says("user", parts("a", "b"))], tools=tools
        )
        assert made.endswith("<a><b>")


def test_values_nested_without_end_are_refused_in_one_line():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(
        ConversationError, match=r"messages\[0\] holds values in values in values, too many"
    ):
        read_messages([says("user", "hi", more=deep)])


def test_a_template_cannot_change_the_messages_of_a_caller():
    messages = [says("user", parts("a", "b"))]
    template = "{% for m in messages %}{{ m.content | indent(2) }}{% endfor %}"
    rendered(tokenizer_with(template), messages, {})
    assert messages == [says("user", parts("a", "b"))]


def test_an_old_call_is_refused_with_the_remedy():
    message = says("assistant", None, function_call={"name": "area", "arguments": "{}"})
    with pytest.raises(
        ConversationError, match="function_call is not read; write tool_calls instead, got {"
    ):
        read_messages([says("user", "hi"), message])


# --- a last message that goes on ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages, complaint",
    [
        ([calling()], "messages[0] has tool_calls behind its content, so continue_final_message cannot go on"),
        ([{"role": "assistant"}], "messages[0] has no content to go on with, as continue_final_message asks"),
        ([says("user", "hi"), says("assistant", "left")], "messages[1] is changed or left out by the chat template"),
    ],
)  # fmt: skip
def test_a_last_message_that_cannot_go_on_is_named(messages, complaint):
    template = "{% for m in messages %}{{ m.content if m.content[:4] != 'left' }}{% endfor %}"
    with pytest.raises(ConversationError, match=re.escape(complaint)):
        tokenizer_with(template).apply_chat_template(messages, continue_final_message=True)

"""Where conversations say that checkpoints are worth keeping: marked messages, and thoughts that will be cut."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest

from hybrid_jax.text.conversation import ConversationError
from hybrid_jax.text.tokenizer import Tokenizer
from tests.llms import byte_tokenizer
from tests.text.chat_forms import (
    ANSWER,
    CONVERSATIONS,
    MORE,
    OPEN,
    SPECIAL_TOKENS,
    SYSTEM,
    TEMPLATES,
    TOOLS,
    USER,
    call,
    parts,
    result,
    says,
)

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
# Templates that would show a mark: of a whole message, by its name, and of a part.
SHOWING = {
    "all": "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "names": "{% for m in messages %}{{ m.role }}{{ m.cache }}{{ m.cache_control }}:{{ m.content }};{% endfor %}",
    "parts": (
        "{% for m in messages %}{{ m.role }}{% for part in m.content %}"
        "<{{ part.text }}{{ part.cache_control }}>{% endfor %}{% endfor %}"
    ),
}
SAYS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def llm(make_llm):
    tokenizer = byte_tokenizer()
    return make_llm(tokenizer=Tokenizer(tokenizer.backend, special_tokens=SPECIAL_TOKENS))


def rendered(llm, messages, **options):
    """A conversation's text, and the texts that end at its breakpoints."""
    prompt = llm.render_chat(messages, **options)
    data = bytes(prompt.token_ids)
    return prompt.text, [data[:count].decode() for count in prompt.cache_breakpoints]


# --- marks ------------------------------------------------------------------------------------------

TEXT = "a long document"
MARKED = {
    "cache": USER | {"content": TEXT, "cache": True},
    "cache_control": USER | {"content": TEXT} | EPHEMERAL,
    "both": USER | {"content": TEXT, "cache": True} | EPHEMERAL,
    "one of two": USER | {"content": TEXT, "cache": False} | EPHEMERAL,
    "a part": says("user", [parts(TEXT)[0] | EPHEMERAL]),
    "a part of another type": says("user", [{"type": "input_text", "text": TEXT} | EPHEMERAL]),
    "the last of several parts": says("user", [*parts("a long"), parts("document")[0] | EPHEMERAL]),
    "an object": SimpleNamespace(model_dump=lambda: USER | {"content": TEXT, "cache": True}),
}
UNMARKED = {
    "nothing": USER | {"content": TEXT},
    "false": USER | {"content": TEXT, "cache": False},
    "nulls": USER | {"content": TEXT, "cache": None, "cache_control": None},
    "a null of a part": says("user", [parts(TEXT)[0] | {"cache_control": None}]),
}


@pytest.mark.parametrize(
    "template", [*SHOWING.values(), TEMPLATES["qwen3"], TEMPLATES["parts_only"]]
)
@pytest.mark.parametrize("name", MARKED)
def test_a_mark_is_the_same_as_its_index_among_the_breakpoints(llm, name, template):
    def asked(message, **options):
        talk = [USER, ANSWER, message, ANSWER, MORE]
        return rendered(llm, talk, chat_template=template, **options)

    several = name == "the last of several parts"
    unmarked = says("user", parts("a long", "document") if several else TEXT)
    third = asked(unmarked, cache_breakpoints=[2])
    assert asked(MARKED[name]) == asked(MARKED[name], cache_breakpoints=[]) == third
    assert asked(MARKED[name], cache_breakpoints=[2]) == third
    both = asked(unmarked, cache_breakpoints=[0, 2])
    assert asked(MARKED[name], cache_breakpoints=[0]) == both
    assert [len(third[1]), len(both[1])] == [1, 2] and "document" in third[1][0] != third[0]


@pytest.mark.parametrize("template", SHOWING.values())
@pytest.mark.parametrize("name", UNMARKED)
def test_what_is_no_mark_marks_nothing_and_is_not_seen_either(llm, name, template):
    unmarked = rendered(llm, [says("user", TEXT), ANSWER], chat_template=template)
    assert rendered(llm, [UNMARKED[name], ANSWER], chat_template=template) == unmarked
    assert unmarked[1] == []


@pytest.fixture
def times_rendered(monkeypatch):
    """A list that grows by one whenever a conversation is rendered."""
    given, render = [], Tokenizer.apply_chat_template
    counted = lambda *args, **options: given.append(None) or render(*args, **options)  # noqa: E731
    monkeypatch.setattr(Tokenizer, "apply_chat_template", counted)
    return given


def test_a_mark_comes_beside_the_end_of_the_system_messages(llm, times_rendered):
    def ends(marked):
        talk = [
            message | {"cache": index == marked}
            for index, message in enumerate((SYSTEM, USER, ANSWER))
        ]
        times_rendered.clear()
        return rendered(llm, talk, chat_template=SAYS)[1], len(times_rendered)

    system = "<system>Be brief.<user>"
    assert ends(None) == ends(0) == ([system], 2)
    assert ends(1) == ([system, f"{system}hi<assistant>"], 3)
    assert ends(2) == ([system, f"{system}hi<assistant>Hello!"], 3)


def test_a_mark_stands_on_calls_and_results_as_well(llm):
    answer = says("assistant", None, tool_calls=[call()])
    turns = [USER, answer, result(), says("assistant", "6."), MORE]
    for index in range(len(turns)):
        marked = [message | {"cache": index == number} for number, message in enumerate(turns)]
        options = {"chat_template": TEMPLATES["qwen3_5"]} | TOOLS
        found = rendered(llm, marked, **options)
        assert found == rendered(llm, turns, cache_breakpoints=[index], **options)
        assert found[1]


def test_a_message_ends_before_the_thoughts_of_the_next(llm):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.thinking }}:{{ m.content }}{% endfor %}"
    answers = [
        says("assistant", "6", thinking="2 * 3"),
        says("assistant", None, thinking="2 * 3", tool_calls=[call()]),
    ]
    for answer in answers:
        messages = [USER | {"cache": True}, answer, MORE]
        assert rendered(llm, messages, chat_template=template)[1] == ["<user>:hi<assistant>"]
    both = "{% for m in messages %}{{ raise_exception('both') if m.content and m.thinking }}{% endfor %}"
    llm.render_chat([USER | {"cache": True}, answers[1]], chat_template=both + template)


def test_an_open_answer_may_be_marked(llm):
    messages = [USER, says("assistant", "The answer", cache=True)]
    text, ends = rendered(llm, messages, chat_template=TEMPLATES["llama3"], **OPEN)
    assert ends == [text] and text.endswith("The answer")


def test_a_mark_that_a_template_does_not_let_find_is_named(llm):
    strict = "{% if messages[1].content != 'Hello!' %}{{ raise_exception('no') }}{% endif %}{{ messages[1].content }}"
    marked = [USER | {"cache": True}, ANSWER, MORE | {"cache": True}]
    complaint = "messages[0].cache: the template does not tell where messages end (chat template: no); leave it out"
    with pytest.raises(ConversationError) as caught:
        llm.render_chat(marked, chat_template=strict)
    assert str(caught.value) == f"chat: {complaint}" and caught.value.param == "messages[0].cache"
    with pytest.raises(ConversationError, match="^chat: cache_breakpoints: .*; leave them out$"):
        llm.render_chat([USER, ANSWER, MORE], chat_template=strict, cache_breakpoints=[0])


def test_the_marks_of_each_of_several_conversations_are_its_own(llm):
    marked = [[USER | {"cache": True}, ANSWER], [USER, ANSWER], [USER, ANSWER | {"cache": True}]]
    llm.chat(marked, chat_template=SAYS)
    ends = [request.cache_breakpoints for request in llm._engine.added]
    assert ends == [(len("<user>hi<assistant>"),), (), (len("<user>hi<assistant>Hello!"),)]


# --- thoughts that will be cut ----------------------------------------------------------------------

NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
LOOP = [
    USER,
    says("assistant", None, tool_calls=[call()], reasoning="a tool"),
    result(),
    says("assistant", "Once more.", tool_calls=[call(2)], reasoning="another one"),
    result(2),
]
PARTLY = [USER, says("assistant", "<think>\nSo")]
# template, conversation, its options, variables of the template, what the kept part ends with, and what begins after it
CUTS = {
    "an opening": ("nemotron_h", [USER], {}, {}, "Assistant\n", "<think>\n"),
    "an opening of another template": ("deepseek_r1", [SYSTEM, USER], {}, {}, "<|Assistant|>", "<think>\n"),
    "of later turns": ("nemotron_h", [USER, ANSWER, MORE], {}, {}, "Assistant\n", "<think>\n"),
    "kept by the template, and not by the client": ("minimax", [USER], {}, {}, "ai\n", "<think>\n"),
    "thoughts turned off": ("qwen3", [USER], {}, NO_THOUGHTS, "assistant\n", "<think>\n\n</think>\n\n"),
    "between calls": ("qwen3", LOOP, TOOLS, {}, "assistant\n<t", "hink>\na tool\n"),
    "between calls of another template": ("glm", LOOP, TOOLS, {}, "<|assistant|>\n<think>", "a tool</think>"),
    "of an open answer": ("qwen3", PARTLY, OPEN, {}, "assistant\n", "<think>\n\n</think>\n\n<think>\nSo"),
    "of an open answer of parts": (
        "nemotron_h", [USER, says("assistant", parts("<think>\nSo", "far"))], OPEN, {}, "Assistant\n",
        "<think>\nSo\nfar",
    ),
    "before an open answer": (
        "qwen3", [USER, says("assistant", "6 is", reasoning="6")], OPEN, {}, "assistant\n",
        "<think>\n6\n</think>\n\n6 is",
    ),
}  # fmt: skip
# Templates that write no opening, keep what they wrote, or know no thoughts.
KEPT = [
    *((name, [USER], {}) for name in ("qwen3", "qwen3_5", "glm", "llama3", "chatml", "gpt_oss")),
    ("qwen3_5", LOOP, TOOLS),
    ("llama3", PARTLY, OPEN),
]


@pytest.mark.parametrize("name", CUTS)
def test_thoughts_that_will_be_cut_are_a_breakpoint(llm, name):
    template, messages, options, variables, before, after = CUTS[name]
    options = options | {"chat_template": TEMPLATES[template], "chat_template_kwargs": variables}
    text, [kept] = rendered(llm, messages, **options, cache_breakpoints=[])
    assert kept.endswith(before) and text[len(kept) :].startswith(after)
    assert text == kept + after or template in ("qwen3", "glm")
    marked = [messages[0] | {"cache": True}, *messages[1:]]
    assert kept in rendered(llm, marked, **options)[1]  # beside others


@pytest.mark.parametrize("name, messages, options", KEPT)
def test_a_text_that_stays_has_no_such_breakpoint(llm, name, messages, options):
    options = options | {"chat_template": TEMPLATES[name]}
    assert rendered(llm, messages, **options)[1] == []


THINKING = [name for name, source in TEMPLATES.items() if re.search("think|reasoning", source)]
# Those that write the thoughts of an answer also when the user has gone on.
KEEPING = ("minimax", "qwen3_5")
# In how many of 25 conversations the next prompt leaves this one earlier than at its end.
NUM_CUTS = {
    "deepseek_r1": 15,
    "glm": 2,
    "gpt_oss": 1,
    "lfm2": 1,
    "minimax": 21,
    "nemotron_h": 21,
    "qwen3": 6,
}


def next_text(llm, messages, options, **answer):
    """How a conversation is rendered once it has an answer and another message; None if the template refuses that."""
    *others, last = messages
    answer = says("assistant", "Zebra.") | answer
    if options.get("continue_final_message"):
        content, rest = last["content"], answer["content"]
        whole = content + rest if isinstance(content, str) else [*content, *parts(rest)]
        turns = [*others, {**last, "content": whole}]
    else:
        turns = [*messages, answer]
    more = {name: value for name, value in options.items() if name not in OPEN}
    try:
        return llm.render_chat([*turns, says("user", "Quite so?")], **more).text
    except ConversationError:
        return None


@pytest.mark.parametrize("name", THINKING)
def test_the_next_prompt_leaves_this_one_at_the_cut(llm, name):
    num_cuts = num_kept = 0
    for about, (messages, options) in CONVERSATIONS.items():
        if options.get("add_generation_prompt") is False and options != OPEN:
            continue  # they have their answer
        variables = {key: options[key] for key in (*NO_THOUGHTS, "documents") if key in options}
        own = {key: value for key, value in options.items() if key not in variables}
        own |= {"chat_template": TEMPLATES[name], "chat_template_kwargs": variables}
        try:
            text, ends = rendered(llm, messages, **own, cache_breakpoints=[])
        except ConversationError:
            continue
        following = [next_text(llm, messages, own)]
        if name not in KEEPING and options != OPEN:
            following.append(next_text(llm, messages, own, reasoning_content="Because."))
        for other in following:
            kept = text if other is None else os.path.commonprefix([text, other])
            assert ends == ([] if kept == text else [kept]), about
        num_cuts, num_kept = num_cuts + bool(ends), num_kept + (ends == [])
    found = NUM_CUTS.get(name, 0)
    assert (num_cuts, num_cuts + num_kept) == (found, 25)


def test_only_templates_that_know_thoughts_are_rendered_for_them(llm, times_rendered):
    for name, count in (("llama3", 1), ("chatml", 1), ("qwen3", 2), ("gpt_oss", 2)):
        times_rendered.clear()
        llm.render_chat([USER], chat_template=TEMPLATES[name])
        assert len(times_rendered) == count, name


def test_a_template_that_refuses_what_may_come_is_asked_in_vain(llm):
    refuses = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}<think>"
    fails = "{{ 1 // (messages | length == 1) }}{{ messages[0].content }}<think>"
    for template in (refuses, fails):
        assert rendered(llm, [USER], chat_template=template)[1] == []


def test_thoughts_that_a_method_cuts_are_found(make_llm):
    class Method:
        def encode(self, text):
            return list(text.encode())

        def decode(self, ids):
            return bytes(ids).decode()

        def apply_chat_template(self, messages, tokenize, **options):
            text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
            return text + "<assistant>[hm]" * options["add_generation_prompt"]

    assert rendered(make_llm(tokenizer=Method()), [USER]) == (
        "<user>hi<assistant>[hm]",
        ["<user>hi<assistant>"],
    )

"""Conversations: however one is handed in, it becomes the same prompt or meets the same complaint."""

from __future__ import annotations

import asyncio
import contextlib
from copy import deepcopy

import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.text.conversation import ConversationError, check_rendered
from hybrid_jax.text.tokenizer import Tokenizer
from tests.batch.batch_files import CHAT, line
from tests.llms import byte_tokenizer

SHORT = SamplingParams(temperature=0.0, max_tokens=2)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'ipython' %}!{% endif %}{# 'critic' #}"
    "{% if m.content == 'crash' %}{{ 1 / 0 }}{% endif %}"
    "{% if m.content == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
    "{% endfor %}{{ tools | tojson if tools }}{{ mood }}{{ '>' if add_generation_prompt }}"
)
TOOL = {"type": "function", "function": {"name": "add"}}


def says(role, content):
    return {"role": role, "content": content}


def parts(*texts, **more):
    return [{"type": "text", "text": text, **more} for text in texts]


def calls(arguments, **more):
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]} | more


USER, ANSWER = says("user", "hi"), says("assistant", "yo")
OPEN = {"continue_final_message": True}

# messages, options, the prompt
GOOD = {
    "text": ([USER], {}, "<user>hi>"),
    "several messages": ([says("system", "s"), USER, says("assistant", "yo")], {}, "<system>s<user>hi<assistant>yo>"),
    "one part": ([says("user", parts("hello"))], {}, "<user>hello>"),
    "several parts": ([says("user", parts("a", "b"))], {}, "<user>a\nb>"),
    "parts of a system message": ([says("system", parts("a")), USER], {}, "<system>a<user>hi>"),
    "an empty text": ([says("user", "")], {}, "<user>>"),
    "a developer": ([says("developer", "d"), USER], {}, "<developer>d<user>hi>"),
    "a tool's answer": ([USER, calls("{}"), says("tool", "4")], {}, "<user>hi<assistant>[f {}]<tool>4>"),
    "a role of the template's": ([USER, says("ipython", "4")], {}, "<user>hi<ipython>4!>"),
    "arguments as JSON text": ([USER, calls('{"x": [1]}')], {}, '<user>hi<assistant>[f {"x": [1]}]>'),
    "arguments as an object": ([USER, calls({"x": 1})], {}, '<user>hi<assistant>[f {"x": 1}]>'),
    "no arguments": ([USER, calls(""), calls(None)], {}, "<user>hi<assistant>[f {}]<assistant>[f {}]>"),
    "calls and a null content": ([USER, calls("{}", content=None)], {}, "<user>hi<assistant>[f {}]>"),
    "calls and parts": ([USER, calls("{}", content=parts("so"))], {}, "<user>hi<assistant>so[f {}]>"),
    "tools": ([USER], {"tools": [TOOL]}, '<user>hi[{"type": "function", "function": {"name": "add"}}]>'),
    "an empty list of tools": ([USER], {"tools": []}, "<user>hi>"),
    "what the template looks at": ([USER], {"chat_template_kwargs": {"mood": ":)"}}, "<user>hi:)>"),
    "no opening of a turn": ([USER], {"add_generation_prompt": False}, "<user>hi"),
    "an open answer": ([USER, says("assistant", "yo ")], OPEN, "<user>hi<assistant>yo "),
    "an open answer of parts": ([USER, says("assistant", parts("y", "o"))], OPEN, "<user>hi<assistant>y\no"),
    "an open answer, no new one": ([USER, ANSWER], OPEN | {"add_generation_prompt": False}, "<user>hi<assistant>yo"),
    "an open answer that is empty": ([USER, says("assistant", "")], OPEN, "<user>hi<assistant>"),
    "null fields": ([USER | {"name": None}, calls("{}", content=None, name=None)], {}, "<user>hi<assistant>[f {}]>"),
}  # fmt: skip

WRONG, MISSING, UNSUPPORTED = "invalid_value", "missing_required_parameter", "unsupported_parameter"
ROLES = "system, developer, user, assistant, tool, or another that the chat template names"


def no_text(where, got):
    return f"{where} must be a part of type 'text', the only one supported, got {got}"


def no_role(where, got):
    return f"{where}.role must be one of {ROLES}, got {got}"


EPHEMERAL = {"type": "ephemeral"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
# messages, what is said about them, its param, its code
BAD_MESSAGES = {
    "no messages": ([], "messages must be a non-empty list, got []", "messages", WRONG),
    "a text": ("hi", "messages must be a non-empty list, got 'hi'", "messages", WRONG),
    "one message": (
        USER,
        "messages must be a non-empty list, got {'content': 'hi', 'role': 'user'}",
        "messages",
        WRONG,
    ),
    "texts": (["hi"], "messages[0] must have a role and a content, got 'hi'", "messages[0]", WRONG),
    "a number": (
        [USER, 7],
        "messages[1] must have a role and a content, got 7",
        "messages[1]",
        WRONG,
    ),
    "no role": (
        [{"content": "hi"}],
        "messages[0] must have a role and a content, got {'content': 'hi'}",
        "messages[0]",
        WRONG,
    ),
    "a role that is a number": (
        [{"role": 3}],
        "messages[0] must have a role and a content, got {'role': 3}",
        "messages[0]",
        WRONG,
    ),
    "a list among messages": (
        [USER, [USER]],
        "messages[1] must have a role and a content, got [{'content': 'hi', 'role': 'user'}]",
        "messages[1]",
        WRONG,
    ),
    "an image": (
        [says("user", [*parts("see"), IMAGE])],
        no_text("messages[0].content[1]", "'image_url'"),
        "messages[0].content[1]",
        UNSUPPORTED,
    ),
    "sound": (
        [USER, says("user", [{"type": "input_audio"}])],
        no_text("messages[1].content[0]", "'input_audio'"),
        "messages[1].content[0]",
        UNSUPPORTED,
    ),
    "a part without a type": (
        [says("user", [{"text": "a"}])],
        no_text("messages[0].content[0]", "{'text': 'a'}"),
        "messages[0].content[0]",
        UNSUPPORTED,
    ),
    "a part that is a text": (
        [says("user", ["a"])],
        no_text("messages[0].content[0]", "'a'"),
        "messages[0].content[0]",
        UNSUPPORTED,
    ),
    "a text part without text": (
        [says("user", [{"type": "text"}])],
        "messages[0].content[0].text must be a string, got None",
        "messages[0].content",
        WRONG,
    ),
    "an object as content": (
        [says("user", {"a": 1})],
        "messages[0].content must be a string or a list of parts, got {'a': 1}",
        "messages[0].content",
        WRONG,
    ),
    "a number as content": (
        [says("user", 7)],
        "messages[0].content must be a string or a list of parts, got 7",
        "messages[0].content",
        WRONG,
    ),
    "no content": ([{"role": "user"}], "messages[0] has no content", "messages[0]", MISSING),
    "a null content": (
        [USER, says("user", None)],
        "messages[1] has no content",
        "messages[1]",
        MISSING,
    ),
    "neither content nor calls": (
        [USER, {"role": "assistant", "tool_calls": []}],
        "messages[1] has no content and no tool_calls; an assistant's message needs one of them",
        "messages[1]",
        MISSING,
    ),
    "a misspelt role": (
        [says("usr", "hi")],
        no_role("messages[0]", "'usr'; did you mean user?"),
        "messages[0].role",
        WRONG,
    ),
    "a capital role": (
        [USER, says("Assistant", "hi")],
        no_role("messages[1]", "'Assistant'; did you mean assistant?"),
        "messages[1].role",
        WRONG,
    ),
    "another name of a role": (
        [says("human", "hi")],
        no_role("messages[0]", "'human'; did you mean user?"),
        "messages[0].role",
        WRONG,
    ),
    "a retired role": (
        [USER, says("function", "4")],
        no_role("messages[1]", "'function'; did you mean tool?"),
        "messages[1].role",
        WRONG,
    ),
    "an unknown role": (
        [says("critic", "hi")],
        no_role("messages[0]", "'critic'"),
        "messages[0].role",
        WRONG,
    ),
    "an empty role": ([says("", "hi")], no_role("messages[0]", "''"), "messages[0].role", WRONG),
    "calls that are no list": (
        [calls("{}") | {"tool_calls": {"a": 1}}],
        "messages[0].tool_calls must be a list, got {'a': 1}",
        "messages[0].tool_calls",
        WRONG,
    ),
    "a call without a function": (
        [calls("{}") | {"tool_calls": [{"id": "1"}]}],
        "messages[0].tool_calls[0] must have a function, got {'id': '1'}",
        "messages[0].tool_calls",
        WRONG,
    ),
    "broken arguments": (
        [USER, calls('{"x"')],
        "messages[1].tool_calls[0].function.arguments must be JSON of an object, got '{\"x\"'",
        "messages[1].tool_calls",
        WRONG,
    ),
    "arguments that are no object": (
        [calls("[1]")],
        "messages[0].tool_calls[0].function.arguments must be JSON of an object, got '[1]'",
        "messages[0].tool_calls",
        WRONG,
    ),
    **{
        f"{got!r} as a mark": (
            [USER, says("user", "hi") | {"cache": got}],
            f"messages[1].cache must be true, to keep a checkpoint at the end of the message, or false, got {got!r}",
            "messages[1].cache",
            WRONG,
        )
        for got in ("yes", 1, 0, [], {"type": "ephemeral"})
    },
    **{
        f"{got!r} as a mark of another interface": (
            [USER | {"cache_control": got}],
            f"messages[0].cache_control must be {EPHEMERAL}, without a time to live, got {got!r}",
            "messages[0].cache_control",
            WRONG,
        )
        for got in (True, {}, {"type": "persistent"}, {"ttl": "1h", "type": "ephemeral"})
    },
    "a wrong mark of a part": (
        [says("user", [*parts("a"), *parts("b", cache_control="on")])],
        f"messages[0].content[1].cache_control must be {EPHEMERAL}, without a time to live, "
        "got 'on'",
        "messages[0].content[1].cache_control",
        WRONG,
    ),
    "a mark before the end": (
        [says("user", [*parts("a", cache_control=EPHEMERAL), *parts("b")])],
        f"messages[0].content[0].cache_control stands before the end of the message; put it on the last part, got "
        f"{EPHEMERAL}",
        "messages[0].content[0].cache_control",
        UNSUPPORTED,
    ),
    "what the template refuses": (
        [says("user", "refuse")],
        "chat template: not this",
        "messages",
        "chat_template",
    ),
    "what crashes the template": (
        [says("user", "crash")],
        "chat template: ZeroDivisionError: division by zero",
        "messages",
        "chat_template",
    ),
}

# options, what is said about them
BAD_OPTIONS = {
    "tools that are no list": (
        {"tools": TOOL},
        "tools must be a list of JSON schemas, got {'function': {'name': 'add'}, 'type': 'function'}",
    ),
    "a tool that is a name": (
        {"tools": [TOOL, "add"]},
        "tools[1] must be a JSON schema like {'type': 'function', 'function': ...}, got 'add'",
    ),
    "options that are no object": (
        {"chat_template_kwargs": "mood"},
        "chat_template_kwargs must map names to values, got 'mood'",
    ),
    **{
        f"{name} among the options": (
            {"chat_template_kwargs": {name: []}},
            f"chat_template_kwargs must not hold {name}; give {name} beside it",
        )
        for name in ("messages", "tools", "chat_template", "add_generation_prompt", *OPEN)
    },
    **{
        f"{name}, which is taken, among the options": (
            {"chat_template_kwargs": {name: 1}},
            f"chat_template_kwargs must not hold {name}, a name that means something else; call it otherwise",
        )
        for name in ("self", "conversation", "tokenize")
    },
    "a word for true": (
        {"add_generation_prompt": "yes"},
        "add_generation_prompt must be true or false, got 'yes'",
    ),
    "a word for open": (
        {"continue_final_message": "content"},
        "continue_final_message must be true or false, got 'content'",
    ),
    "a message that is not there": (
        {"cache_breakpoints": [1]},
        "cache_breakpoints: there is no message 1 in a conversation of 1",
    ),
    "more breakpoints than messages": (
        {"cache_breakpoints": [0] * 100_000},
        "cache_breakpoints has 100000 entries for a conversation of 1 messages; name each message once at most",
    ),
    "breakpoints that are no list": (
        {"cache_breakpoints": 1},
        "cache_breakpoints must be a list of message indices, got 1",
    ),
}
BAD = {name: (messages, {}, *rest) for name, (messages, *rest) in BAD_MESSAGES.items()} | {
    name: ([USER], options, said, *options, WRONG) for name, (options, said) in BAD_OPTIONS.items()
}


@pytest.fixture
def llm(make_llm):
    tokenizer = byte_tokenizer()
    tokenizer.chat_templates["default"] = TEMPLATE
    return make_llm(tokenizer=tokenizer)


async def collect(deltas):
    return [delta async for delta in deltas]


CALLS = {
    "render_chat": lambda llm, messages, **options: llm.render_chat(messages, **options).text,
    "chat": lambda llm, messages, **options: llm.chat(messages, SHORT, **options)[0].prompt,
    "stream_chat": lambda llm, *given, **options: (
        list(llm.stream_chat(*given, SHORT, **options))[-1].output.prompt
    ),
    "astream_chat": lambda llm, *given, **options: (
        asyncio.run(collect(llm.astream_chat(*given, SHORT, **options)))[-1].output.prompt
    ),
}


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("name", GOOD)
def test_a_conversation_becomes_its_prompt(llm, name, way):
    messages, options, prompt = GOOD[name]
    assert CALLS[way](llm, messages, **options) == prompt


@pytest.mark.parametrize("name", GOOD)
def test_a_batch_line_becomes_the_same_prompt(llm, body_of, name):
    messages, options, prompt = GOOD[name]
    body_of("a", CHAT, messages=messages, **options, llm=llm)
    [request] = llm._engine.added
    assert bytes(request.prompt).decode() == prompt


@pytest.mark.parametrize("way", ["render_chat", "chat", "stream_chat", "astream_chat"])
@pytest.mark.parametrize("name", BAD)
def test_a_wrong_conversation_is_refused_at_the_call(llm, name, way):
    messages, options, complaint, param, code = BAD[name]
    with pytest.raises(ConversationError) as caught:
        getattr(llm, way)(messages, **options)
    assert str(caught.value) == f"chat: {complaint}"
    assert (caught.value.param, caught.value.code) == (param, code)
    assert not llm._engine.added


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_batch_line_meets_the_same_complaint(llm, ask, name):
    messages, options, complaint, param, code = BAD[name]
    [answer] = ask(line("a", CHAT, messages=messages, **options), llm=llm)
    error = answer["response"]["body"]["error"]
    assert error["message"] == f"line 1: {complaint}"
    assert (error["param"], error["code"]) == (param, code)


def test_a_field_that_no_template_reads_does_not_vanish(llm, caplog):
    """What carries more than text is refused, and of the others the log says so."""
    seen = USER | {"images": ["x.png"]}
    with pytest.raises(
        ConversationError, match=r"messages\[1\].images is not read by the chat t"
    ) as caught:
        llm.render_chat([USER, seen])
    assert (caught.value.param, caught.value.code) == ("messages[1].images", UNSUPPORTED)
    assert llm.render_chat([USER | {"images": []}]).text == "<user>hi>"
    for template in ("{{ messages[0].images[0] }}", "{{ messages }}", "{{ messages | tojson }}"):
        assert "x.png" in llm.render_chat([seen], chat_template=template).text
    with caplog.at_level("INFO", logger="hybrid_jax.requests"):
        llm.render_chat([USER | {"mood": "glad", "tone": "dry", "name": "Ann"}])
    assert caplog.messages == ["the chat template does not read tone"]


def test_a_template_that_never_reads_tools_is_named_once(llm, caplog):
    caplog.set_level("WARNING", "hybrid_jax.requests")
    blind = (
        "{# tools #}{% for m in messages %}no tools here: {{ m.content }}{% endfor %}{{ 'tools' }}"
    )
    sets = "{% set tools = [] %}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    seeing = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools is defined %}!{% endif %}"
    )
    for template in (seeing, blind, blind, sets):
        llm.render_chat([USER], chat_template=template)
        llm.render_chat([USER], chat_template=template, tools=[])
    assert caplog.messages == []
    for template in (seeing, blind, blind, sets):
        llm.chat([USER], SHORT, chat_template=template, tools=[TOOL])
    assert len(caplog.messages) == 2
    assert all("the chat template never reads tools, so" in text for text in caplog.messages)


def test_messages_are_looked_for_where_they_stand():
    """From the beginning of the text each time, this would take minutes."""
    messages = [says("developer", f"{'ab' * 20}{number:06d}") for number in range(100_000)]
    texts = [message["content"] for message in messages]
    check_rendered(messages, "\n".join(texts))
    check_rendered(messages[:9], "\n".join(texts[8::-1]))  # in another order
    with pytest.raises(
        ConversationError, match=r"messages\[99999\] is left out by the chat template"
    ):
        check_rendered(messages, "\n".join(texts[:-1]))


def test_a_message_is_rendered_once_for_its_breakpoints(llm, monkeypatch):
    given = []
    render = Tokenizer.apply_chat_template
    monkeypatch.setattr(
        Tokenizer,
        "apply_chat_template",
        lambda self, *args, **options: given.append(args) or render(self, *args, **options),
    )
    messages = [USER, ANSWER, USER]
    prompt = llm.render_chat(messages, cache_breakpoints=[1, -2, 1])
    assert prompt.cache_breakpoints == (len("<user>hi<assistant>yo<user>"),)
    assert len(given) == 2


def test_a_role_of_any_length_is_compared_in_short(llm):
    """In whole it would take minutes."""
    with pytest.raises(ConversationError, match=r"got 'u.*u'$"):
        llm.render_chat([says("u" * 30_000_000, "x")])
    with pytest.raises(ConversationError, match=r"got 'uuser'; did you mean user\?$"):
        llm.render_chat([says("uuser", "x")])


BOTH = OPEN | {"add_generation_prompt": True}
NOT_BOTH = (
    "continue_final_message goes on with the last message, and add_generation_prompt begins another one, got true for "
    "both; leave one of them out"
)


@pytest.mark.parametrize("way", ["render_chat", "chat", "stream_chat", "astream_chat"])
def test_an_answer_cannot_both_go_on_and_begin(llm, way):
    with pytest.raises(ConversationError) as caught:
        getattr(llm, way)([USER], **BOTH)
    assert str(caught.value) == f"chat: {NOT_BOTH}"
    assert caught.value.param == "continue_final_message"


def test_nor_can_that_of_a_batch_line(llm, ask):
    [answer] = ask(line("a", CHAT, messages=[USER], **BOTH), llm=llm)
    assert answer["response"]["body"]["error"]["message"] == f"line 1: {NOT_BOTH}"


def test_an_open_answer_and_what_follows_are_one_message(llm):
    messages = [USER, says("assistant", "yo")]
    [output] = llm.chat(messages, SHORT, continue_final_message=True)
    assert output.prompt_token_ids == tuple(b"<user>hi<assistant>yo")
    prompt = llm.render_chat([says("system", "s"), *messages], continue_final_message=True)
    assert prompt.text == "<system>s<user>hi<assistant>yo"
    assert prompt.cache_breakpoints == (len("<system>s<user>"),)


@pytest.mark.parametrize("way", ["render_chat", "chat", "stream_chat", "astream_chat"])
@pytest.mark.parametrize(
    "name, hint",
    [
        ("continue_last_message", "did you mean continue_final_message"),
        ("prefill", "did you mean continue_final_message"),
        ("enable_thinking", "did you mean chat_template_kwargs"),
        ("mood", "it has add_generation_prompt, cache_breakpoints, chat_template, "),
    ],
)
def test_an_unknown_option_meets_a_hint(llm, name, hint, way):
    with pytest.raises(TypeError, match=f"LLM.chat: unknown option '{name}'; {hint}"):
        getattr(llm, way)([USER], **{name: True})


def test_a_template_without_end_costs_only_its_own_request(llm, ask):
    endless = says("user", "endless")
    template = "{% if messages[0].content == 'endless' %}{{ 'a' * 10**10 }}{% endif %}" + TEMPLATE
    with pytest.raises(
        ConversationError, match="chat: chat template: did not finish: it builds a value of"
    ) as caught:
        llm.chat([endless], SHORT, chat_template=template)
    assert caught.value.code == "chat_template"
    assert llm.chat([USER], SHORT, chat_template=template)[0].prompt == "<user>hi>"
    llm.get_tokenizer().chat_templates["default"] = template
    answers = ask(line("a", CHAT, messages=[endless]), line("b", CHAT, messages=[USER]), llm=llm)
    bad, good = sorted(answers, key=lambda answer: answer["custom_id"])
    assert "did not finish" in bad["response"]["body"]["error"]["message"]
    assert good["response"]["status_code"] == 200


@pytest.mark.parametrize("way", ["chat", "stream_chat", "astream_chat"])
@pytest.mark.parametrize(
    "second, complaint",
    [
        ([USER, {"role": "user"}], "messages[1] has no content"),
        ([says("usr", "hi")], no_role("messages[0]", "'usr'; did you mean user?")),
        ([], "messages must be a non-empty list, got []"),
        (USER, "messages must be a non-empty list, got {'content': 'hi', 'role': 'user'}"),
        ([says("user", "refuse")], "chat template: not this"),
        (
            [says("user", "\udcfe")],
            "the conversation: is not valid UTF-8, it has byte 0xfe at character 6; convert it first",
        ),
    ],
)
def test_of_several_conversations_the_wrong_one_is_named(llm, way, second, complaint):
    with pytest.raises(ConversationError) as caught:
        getattr(llm, way)([[USER], second])
    assert str(caught.value) == f"chat: conversation 1: {complaint}"
    assert not llm._engine.added


def test_the_error_of_one_of_several_conversations_takes_its_place(llm):
    wrong = [USER, {"role": "user"}]
    outputs = llm.chat([[USER], wrong, [says("user", "refuse")], [USER]], SHORT, errors="return")
    assert [output.prompt for output in (outputs[0], outputs[3])] == ["<user>hi>"] * 2
    assert all(isinstance(output, ConversationError) for output in outputs[1:3])
    assert str(outputs[1]) == "chat: conversation 1: messages[1] has no content"
    [alone] = llm.chat(wrong, SHORT, errors="return")
    assert str(alone) == "chat: messages[1] has no content"
    long = [says("user", "x" * 5000)]
    [good, too_long] = llm.chat([[USER], long], SHORT, errors="return")
    assert good.prompt == "<user>hi>" and "prompt 1: has 50" in str(too_long)
    with pytest.raises(ValueError, match="errors must be 'raise' or 'return', got 'skip'"):
        llm.chat([USER], SHORT, errors="skip")


def test_several_conversations_are_several_prompts(llm):
    several = [[USER], (says("user", parts("a", "b")),)]
    prompts = ["<user>hi>", "<user>a\nb>"]
    assert [output.prompt for output in llm.chat(several, SHORT)] == prompts
    streamed = llm.stream_chat(several, [SHORT, SHORT])
    awaited = asyncio.run(collect(llm.astream_chat(several, SHORT)))
    for deltas in (streamed, awaited):
        ended = {d.prompt_index: d.output.prompt for d in deltas if d.output is not None}
        assert ended == dict(enumerate(prompts))
    with pytest.raises(ValueError, match=r"messages\[0\] must have a role and a content, got \[{"):
        llm.render_chat(several)


def test_a_chat_streams_what_it_would_answer(llm):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    [output] = llm.chat([USER], params)
    deltas = list(llm.stream_chat([USER], params))
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text
    assert asyncio.run(collect(llm.astream_chat([USER], params)))[-1].output.prompt == output.prompt


def test_a_chat_stream_may_be_left_early(llm):
    async def first():
        async with contextlib.aclosing(llm.astream_chat([USER])) as deltas:
            async for delta in deltas:
                return delta.text

    assert asyncio.run(first())
    assert next(stream := llm.stream_chat([USER])).text
    stream.close()
    assert llm.stats() and not llm._engine.has_work  # `stats` comes after what was left is ended


def test_the_role_must_stand_in_the_template_that_is_used(llm):
    messages = [USER, says("critic", "no")]
    template = (
        "{% for m in messages %}{{ 'c:' if m.role == \"critic\" }}{{ m.content }},{% endfor %}"
    )
    assert llm.render_chat(messages, chat_template=template).text == "hi,c:no,"
    llm.get_tokenizer().chat_templates["tool_use"] = template
    assert llm.render_chat(messages, tools=[TOOL]).text == "hi,c:no,"
    with pytest.raises(ValueError, match=r"messages\[1\].role must be one of .*, got 'critic'"):
        llm.render_chat(messages)
    with pytest.raises(ValueError, match="chat template: .*unexpected"):
        llm.render_chat(messages, chat_template="{{ ) }}")


def test_a_message_that_the_template_leaves_out_is_refused(llm):
    template = (
        "{% for m in messages if m.role in ('user', 'critic') %}{{ m.content | X }}{% endfor %}"
    )
    for shown in ("trim", "tojson"):
        own = template.replace("X", shown)
        said = [says("critic", ' "no"\n'), USER] if shown == "trim" else [says("critic", '"no"\né')]
        assert "no" in llm.render_chat(said, chat_template=own).text
        with pytest.raises(ValueError, match=r"messages\[1\] is left out .* the role 'developer'"):
            llm.chat([USER, says("developer", "Be brief.")], chat_template=own)


def test_the_name_of_a_file_is_no_template(llm):
    message = "'t.jinja' is neither Jinja nor the name of a template of this model .* read it first"
    with pytest.raises(ValueError, match=message):
        llm.render_chat([USER], chat_template="t.jinja")


@pytest.mark.parametrize("empty", [None, []])
def test_no_tool_calls_are_the_same_as_none_at_all(llm, empty):
    template = "{% for m in messages %}{{ 'calls' if m.tool_calls is defined }}{% endfor %}"
    message = says("assistant", "hi") | {"tool_calls": empty}
    assert llm.render_chat([USER, message], chat_template=template).text == ""


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"tools": [len]}, r"chat: tools\[0\] must be a JSON schema .*, got <built-in function len>"),
        ({"chat_template": 7}, "chat: chat_template must be Jinja source or the name .*, got 7"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs must map names to values, got {1: 2}"),
    ],
)  # fmt: skip
def test_what_no_batch_file_can_hold_is_refused_too(llm, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        llm.chat([USER], **options)


def test_the_messages_of_the_caller_stay_as_they_are(llm):
    marked = parts("b", cache_control=EPHEMERAL)
    messages = [says("user", [*parts("a"), *marked]), calls('{"x": 1}', cache=True)]
    before = deepcopy(messages)
    llm.render_chat(messages)
    assert messages == before


def test_a_batch_line_for_a_model_without_a_tokenizer_says_so(make_llm, ask):
    [answer] = ask(line("a", CHAT), llm=make_llm(tokenizer=None))
    assert answer["error"]["code"] == "chat_template"
    assert "came without a tokenizer.json" in answer["error"]["message"]

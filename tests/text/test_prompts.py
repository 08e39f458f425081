"""Prompts as callers write them, and where prefixes of prompts and conversations end for the cache."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from hybrid_jax import SamplingParams
from hybrid_jax.api import intake
from hybrid_jax.text.conversation import common_length
from hybrid_jax.text.prompts import Prompt, TooLong, read_prompts
from hybrid_jax.text.tokenizer import Tokenizer
from tests.batch.batch_files import CHAT, line

SHORT = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.mark.parametrize(
    "prompts, expected",
    [
        ([97, 98], [(97, 98)]),
        ((97, 98), [(97, 98)]),
        (np.array([97, 98]), [(97, 98)]),
        ([[97, 98], (99,), "c"], [(97, 98), (99,), (99,)]),
        (np.array([[97, 98], [99, 97]]), [(97, 98), (99, 97)]),
        ((text for text in ("ab", "c")), [(97, 98), (99,)]),
        ({"ab": 1, "c": 2}.keys(), [(97, 98), (99,)]),
        (Prompt("ab", (97, 98)), [(97, 98)]),
        (range(97, 99), [(97, 98)]),
    ],
)
def test_token_ids_and_iterables_are_prompts(llm, prompts, expected):
    assert [o.prompt_token_ids for o in llm.generate(prompts, SHORT)] == expected


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([1, True], r"prompt 1: prompt_token_ids must be integers, got \[1, True\]"),
        ([1, "a"], r"prompt 1: prompt_token_ids must be integers, got \[1, 'a'\]"),
        ({"prompt_token_ids": [True]}, r"prompt 1: .* must be integers, got \[True\]"),
        ({"prompt_token_ids": b"a"}, "prompt 1: prompt_token_ids must be integers, got b'a'"),
        (b"a", "prompt 1: must be text or token ids, .*, got bytes b'a'"),
        (None, "prompt 1: must be text or token ids, .*, got NoneType None"),
        ([], "prompt 1: is empty"),
        ("a\ud800", r"prompt 1: is not valid UTF-8, it has U\+D800 at character 1"),
        (
            {"prompt": "a", "cache_breakpoints": "1"},
            "prompt 1: cache_breakpoints must be a list of .*'1'",
        ),
        (
            {"prompt": "a", "cache_breakpoints": [1.0]},
            r"prompt 1: cache_breakpoints must .*\[1.0\]",
        ),
        (
            {"prompt": "a", "cache_breakpoints": [0]},
            "lie between 1 and the prompt's 1 characters, got 0",
        ),
        (
            {"prompt": [7, 8], "cache_breakpoints": [3]},
            "between 1 and the prompt's 2 tokens, got 3",
        ),
        ({"prompt_token_ids": [7], "cache_breakpoints": [-1]}, "prompt's 1 tokens, got -1"),
        (
            {"cache_breakpoints": [1]},
            r"prompt 1: a prompt as a dict must .*\['cache_breakpoints'\]",
        ),
        ({"prompt": "ab\udcff"}, "prompt 1: is not valid UTF-8, it has byte 0xff at character 2"),
    ],
)
def test_a_bad_prompt_is_named(llm, prompt, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(["fine", prompt], SHORT)
    assert not llm._engine.added


@pytest.mark.parametrize("prompts", [7, b"abc", None])
def test_what_holds_no_prompts_is_named(llm, prompts):
    with pytest.raises(
        ValueError, match=f"prompts must be text, token ids, or a list .* got {prompts!r}$"
    ):
        llm.generate(prompts)


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ({"prompt": "hello", "cache_breakpoints": [4, 2, 4]}, (2, 4)),
        (
            {"prompt": "h\u00e9llo", "cache_breakpoints": [1, 2, 5]},
            (1, 3, 6),
        ),  # two bytes for one letter
        ({"prompt": "\u20ac", "cache_breakpoints": [1]}, (3,)),
        ({"prompt_token_ids": range(5), "cache_breakpoints": np.array([3])}, (3,)),
        ({"prompt": [1, 2], "cache_breakpoints": []}, ()),
        (Prompt(None, (1, 2, 3), (2,)), (2,)),
        ("hello", ()),
    ],
)
def test_breakpoints_are_characters_of_a_text_and_tokens_of_ids(llm, prompt, expected):
    llm.generate(prompt, SHORT)
    assert llm._engine.added[-1].cache_breakpoints == expected


def test_a_token_that_opens_the_text_is_counted():
    backend = tokenizers.Tokenizer(
        models.WordLevel(vocab={"<s>": 0, "see": 1, "saw": 2, "<u>": 3}, unk_token="<u>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>"})
    read = read_prompts(
        {"prompt": "see saw", "cache_breakpoints": [2, 3, 7]}, tokenizer, vocab_size=9
    )
    assert read[0].token_ids == (0, 1, 2) and read[0].cache_breakpoints == (1, 2, 3)


SYSTEM, USER = {"role": "system", "content": "be brief"}, {"role": "user", "content": " hi"}
SAYS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
OPENS = SAYS + "{% if add_generation_prompt %}<bot>{% endif %}"
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
STRICT = "{% if messages[1].content != ' hi' %}{{ raise_exception('no') }}{% endif %}" + SAYS


@pytest.mark.parametrize(
    "messages, template, asked, expected",
    [
        ([SYSTEM, USER], SAYS, None, ["<system>be brief<user>"]),
        ([SYSTEM, {"role": "developer", "content": "x"}, USER], SAYS, None, ["<system>be brief<developer>x<user>"]),
        ([USER, SYSTEM], SAYS, None, []),
        ([SYSTEM], SAYS, None, []),
        ([SYSTEM, USER], SAYS, [], []),
        ([SYSTEM, USER], OPENS, [-1, 0], ["<system>be brief<user>", "<system>be brief<user>hi"]),
        ([SYSTEM, USER], STRICT, None, []),  # it cannot be told, and nobody asked
        ([SYSTEM, CALLS, USER], SAYS, [0], ["<system>be brief<assistant>"]),
    ],
)  # fmt: skip
def test_messages_end_where_the_text_depends_on_the_next(llm, messages, template, asked, expected):
    prompt = llm.render_chat(messages, chat_template=template, cache_breakpoints=asked)
    assert [prompt.text[:count] for count in prompt.cache_breakpoints] == expected


@pytest.mark.parametrize(
    "asked, template, message",
    [
        ([2], SAYS, "chat: cache_breakpoints: there is no message 2 in a conversation of 2"),
        ([-3], SAYS, "there is no message -3 in a conversation of 2"),
        ([True], SAYS, r"chat: cache_breakpoints must be a list of message indices, got \[True\]"),
        (1, SAYS, "chat: cache_breakpoints must be a list of message indices, got 1"),
        ([0], STRICT, "the template does not tell where messages end .*no"),
    ],
)
def test_a_message_that_is_not_there_is_named(llm, asked, template, message):
    with pytest.raises(ValueError, match=message):
        llm.chat([SYSTEM, USER], SHORT, chat_template=template, cache_breakpoints=asked)


def test_none_declares_nothing_and_numpy_counts_as_well(llm):
    llm.generate({"prompt": "ab", "cache_breakpoints": None}, SHORT)
    assert llm._engine.added[-1].cache_breakpoints == ()
    prompt = llm.render_chat([SYSTEM, USER], chat_template=SAYS, cache_breakpoints=np.array([0]))
    assert len(prompt.cache_breakpoints) == 1


def test_a_template_that_fails_on_another_content_is_told_apart(llm):
    careful = "{{ 1 // (messages[1].content == ' hi') }}" + SAYS
    with pytest.raises(
        ValueError, match="cache_breakpoints: the template does not tell .* leave them out"
    ):
        llm.chat([SYSTEM, USER], SHORT, chat_template=careful, cache_breakpoints=[0])
    llm.chat([SYSTEM, USER], SHORT, chat_template=careful)


def test_of_several_conversations_the_wrong_one_is_named(llm):
    with pytest.raises(
        ValueError, match="^chat: conversation 1: .* no message 1 in a conversation of 1"
    ):
        llm.chat([[SYSTEM, USER], [USER]], SHORT, chat_template=SAYS, cache_breakpoints=[1])


@settings(deadline=None)
@given(st.text("ab", max_size=40), st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_the_common_length_of_two_texts_is_that_of_the_definition(both, one, other):
    one, other = both + one, both + other
    assert common_length(one, other) == len(os.path.commonprefix([one, other]))


LONG = "ab" * 500_000
TOO_LONG = "1000000 characters are more than 1400 tokens, but the longest sequence is 200; shorten it, or raise "


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate(LONG),
        lambda llm: llm.generate({"prompt": LONG, "cache_breakpoints": [*range(1, 1_000_001)]}),
        lambda llm: llm.embed(LONG),
        lambda llm: llm.logprobs(LONG),
        lambda llm: llm.score(LONG, "a"),
        lambda llm: llm.chat([{"role": "user", "content": LONG}]),
    ],
    ids=["generate", "breakpoints", "embed", "logprobs", "score", "chat"],
)
def test_a_text_that_is_far_too_long_is_not_read_to_its_end(llm, monkeypatch, ask):
    lengths = seen_lengths(monkeypatch)
    with pytest.raises(TooLong, match="characters are more than 1400 tokens, but"):
        ask(llm)
    assert max(lengths) < 20_000


def test_a_continuation_that_is_far_too_long_is_not_read_to_its_end(llm, monkeypatch):
    lengths = seen_lengths(monkeypatch)
    for first in ("a", [1, 2]):
        with pytest.raises(
            TooLong, match="score: continuation 0: its 100000[01] characters are more"
        ):
            llm.score(first, LONG)
    assert max(lengths) < 20_000


def test_nor_is_the_text_of_a_batch_line(ask, monkeypatch):
    lengths = seen_lengths(monkeypatch)
    monkeypatch.setattr(intake, "MAX_SHOWN", 1000)
    chat = {"messages": [{"role": "user", "content": LONG}]}
    answers = ask(line("a", prompt=LONG), line("b", CHAT, **chat))
    errors = [answer["response"]["body"]["error"] for answer in answers]
    assert [error["code"] for error in errors] == ["context_length_exceeded"] * 2
    assert TOO_LONG in errors[0]["message"]
    assert "are more than 3000 tokens, but the longest sequence is 200" in errors[1]["message"]
    assert max(lengths) < 30_000


def test_a_conversation_that_is_only_looked_at_may_be_longer(llm):
    assert len(llm.render_chat([{"role": "user", "content": LONG[:100_000]}]).token_ids) > 100_000


def seen_lengths(monkeypatch):
    """The lengths of the texts that a tokenizer is given from now on."""
    lengths = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda self, text, **options: lengths.append(len(text)) or encode(self, text, **options),
    )
    return lengths

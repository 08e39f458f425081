"""Prompts and conversations as callers write them: what is understood, and how the rest is refused."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.prompts import Prompt

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
        ({"prompt": "ab\udcff"}, "prompt 1: is not valid UTF-8, it has byte 0xff at character 2"),
    ],
)
def test_a_bad_prompt_is_named(llm, prompt, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(["fine", prompt], SHORT)
    assert not llm._engine.added


@pytest.mark.parametrize("prompts", [7, b"abc", None])
def test_what_holds_no_prompts_is_named(llm, prompts):
    kind = type(prompts).__name__
    with pytest.raises(
        ValueError, match=f"prompts must be text, token ids, or a list .* got {kind}"
    ):
        llm.generate(prompts)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], r"chat: messages must be a non-empty list of .* dicts, got \[\]"),
        ("hi", "chat: messages must be a non-empty list of .* dicts, got 'hi'"),
        ([{}], r"chat: message 0 must be {'role': ..., 'content': ...}, got {}"),
        ([{"role": "user", "content": "a"}, 7], "chat: message 1 must be .*, got 7"),
        ([{"role": 3}], r"chat: message 0 must be .*, got {'role': 3}"),
        ([[]], r"chat: a conversation must be a non-empty list of messages, got \[\]"),
        (["hi"], "chat: a conversation must be a non-empty list of messages, got 'hi'"),
        (
            [{"role": "user", "content": "\udcfe"}],
            "chat: the conversation: is not valid UTF-8, it has byte 0xfe at character 6",
        ),
    ],
)
def test_a_bad_conversation_is_named(llm, messages, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages)


@pytest.mark.parametrize(
    "messages, message",
    [
        ("hi", "chat: a conversation must be a non-empty list of messages, got 'hi'"),
        ([], r"chat: a conversation must be a non-empty list of messages, got \[\]"),
        ({"role": "user"}, "chat: a conversation must be .*, got {'role': 'user'}"),
        ([{"content": "hi"}], "chat: message 0 must be .*, got {'content': 'hi'}"),
    ],
)
def test_a_bad_conversation_is_not_rendered(llm, messages, message):
    with pytest.raises(ValueError, match=message):
        llm.render_chat(messages)

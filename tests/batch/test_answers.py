"""One line of a batch file: what comes back for it."""

from __future__ import annotations

import re
import time

import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.openai.answers import TokenTexts
from hybrid_jax.text.tokenizer import Tokenizer
from tests.batch.batch_files import CHAT, line
from tests.llms import byte_tokenizer


def test_a_completion_comes_back_as_the_api_writes_it(ask):
    [answer] = ask(line("r1", model="M"))
    response = answer.pop("response")
    body = response.pop("body")
    assert re.fullmatch("batch_req_[0-9a-f]{32}", answer.pop("id"))
    assert re.fullmatch("req_[0-9a-f]{32}", response.pop("request_id"))
    assert re.fullmatch("cmpl-[0-9a-f]{32}", body.pop("id"))
    assert abs(body.pop("created") - time.time()) < 60
    assert answer == {"custom_id": "r1", "error": None}
    assert response == {"status_code": 200}
    assert body == {
        "object": "text_completion",
        "model": "M",
        "choices": [{"index": 0, "text": "The quick", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 9,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_chat_comes_back_as_the_api_writes_it(body_of):
    body = body_of("r1", CHAT, model="M", stop="brown", max_tokens=None)
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 0
    prompt_tokens = len("<user>ab")
    assert body == {
        "object": "chat.completion",
        "model": "M",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The quick ", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 15,
            "total_tokens": prompt_tokens + 15,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_cached_tokens_are_counted(make_llm, body_of):
    llm = make_llm(grain=32)
    llm.generate("x" * 100, SamplingParams(max_tokens=1))
    usage = body_of(prompt=["x" * 100, "y", "x" * 100], n=2, llm=llm)["usage"]
    assert usage["prompt_tokens"] == 201
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2 * 96}
    assert usage["completion_tokens"] == 6 * 9


def test_chat_logprobs_have_bytes_and_the_best_tokens(body_of):
    body = body_of("a", CHAT, logprobs=True, top_logprobs=2, max_tokens=2)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert logprobs["content"][0] == {
        "token": "T",
        "logprob": -0.25,
        "bytes": [84],
        "top_logprobs": [
            {"token": "T", "logprob": -0.25, "bytes": [84]},
            {"token": "U", "logprob": -2.0, "bytes": [85]},
        ],
    }
    assert [entry["token"] for entry in logprobs["content"]] == ["T", "h"]
    body = body_of("a", CHAT, logprobs=True, max_tokens=1)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert body_of("a", CHAT, logprobs=False)["choices"][0]["logprobs"] is None


def test_completion_logprobs_have_offsets(body_of):
    body = body_of(logprobs=1, max_tokens=3)
    assert body["choices"][0]["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-0.25] * 3,
        "tokens": ["T", "h", "e"],
        "top_logprobs": [{"T": -0.25}, {"h": -0.25}, {"e": -0.25}],
    }
    [first, *_] = body_of(logprobs=2)["choices"][0]["logprobs"]["top_logprobs"]
    assert first == {"T": -0.25, "U": -2.0}


@pytest.mark.parametrize("kind", ["fallback", "byte level"])
def test_tokens_that_are_parts_of_characters_keep_their_bytes(root, kind):
    bundled = root / "hybrid_jax" / "bundled"
    tokenizer = byte_tokenizer() if kind == "fallback" else Tokenizer.from_directory(bundled)
    texts, data = TokenTexts(tokenizer), "a€\u00e9b".encode()
    tokens = list(data) if kind == "fallback" else tokenizer.encode("a€\u00e9b")
    found = [texts.data(t, tokenizer.decode([t], skip_special_tokens=False)) for t in tokens]
    assert b"".join(found) == data
    assert texts.offsets([97], tokens, skip_special_tokens=True) == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("skip, offsets", [(True, [0, 1, 1, 2]), (False, [0, 1, 8, 9])])
def test_special_tokens_move_later_ones_where_they_are_in_the_text(
    make_llm, body_of, skip, offsets
):
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(["<pause>"])
    pause = tokenizer.backend.token_to_id("<pause>")
    llm = make_llm(tokenizer=tokenizer)
    llm._engine.next_token = lambda request: (97, pause, 98, 99)[len(request.output.token_ids)]
    [choice] = body_of(logprobs=0, max_tokens=4, skip_special_tokens=skip, llm=llm)["choices"]
    assert choice["text"] == ("abc" if skip else "a<pause>bc")
    assert choice["logprobs"]["tokens"] == ["a", "<pause>", "b", "c"]
    assert choice["logprobs"]["text_offset"] == offsets


def test_prompts_as_texts_and_ids_give_a_choice_each(body_of):
    for prompt, count in [
        ("ab", 1),
        (["ab", "cd"], 2),
        ([97, 98], 1),
        ([[97], [98], [99]], 3),
    ]:
        body = body_of(prompt=prompt, n=2, max_tokens=4)
        choices = body["choices"]
        assert [c["index"] for c in choices] == list(range(2 * count))
        assert [c["text"] for c in choices] == ["The ", "quic"] * count


def test_the_model_is_called_what_the_line_calls_it(body_of):
    assert body_of(model="any name")["model"] == "any name"
    assert body_of()["model"] == "llama"


def test_text_parts_tools_and_template_options_reach_the_template(make_llm, body_of):
    tokenizer = byte_tokenizer()
    tokenizer.chat_templates["default"] = (
        "{% for m in messages %}{{ m.content }}|{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
        "{{ tools | length if tools else 0 }}{{ mood }}{{ add_generation_prompt }}"
    )
    llm = make_llm(tokenizer=tokenizer)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    options = {"tools": [{"type": "function"}], "chat_template_kwargs": {"mood": "!"}}
    body_of("a", CHAT, messages=messages, **options, llm=llm)
    body_of("a", CHAT, messages=messages, **options, tool_choice="none", llm=llm)
    body_of("a", CHAT, messages=messages, add_generation_prompt=False, llm=llm)
    assert [bytes(request.prompt).decode() for request in llm._engine.added] == [
        "a\nb||71!True",
        "a\nb||70!True",
        "a\nb||70False",
    ]


def test_a_line_and_a_chat_give_the_template_the_same_tools(make_llm, body_of):
    tokenizer = byte_tokenizer()
    tokenizer.chat_templates["default"] = "{{ messages[0].content }} {{ tools | tojson }}"
    llm = make_llm(tokenizer=tokenizer)
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "n": {"x": 1}}]
    [output] = llm.chat(messages, SamplingParams(max_tokens=1), tools=tools)
    assert output.prompt == 'hi [{"type": "function", "n": {"x": 1}}]'
    body_of("a", CHAT, messages=messages, tools=tools, llm=llm)
    first, second = (request.prompt for request in llm._engine.added)
    assert first == second


def test_odd_characters_come_back_on_one_line_however_lines_are_split(ask, tmp_path):
    name = "\u2028\x85\x7f\u00e9\U0001f600"
    [answer] = ask(line(name))
    assert answer["custom_id"] == name
    text = (tmp_path / "batch" / "out.jsonl").read_text(encoding="utf-8")
    assert len(text.splitlines()) == 1
    assert "\u00e9\U0001f600" in text  # readable where that is safe

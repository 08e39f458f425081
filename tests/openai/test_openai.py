"""OpenAI's API without file, server or engine: bodies to prompts and parameters, outputs and errors to bodies."""

from __future__ import annotations

import re

import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.api.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from hybrid_jax.openai.answers import TokenTexts, answer
from hybrid_jax.openai.errors import RequestError, as_request_error, error_object
from hybrid_jax.openai.fields import CHAT, COMPLETIONS, FIELDS
from hybrid_jax.openai.requests import read_body, read_object
from hybrid_jax.text.prompts import Prompt, TooLong
from tests.llms import byte_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
MODEL = SamplingParams(temperature=0.0, top_k=2)  # what the model names


def body(url, given, **others):
    """What a body asks for, where a conversation becomes one token for each of its messages."""
    seen = {}

    def render_chat(messages, **options):
        seen.update(options)
        return Prompt(None, (7,) * len(messages))

    asked = {"defaults": MODEL, "render_chat": render_chat, "remedies": {}} | others
    return read_body(given, url, **asked), seen


def test_a_completion_becomes_prompts_that_are_not_tokenized_yet():
    found, _ = body(COMPLETIONS, {"prompt": ["ab", "c"], "n": 2, "seed": 3, "model": "M"})
    assert found.model == "M"
    assert [prompt["prompt"] for prompt in found.prompts] == ["ab", "c"]
    assert found.params == SamplingParams(temperature=0.0, top_k=2, n=2, seed=3)


def test_a_chat_becomes_the_prompt_that_its_renderer_makes():
    found, options = body(CHAT, {"messages": MESSAGES * 2, "tools": [{}], "tool_choice": "none"})
    assert (found.prompts, found.params) == ([Prompt(None, (7, 7))], MODEL)
    assert options == {}
    _, options = body(CHAT, {"messages": MESSAGES, "continue_final_message": True})
    assert options == {"continue_final_message": True}


def test_who_serves_the_api_says_what_to_do_instead():
    wanted = {"prompt": "a", "stream": True}
    with pytest.raises(RequestError, match="engine; leave it out or set it to false$"):
        body(COMPLETIONS, wanted)
    with pytest.raises(RequestError, match="^stream=true is .* engine; ask elsewhere$"):
        body(COMPLETIONS, wanted, remedies={"stream": "ask elsewhere"})


def test_no_remedy_of_the_table_speaks_of_files():
    assert not [name for name, field in FIELDS.items() if "line" in field.remedy]


@pytest.mark.parametrize(
    "data, message",
    [(b"[1]", r"must be a JSON object, got \[1\]"), (b"\xff", "not UTF-8: .* at byte 0")],
)
def test_what_is_no_object_is_refused_with_the_code_of_the_caller(data, message):
    assert read_object(b'{"a": 1}', code="mine") == {"a": 1}
    with pytest.raises(RequestError, match=message) as raised:
        read_object(data, code="mine")
    assert (raised.value.code, raised.value.status) == ("mine", 400)


@pytest.mark.parametrize(
    "error, code, status, kind",
    [
        (RequestError("a", code="own", status=404), "own", 404, "invalid_request_error"),
        (TooLong("a"), "context_length_exceeded", 400, "invalid_request_error"),
        (ValueError("a"), "invalid_value", 400, "invalid_request_error"),
        (FloatingPointError("a"), "not_finite", 500, "server_error"),
        (KeyError("a"), "internal_error", 500, "server_error"),
    ],
)
def test_any_error_becomes_an_object_with_its_code(error, code, status, kind):
    found = as_request_error(error)
    said = "KeyError: 'a'" if isinstance(error, KeyError) else "a"
    assert (str(found), found.status) == (said, status)
    told = {"message": "here", "type": kind, "param": None, "code": code}
    assert error_object(found, "here") == told


def output(**completion):
    """A finished prompt "ab" with one completion "xy"."""
    given = {"index": 0, "text": "xy", "token_ids": (120, 121), "finish_reason": "stop"}
    return RequestOutput(
        request_id="0",
        prompt="ab",
        prompt_token_ids=(97, 98),
        outputs=(CompletionOutput(**given | completion),),
        metrics=RequestMetrics(arrival_time=0.0, finished_time=1.0),
        num_cached_tokens=1,
    )


def answered(url, *outputs, params=MODEL):
    texts = TokenTexts(byte_tokenizer())
    own = {"answer_id": "id", "model": "M", "created": 5, "texts": texts}
    return answer(outputs, params, url, **own)


def test_outputs_become_the_choices_of_one_body():
    found = answered(COMPLETIONS, output(), output(text="z", finish_reason="length"))
    assert [found[name] for name in ("id", "object", "created", "model")] == [
        *("id", "text_completion", 5, "M")
    ]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in found["choices"]] == [
        (0, "xy", "stop"),
        (1, "z", "length"),
    ]
    counts = {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert found["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 2}}


def test_a_chat_has_a_message_and_the_asked_number_of_likely_tokens():
    logprobs = tuple(
        {token: Logprob(logprob=float("-inf"), rank=1, decoded_token=chr(token))}
        for token in (120, 121)
    )
    found = answered(CHAT, output(logprobs=logprobs), params=SamplingParams(logprobs=1))
    [choice] = found["choices"]
    assert found["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "xy", "refusal": None}
    first = choice["logprobs"]["content"][0]
    entry = {"token": "x", "logprob": -9999.0, "bytes": [120]}
    assert first == entry | {"top_logprobs": [entry]}


def test_an_end_that_the_api_does_not_know_is_an_error():
    with pytest.raises(RequestError, match="ended early: stuck; change the form") as raised:
        answered(CHAT, output(finish_reason="abort", stop_reason="stuck"))
    assert (raised.value.code, raised.value.param) == ("ended_early", "structured_outputs")


def test_the_room_knows_no_file_and_no_server(root):
    """Neither by what it imports nor by its words: what differs between those who serve the API is handed in."""
    for path in sorted((root / "hybrid_jax" / "openai").glob("*.py")):
        source = path.read_text()
        imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.M))
        plain = {"dataclasses", "difflib", "functools", "json", "re", "reprlib", "typing"}
        assert imported <= {"__future__", "collections", "hybrid_jax", *plain}, path
        for word in ("custom_id", "jsonl", "run-batch", "--chat-template", "batch line"):
            assert word not in source, path

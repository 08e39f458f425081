"""One line of a batch file: what is wrong with it, and that the others are answered all the same."""

from __future__ import annotations

import pytest

from hybrid_jax.batch.requests import MAX_CHOICES
from tests.batch.batch_files import CHAT, line
from tests.llms import byte_tokenizer

MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "entry, code, message",
    [
        ("{", "invalid_json_line", "not JSON: Expecting property name"),
        ("[1, 2]", "invalid_json_line", "must be a JSON object, got [1, 2]"),
        ("nonsense", "invalid_json_line", "not JSON: Expecting value"),
        ('{"custom_id": NaN}', "invalid_json_line", "NaN is not a JSON number"),
        ("[" * 100_000, "invalid_json_line", "nested too deeply"),
        ('{"custom_id": "\\ud800"}', "invalid_json_line", "half of a surrogate pair"),
        ('{"a": ' + "9" * 5000 + "}", "invalid_json_line", "not JSON: Exceeds the limit"),
        ("{}", "missing_required_parameter", "has no custom_id; a line needs custom_id, method"),
        (line() | {"custom_id": 5}, "invalid_value", "must be a non-empty string, got 5"),
        (line() | {"custom_id": ""}, "invalid_value", "must be a non-empty string, got ''"),
        (line() | {"method": "GET"}, "invalid_method", "method must be \"POST\", got 'GET'"),
        (line("a", "/v1/embeddings"), "invalid_url", "url must be /v1/chat/completions or"),
        (line("a", "/v1/embeddings"), "invalid_url", "got '/v1/embeddings'"),
        (line() | {"url": {}}, "invalid_url", "got {}"),
        (line() | {"body": [1]}, "invalid_value", "body must be an object, got [1]"),
        (line() | {"temperature": 1}, "unknown_parameter", "an unknown key 'temperature' beside"),
        (line(model=5), "invalid_value", "model must be a string, got 5"),
        # prompts
        (line(prompt=None), "missing_required_parameter", "the body has no prompt"),
        (line(prompt=[]), "invalid_value", "none of them empty, got []"),
        (line(prompt=["a", 1]), "invalid_value", "got ['a', 1]"),
        (line(prompt=[True]), "invalid_value", "got [True]"),
        (line(prompt=[[1], []]), "invalid_value", "got [[1], []]"),
        (line(prompt=""), "invalid_value", "prompt 0: is empty"),
        (line(prompt=[256]), "invalid_value", "token ids must lie between 0 and 255, got 256"),
        (line(prompt="x" * 300), "context_length_exceeded", "prompt 0: has 300 tokens"),
        (line(max_tokens=500), "context_length_exceeded", "lower max_tokens to 198"),
        (line(n=1000, prompt=["a", "b"]), "invalid_value", "asks for 2000 completions"),
        # messages
        (line("a", CHAT, messages=None), "missing_required_parameter", "the body has no messages"),
        (line("a", CHAT, messages=[]), "invalid_value", "must be a non-empty list, got []"),
        (
            line("a", CHAT, messages=["hi"]),
            "invalid_value",
            "messages[0] must have a role and a content, got 'hi'",
        ),
        (
            line("a", CHAT, messages=[MESSAGE, {"role": "user"}]),
            "missing_required_parameter",
            "messages[1] has no content",
        ),
        (
            line("a", CHAT, messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "unsupported_parameter",
            "messages[0].content[0] must be a part of type 'text', the only one supported",
        ),
        (
            line("a", CHAT, tools={}),
            "invalid_value",
            "tools must be a list of JSON schemas, got {}",
        ),
        (line("a", CHAT, tools=[7]), "invalid_value", "tools[0] must be a JSON schema like"),
        (line("a", CHAT, tools=[7], tool_choice="none"), "invalid_value", "got 7"),
        (
            line("a", CHAT, tools=[{}], parallel_tool_calls=False),
            "unsupported_parameter",
            "parallel_tool_calls=false is not supported by this engine; leave it out",
        ),
        (
            line("a", CHAT, tool_choice="required"),
            "unsupported_parameter",
            "tool_choice='required'",
        ),
        (
            line("a", CHAT, chat_template_kwargs={"messages": []}),
            "invalid_value",
            "chat_template_kwargs must not hold messages",
        ),
        # fields
        (
            line(temprature=1),
            "unknown_parameter",
            "no field 'temprature'; did you mean temperature?",
        ),
        (line(zzzz=1), "unknown_parameter", "/v1/completions has no field 'zzzz'; leave it out"),
        (line("a", CHAT, prompt="a"), "unknown_parameter", "/v1/chat/completions has no field"),
        (line(stream=True), "unsupported_parameter", "stream=true is not supported"),
        (line(echo=True), "unsupported_parameter", "echo=true is not supported"),
        (line(echo=0), "unsupported_parameter", "echo=0 is not supported"),  # 0 is not false
        (line(best_of=True), "unsupported_parameter", "best_of=true is not supported"),
        (line(suffix="x"), "unsupported_parameter", "suffix='x' is not supported"),
        (
            line(best_of=3),
            "unsupported_parameter",
            "best_of=3 is not supported unless it equals n=1",
        ),
        (
            line(temperature=-1),
            "invalid_value",
            "temperature must be 0 or a number between 1e-06 and 1000000, got -1",
        ),
        (
            line(temperature="1"),
            "invalid_value",
            "temperature must be 0 or a number between 1e-06 and 1000000, got '1'",
        ),
        (line(n=True), "invalid_value", "n must be an integer between 1 and 1024, got True"),
        (
            line(max_tokens=0),
            "invalid_value",
            "max_tokens must be an integer of at least 1",
        ),
        (
            line(seed=-1),
            "invalid_value",
            "seed must be an integer between 0 and 9223372036854775807, got -1",
        ),
        (line(stop={"a": 1}), "invalid_value", "stop must be a string or a list of strings"),
        (line(stop=["a", 1]), "invalid_value", "stop must be non-empty strings"),
        (line(stop_token_ids=7), "invalid_value", "stop_token_ids must be a list, got 7"),
        (line(stop_token_ids=[999]), "invalid_value", "below the vocabulary's 256, got 999"),
        (
            line(logit_bias={"a": 1}),
            "invalid_value",
            "an object from token ids to numbers, got {'a'",
        ),
        (line(logit_bias=[1]), "invalid_value", "an object from token ids to numbers, got [1]"),
        (line(bad_words="ab"), "invalid_value", "bad_words must be a list, got 'ab'"),
        (line(min_p=2), "invalid_value", "min_p must be"),
        (line(ignore_eos="yes"), "invalid_value", "ignore_eos must be true or false, got 'yes'"),
        (line(logprobs=True), "invalid_value", "logprobs must be an integer between 0"),
        (
            line(logprobs=21),
            "invalid_value",
            "logprobs must be an integer between 0 and 20 (LLM.logprobs reports all tokens), got 21",
        ),
        (line("a", CHAT, logprobs=1), "invalid_value", "logprobs must be true or false, got 1"),
        (
            line("a", CHAT, top_logprobs=1),
            "invalid_value",
            "top_logprobs needs logprobs to be true",
        ),
        (
            line("a", CHAT, logprobs=True, top_logprobs=99),
            "invalid_value",
            "top_logprobs must be an integer between 0 and 20 (LLM.logprobs reports all tokens), got 99",
        ),
        (
            line(response_format={"type": "xml"}),
            "invalid_value",
            'must be of type "text", "json_object"',
        ),
        (line(response_format=[]), "invalid_value", "with json_schema.schema, an object, got []"),
        (
            line(response_format={"type": "json_schema", "json_schema": {}}),
            "invalid_value",
            "got {'json_schema': {}, 'type': 'json_schema'}",
        ),
        (
            line(
                response_format={
                    "type": "json_schema",
                    "json_schema": {"schema": {"enum": [-(2**63)]}},
                }
            ),
            "invalid_value",
            "cannot be followed: enum has -9223372036854775808, numbers must be below 2**63 in size",
        ),
        (
            line(guided_json={"maxItems": 2**31 - 1}),
            "invalid_value",
            "maxItems is 2147483647, the limit",
        ),
        (line(guided_regex="a{2147483647}"), "invalid_value", "'{2147483647}' is 2147483647, the"),
        (line(structured_outputs={"xml": 1}), "invalid_value", "an object with one of json, regex"),
        (line(structured_outputs={}), "invalid_value", "needs exactly one of json, regex"),
        (line(guided_regex=5), "invalid_value", "regex must be made of non-empty text, got 5"),
        (
            line(guided_regex="a", guided_choice=["a"]),
            "invalid_value",
            "guided_regex and guided_choice set the same parameter and must agree",
        ),
        (line("a", CHAT, audio={}), "unsupported_parameter", "audio={} is not supported"),
    ],
)
def test_a_wrong_line_becomes_an_error_line_that_says_why(error_of, entry, code, message):
    error = error_of(entry)
    assert message in error["message"]
    assert error["code"] == code
    if code in ("unsupported_parameter", "unknown_parameter"):
        assert error["param"] is not None


def test_the_first_line_with_an_id_keeps_it(ask):
    wrong = line("b", temperature=-1)
    answers = ask(line("a"), wrong, line("a"), line("b"), line("c"))
    assert [a["custom_id"] for a in answers] == ["a", "b", "a", "b", "c"]
    assert [a["response"]["status_code"] for a in answers] == [200, 400, 400, 400, 200]
    for answer, custom_id, number in [(answers[2], "a", 3), (answers[3], "b", 4)]:
        assert answer["error"] == {
            "code": "duplicate_custom_id",
            "message": f"line {number}: custom_id '{custom_id}' was used by an earlier line; "
            "ids must be unique",
        }


def test_a_model_without_a_template_says_so(make_llm, ask):
    tokenizer = byte_tokenizer()
    tokenizer.chat_templates.clear()
    [answer] = ask(line("a", CHAT), llm=make_llm(tokenizer=tokenizer))
    assert answer["error"]["message"] == (
        "line 1: chat template: this model has none; name one for the whole run: "
        "--chat-template FILE"
    )
    assert answer["error"]["code"] == "chat_template"


def test_whatever_a_template_raises_is_the_lines_error(make_llm, ask):
    tokenizer = byte_tokenizer()
    tokenizer.chat_templates["default"] = "{{ 1 // (messages[0].content | length - 2) }}"
    lines = line("a", CHAT), line("b", CHAT, messages=[{"role": "user", "content": "abc"}])
    first, second = ask(*lines, llm=make_llm(tokenizer=tokenizer))
    assert "chat template: ZeroDivisionError" in first["error"]["message"]
    assert second["error"] is None


def test_a_mistake_of_ours_costs_one_line(llm, ask, monkeypatch):
    add = llm._engine.add

    def refuse(request):
        if request.prompt == [99]:
            raise KeyError("surprise")
        add(request)

    monkeypatch.setattr(llm._engine, "add", refuse)
    first, second, third = ask(line("a"), line("b", prompt=["d", "c"]), line("c"))
    assert second["response"]["status_code"] == 500
    assert second["response"]["body"]["error"]["type"] == "server_error"
    assert second["error"] == {
        "code": "internal_error",
        "message": "line 2: KeyError: 'surprise'",
    }
    assert first["error"] is third["error"] is None
    assert not llm._engine.has_work


def test_a_completion_that_ended_in_no_way_the_api_knows_is_an_error(llm, ask, monkeypatch):
    step = llm._engine.step

    def abort(*_):
        results = step()
        for result in results:
            if result.request.prompt == [99]:
                output = result.request.output
                output.finish_reason, output.stop_reason = "abort", "stuck"
        return results

    monkeypatch.setattr(llm._engine, "step", abort)
    first, second = ask(line("a", prompt=["b", "c"]), line("b"))
    assert first["error"] == {
        "code": "ended_early",
        "message": "line 1: a completion ended early: stuck; change the form, bad_words or "
        "allowed_token_ids",
    }
    assert first["response"]["body"]["error"]["param"] == "structured_outputs"
    assert second["error"] is None


def test_a_line_may_ask_for_many_choices_but_not_for_any_number(body_of, error_of):
    body = body_of(prompt=[[97]] * (MAX_CHOICES // 4), n=4, max_tokens=1)
    assert len(body["choices"]) == MAX_CHOICES
    error = error_of(line(prompt=[[97]] * (MAX_CHOICES + 1)))
    assert f"asks for {MAX_CHOICES + 1} completions" in error["message"]

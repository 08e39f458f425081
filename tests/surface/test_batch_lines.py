"""One line of a batch file: what comes back for it, and what is wrong with it."""

from __future__ import annotations

import json
import re
import time
from dataclasses import fields

import pytest

from hybrid_jax import LLM, SamplingParams, run_batch
from hybrid_jax.batch.fields import ELSEWHERE, FIELDS, read_params
from hybrid_jax.batch.requests import MAX_CHOICES
from hybrid_jax.batch.token_text import TokenTexts
from hybrid_jax.tokenizer import Tokenizer
from tests.surface.batch_files import CHAT, COMPLETIONS, line, read
from tests.surface.conftest import byte_tokenizer

SCRIPT = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture
def ask(llm, tmp_path):
    """The output lines of request objects, or of lines as they stand."""
    tmp_path = tmp_path / "batch"
    tmp_path.mkdir()

    def ask(*lines, llm=llm):
        text = [entry if isinstance(entry, str) else json.dumps(entry) for entry in lines]
        (tmp_path / "in.jsonl").write_text("\n".join(text), encoding="utf-8")
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm)
        return read(tmp_path / "out.jsonl")

    return ask


@pytest.fixture
def body_of(ask):
    """The body of the answer to one line; fails on an error line."""

    def body_of(*arguments, llm=None, **body):
        [answer] = ask(line(*arguments, **body), **{"llm": llm} if llm else {})
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        return answer["response"]["body"]

    return body_of


@pytest.fixture
def error_of(ask):
    """The error of one line."""

    def error_of(entry):
        [answer] = ask(entry)
        error = answer["response"]["body"]["error"]
        assert answer["response"]["status_code"] == 400
        assert answer["error"] == {"code": error["code"], "message": error["message"]}
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("line 1: ")
        return error

    return error_of


# --- answers --------------------------------------------------------------------------------------


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
    llm._engine.next_token = lambda request: (97, pause, 98, 99)[len(request.output)]
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


# --- sampling fields ------------------------------------------------------------------------------


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_sampling_fields_reach_the_sampler(llm, body_of, url):
    given = {
        **{"temperature": 0.5, "top_p": 0.75, "top_k": 3, "n": 2, "seed": 11},
        **{"stop": ["x", "y"], "stop_token_ids": [5], "ignore_eos": True, "max_tokens": 7},
        **{"include_stop_str_in_output": True, "skip_special_tokens": False},
        **{"min_p": 0.25, "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 2},
        **{"repetition_penalty": 1.5, "allowed_token_ids": [97, 98], "bad_words": ["z"]},
    }
    body_of("a", url, **given, logit_bias={"97": -3})
    [request, _] = llm._engine.added
    found = {name: getattr(request.params, name) for name in given}
    assert {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()} == given
    assert dict(request.params.logit_bias) == {97: -3}
    assert request.seed == 11


def test_max_completion_tokens_is_the_new_name(llm, body_of, error_of):
    body_of("a", CHAT, max_tokens=None, max_completion_tokens=5)
    body_of("a", CHAT, max_tokens=6, max_completion_tokens=6)
    assert [request.max_tokens for request in llm._engine.added] == [5, 6]
    error = error_of(line("a", CHAT, max_tokens=6, max_completion_tokens=5))
    assert "max_tokens and max_completion_tokens mean the same and must agree" in error["message"]
    assert "got 6 and 5" in error["message"]


def test_null_is_silence_and_silence_takes_the_models_defaults(llm, body_of):
    llm._intake.defaults = SamplingParams(temperature=0.0, top_k=2)
    body_of(temperature=None, top_k=None, logprobs=None, tools=None, user=None, stream=None)
    body_of(temperature=1)
    assert [(r.params.temperature, r.params.top_k) for r in llm._engine.added] == [(0, 2), (1, 2)]


def test_seeds_depend_on_the_id_and_the_place_in_the_line_alone(make_llm, ask):
    seeds = {}
    for lines in (["a", "b", "c"], ["c", "x", "a", "b"]):
        llm = make_llm(seed=3)
        ask(*(line(name, prompt=["p", "q"]) for name in lines), llm=llm)
        added = [request.seed for request in llm._engine.added]
        for place, name in enumerate(lines):
            assert (
                seeds.setdefault(name, added[2 * place : 2 * place + 2])
                == (added[2 * place : 2 * place + 2])
            )
    assert len({seed for pair in seeds.values() for seed in pair}) == 2 * 4
    other = make_llm(seed=4)
    ask(line("a", prompt=["p", "q"]), llm=other)
    assert [request.seed for request in other._engine.added] != seeds["a"]


@pytest.mark.parametrize(
    "body, kind, value",
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            "json",
            '{"a": 1}',
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_json": '{"a": 1}'}, "json", '{"a": 1}'),
    ],
)
def test_the_form_of_an_answer_is_read_under_all_its_names(body, kind, value):
    found = read_params(body, COMPLETIONS, SamplingParams()).structured_outputs
    assert (found and found.kind, found and found.value) == (kind, value)


def test_fields_without_effect_are_accepted(body_of):
    body_of(
        **{"user": "u", "metadata": {"k": "v"}, "store": True, "service_tier": "flex"},
        **{"stream": False, "echo": False, "suffix": "", "best_of": 1, "logit_bias": {}},
        **{"presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0, "repetition_penalty": 1.0},
    )
    body_of("a", CHAT, response_format={"type": "text"}, modalities=["text"], tool_choice="auto")


def test_every_sampling_parameter_can_be_asked_for_or_is_left_out_on_purpose():
    asked = {field.to for field in FIELDS.values()}
    elsewhere = {
        "logprobs",  # has two spellings
        "detokenize",  # an answer is text
        "output_kind",  # an answer is whole
        "prompt_logprobs",  # the API's objects have no place for them
    }
    names = {field.name for field in fields(SamplingParams)}
    assert names - asked <= elsewhere, (
        "give the new field of SamplingParams a line in hybrid_jax/batch/fields.py"
    )
    assert asked - {None} <= names
    assert not [name for name, field in FIELDS.items() if field.to and field.nothing]
    assert not set(FIELDS) & (ELSEWHERE[CHAT] | ELSEWHERE[COMPLETIONS])


def test_the_page_names_every_field(root):
    page = (root / "docs" / "batch.md").read_text()
    named = set(re.findall(r"`(\w+)`", page[page.index("## Fields") :]))
    assert {*FIELDS, *ELSEWHERE[CHAT], *ELSEWHERE[COMPLETIONS]} - named == set()


# --- errors ---------------------------------------------------------------------------------------

MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "entry, code, message",
    [
        ("{", "invalid_json_line", "not JSON: Expecting property name"),
        ("[1, 2]", "invalid_json_line", "must be a JSON object, got [1, 2]"),
        ("nonsense", "invalid_json_line", "not JSON: Expecting value"),
        ('{"custom_id": NaN}', "invalid_json_line", "NaN is no JSON number"),
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
        (line("a", CHAT, messages=["hi"]), "invalid_value", "messages[0] must be an object"),
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
        (line("a", CHAT, tools={}), "invalid_value", "tools must be a list, got {}"),
        (line("a", CHAT, tools=[7]), "invalid_value", "tools[0] must be an object, got 7"),
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
            "max_tokens must be None or an integer of at least 1",
        ),
        (line(seed=-1), "invalid_value", "seed must be None or an integer in [0, 2**63), got -1"),
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
        (line(logprobs=True), "invalid_value", "logprobs must be None or an integer between 0"),
        (line(logprobs=21), "invalid_value", "an integer between 0 and 20, got 21"),
        (line("a", CHAT, logprobs=1), "invalid_value", "logprobs must be true or false, got 1"),
        (
            line("a", CHAT, top_logprobs=1),
            "invalid_value",
            "top_logprobs needs logprobs to be true",
        ),
        (
            line("a", CHAT, logprobs=True, top_logprobs=99),
            "invalid_value",
            "top_logprobs must be None or an integer between 0 and 20, got 99",
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
        (line(structured_outputs={"xml": 1}), "invalid_value", "an object with one of json, regex"),
        (line(structured_outputs={}), "invalid_value", "needs exactly one of json, regex"),
        (line(guided_regex=5), "invalid_value", "regex must be made of non-empty text, got 5"),
        (
            line(guided_regex="a", guided_choice=["a"]),
            "invalid_value",
            "guided_regex and guided_choice mean the same and must agree",
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
    assert "this model has no default one" in answer["error"]["message"]
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
                result.request.finish_reason, result.request.stop_reason = "abort", "stuck"
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


def test_odd_characters_come_back_on_one_line_however_lines_are_split(ask, tmp_path):
    name = "\u2028\x85\x7f\u00e9\U0001f600"
    [answer] = ask(line(name))
    assert answer["custom_id"] == name
    text = (tmp_path / "batch" / "out.jsonl").read_text(encoding="utf-8")
    assert len(text.splitlines()) == 1
    assert "\u00e9\U0001f600" in text  # readable where that is safe


def test_an_llm_of_its_own_takes_no_options(llm, tmp_path):
    with pytest.raises(ValueError, match="the LLM is made already, so max_rows comes too late"):
        run_batch(tmp_path / "in", tmp_path / "out", llm, max_rows=3)
    assert isinstance(llm, LLM)

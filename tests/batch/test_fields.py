"""The fields of a line: how they reach the sampler, under which names, with which defaults."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.openai.fields import ELSEWHERE, FIELDS, read_params
from tests.batch.batch_files import CHAT, COMPLETIONS, line
from tests.constraints.thinking import QWEN3_5
from tests.constraints.vocabularies import tokens_of


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
    assert (
        "max_tokens and max_completion_tokens set the same parameter and must agree"
        in error["message"]
    )
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


def test_breakpoints_are_messages_characters_or_tokens(llm, body_of, error_of):
    opening = {"role": "system", "content": "ab"}
    messages = [opening, {"role": "user", "content": "c"}]
    body_of("a", CHAT, messages=messages)
    body_of("a", CHAT, messages=messages, cache_breakpoints=[])
    body_of("a", COMPLETIONS, prompt="abc", cache_breakpoints=[2])
    body_of("a", COMPLETIONS, prompt=[[1, 2], [3, 4, 5]], cache_breakpoints=[1])
    found = [request.cache_breakpoints for request in llm._engine.added]
    assert found == [(len("<system>ab<user>"),), (), (2,), (1,), (1,)]
    marked = [opening, messages[1] | {"cache": True}, opening]
    body_of("a", CHAT, messages=marked)
    body_of("a", CHAT, messages=marked, cache_breakpoints=[0])
    found = [request.cache_breakpoints for request in llm._engine.added[-2:]]
    assert found == [(len("<system>ab<user>"), len("<system>ab<user>c<system>"))] * 2
    error = error_of(line("a", CHAT, messages=messages, cache_breakpoints=[7]))
    assert "cache_breakpoints: there is no message 7" in error["message"]
    assert error["param"] == "cache_breakpoints"
    error = error_of(line("a", COMPLETIONS, prompt="a", cache_breakpoints=[7]))
    assert "cache_breakpoints must lie between 1 and the prompt's 1 characters" in error["message"]


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
    found = read_params(body, COMPLETIONS, SamplingParams(), {}).structured_outputs
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
        "give the new field of SamplingParams a line in hybrid_jax/openai/fields.py"
    )
    assert asked - {None} <= names
    assert not [name for name, field in FIELDS.items() if field.to and field.nothing]
    assert not set(FIELDS) & (ELSEWHERE[CHAT] | ELSEWHERE[COMPLETIONS])


def test_the_page_names_every_field(root):
    page = (root / "docs" / "how_to" / "batch.md").read_text()
    named = set(re.findall(r"`(\w+)`", page[page.index("## Fields") :]))
    assert {*FIELDS, *ELSEWHERE[CHAT], *ELSEWHERE[COMPLETIONS]} - named == set()


def test_a_form_begins_after_the_thoughts_that_a_line_opens(llm, body_of):
    def first(url, form, **body):
        body_of("a", url, structured_outputs=form, max_tokens=1, **body)
        return len(tokens_of(llm._engine.added[-1].constraint.mask([])))

    form, messages = {"regex": "[ab]+"}, [{"role": "user", "content": "hi"}]
    assert first(COMPLETIONS, form, prompt="is it? ") == 2
    assert first(COMPLETIONS, form, prompt="is it? <think>\n") == 255  # all but the end
    llm.get_tokenizer().chat_templates["default"] = QWEN3_5
    assert first(CHAT, form, messages=messages) == 255
    assert first(CHAT, form | {"after_thoughts": False}, messages=messages) == 2
    off = {"enable_thinking": False}
    assert first(CHAT, form, messages=messages, chat_template_kwargs=off) == 2

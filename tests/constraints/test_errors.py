"""What a caller can get wrong is one ValueError that names the prompt, the value and the remedy."""

from __future__ import annotations

import pickle
import re
import sys
from typing import Literal

import llguidance
import pydantic
import pytest
import tokenizers
from tokenizers import models

from hybrid_jax import SamplingParams, StructuredOutputsParams
from hybrid_jax.constraints import Constraints
from hybrid_jax.text.tokenizer import Tokenizer
from tests.constraints.forms import config_of
from tests.llms import byte_tokenizer


class Person(pydantic.BaseModel):
    name: str


def refuse(message, tokenizer=None, constraints=None, vocab_size=256, stop_ids=(), **params):
    constraints = constraints or Constraints(tokenizer, config_of(vocab_size))
    with pytest.raises(ValueError, match="^prompt 7: .*" + re.escape(message)):
        constraints.limits(7, SamplingParams(**params), frozenset(stop_ids))


def form(**given):
    return StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"regex": "(a"}, "regex '(a' cannot be followed: unclosed group; close it with )"),
        (
            {"regex": "(?=a)b"},
            "look-around, including look-ahead and look-behind, is not supported",
        ),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        (
            {"regex": "()"},
            "regex '()' lets no token come first; allow a token that can begin it, or give",
        ),
        (
            {"grammar": "start: word"},
            "grammar 'start: word' cannot be followed: line 1, column 8: unknown name",
        ),
        ({"grammar": "start"}, "grammar 'start' cannot be followed: "),
        (
            {"json": {"type": "strng"}},
            """json '{"type": "strng"}' cannot be followed: type 'strng' at # is not""",
        ),
        ({"json": {"$ref": "#/nowhere"}}, "Pointer '/nowhere' does not exist"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
    ],
)
def test_a_wrong_form_is_refused(given, message):
    refuse(message, byte_tokenizer(), structured_outputs=form(**given))


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"maxLength": 3}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "object", "propertyNames": {"pattern": "a"}},
        {"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"type": "string", "format": "colour"},
        {"type": "string", "pattern": "(?=a)"},
    ],
)
def test_no_part_of_a_schema_is_ignored(schema):
    refuse("cannot be followed: ", byte_tokenizer(), structured_outputs=form(json=schema))


def test_a_schema_nested_too_deeply_is_refused():
    schema = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    message = "cannot be followed: the depth of the schema is 121, the limit is 120; nest less"
    refuse(message, byte_tokenizer(), structured_outputs=form(json=schema))
    for _ in range(100_000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="json must be a JSON schema that is not nested too deep"):
        form(json=schema)


def test_a_long_form_is_shortened_in_the_message():
    constraints = Constraints(byte_tokenizer(), config_of(256))
    with pytest.raises(ValueError) as raised:
        params = SamplingParams(structured_outputs=form(regex="(" + "a" * 5000))
        constraints.limits(0, params, frozenset())
    assert len(str(raised.value)) < 400


def test_without_a_tokenizer_there_are_no_words_and_no_forms():
    missing = (
        "need a tokenizer, which this model lacks; put a tokenizer.json beside its config.json"
    )
    refuse("structured_outputs " + missing, structured_outputs=form(regex="a"))
    refuse("bad_words " + missing, bad_words=["a"])


def test_an_old_llguidance_is_refused(monkeypatch):
    monkeypatch.setattr(llguidance, "__version__", "1.7.6")
    message = "need llguidance 1.9 or newer, 1.7.6 is installed; pip install 'hybrid_jax[structured]' --upgrade"
    refuse(message, byte_tokenizer(), structured_outputs=form(regex="a"))


def test_without_llguidance_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    message = "structured outputs need llguidance; pip install 'hybrid_jax[structured]'"
    refuse(message, byte_tokenizer(), structured_outputs=form(regex="a"))


@pytest.mark.parametrize(
    "params, message",
    [
        (
            {"logit_bias": {9: 1.0, 256: 1.0}},
            "logit_bias must name token ids below the vocabulary's 256",
        ),
        (
            {"allowed_token_ids": [1, 999]},
            "allowed_token_ids must name token ids below the vocabulary's",
        ),
        ({"allowed_token_ids": [1, 999]}, "got 999"),
        (
            {"allowed_token_ids": [97], "bad_words": ["a"]},
            "nothing may come first with allowed_token_ids=(97,) and bad_words=('a',)",
        ),
        (
            {"allowed_token_ids": [0], "min_tokens": 2},
            "nothing may come first with allowed_token_ids=(0,) and min_tokens=2; change one of them",
        ),
        (
            {"allowed_token_ids": [97], "structured_outputs": form(choice=["b"])},
            "choice ('b',) lets no token come first with allowed_token_ids=(97,); allow a token",
        ),
        (
            {"bad_words": ["b"], "structured_outputs": form(choice=["b"])},
            "choice ('b',) lets no token come first with bad_words=('b',); allow a token",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(params, message):
    refuse(message, byte_tokenizer(), stop_ids={0}, **params)


def test_a_word_no_token_of_the_model_can_write_is_refused():
    refuse("bad_words has 'z'", byte_tokenizer(), vocab_size=100, bad_words=["z"])


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "needs exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"json": "{"}, "json must be a JSON schema (Expecting property name"),
        ({"json": [1]}, "json must be a JSON schema, an object, got [1]"),
        (
            {"json": Person(name="Ann")},
            "json must be a model's class or its model_json_schema(), not an instance, got Person(",
        ),
        (
            {"json": int},
            "json must be a JSON schema, or a class that has model_json_schema(), got <class 'int'>",
        ),
        ({"json": {"maximum": float("inf")}}, "json must be a JSON schema (Out of range float"),
        ({"json": '{"maximum": NaN}'}, "json must be a JSON schema (NaN is not a JSON number)"),
        ({"regex": 3}, "regex must be made of non-empty text, got 3"),
        ({"regex": ""}, "regex must be made of non-empty text, got ''"),
        ({"choice": "red"}, "choice must be a list of texts, got 'red'"),
        ({"choice": []}, "choice must be at least one text, got ()"),
        ({"choice": ["a", "\ud800"]}, "choice must be valid Unicode"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"json_object": False}, "got none"),
    ],
)
def test_a_form_is_checked_when_it_is_written(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StructuredOutputsParams(**given)


class Crew(pydantic.BaseModel):
    captain: Person | None
    members: list[Person] = pydantic.Field(max_length=3)
    kind: Literal["sea", "air"]


def test_a_class_of_pydantic_stands_for_its_schema():
    schema = form(json=Crew)
    assert schema == form(json=Crew.model_json_schema())
    assert pickle.loads(pickle.dumps(schema)) == schema
    constraints = Constraints(byte_tokenizer(), config_of(256))
    assert constraints.limits(0, SamplingParams(structured_outputs=schema), frozenset()).constraints


def test_any_class_may_give_its_schema():
    class Number:
        model_json_schema = staticmethod(lambda: {"type": "integer"})

    assert form(json=Number).value == '{"type": "integer"}'


def test_a_form_is_a_value():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    one, other = form(json=schema), form(json='{"type":"object", "properties":{"b":{}, "a":{}}}')
    assert one == other and hash(one) == hash(other)  # white space is not part of it
    params = SamplingParams(structured_outputs=one)
    assert pickle.loads(pickle.dumps(params)) == params and hash(params) == hash(params)
    assert form(choice=iter(["a", "b"])).value == ("a", "b")
    with pytest.raises(ValueError, match="structured_outputs must be None or Struct.*got 'a'"):
        SamplingParams(structured_outputs="a")


def test_a_tokenizer_that_the_library_cannot_use_is_named():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 3}, merges=[]))
    message = (
        "cannot use this model's tokenizer.json: its ids have gaps, so 3 came twice; use free text"
    )
    refuse(message, Tokenizer(backend), structured_outputs=form(regex="a"))

"""Objects whose properties may be left out are followed up to the library's limit, and refused by name past it."""

from __future__ import annotations

import json

import pytest

from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints.grammar import LIMITS, Grammars
from hybrid_jax.constraints.schemas import optional_properties
from hybrid_jax.constraints.schemas.optional_properties import ROW_ITEMS, too_many_optional
from hybrid_jax.constraints.schemas.walk import followed
from tests.constraints.schemas import takes_text
from tests.llms import byte_tokenizer

llguidance = pytest.importorskip("llguidance")
GRAMMARS = Grammars(byte_tokenizer(), 256)
NULL = {"type": "null"}
X, Y = {"^x": NULL}, {"^x": NULL, "^y": NULL}


def object_of(kinds, rest=False, patterns=None, **given):
    """An object with properties p0, p1, ...: "r" is required, "o" may be left out."""
    names = [f"p{n}" for n in range(len(kinds))]
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, NULL),
        "required": [name for name, kind in zip(names, kinds, strict=True) if kind == "r"],
        "additionalProperties": rest,
    }
    return schema | ({"patternProperties": patterns} if patterns else {}) | given


def text_of(schema):
    """Required properties alone, and the text up to the last one of them, from which all others can come."""
    names = [name for name in schema["properties"] if name in schema["required"]]
    return json.dumps(dict.fromkeys(names)), names


def state_of(schema):
    return GRAMMARS.state(StructuredOutputsParams(json=schema))


# kinds before the row, after it, its limit, what else may come
ROWS = [
    ("", "", 500, False, None),
    ("", "", 498, True, None),
    ("", "", 498, NULL, None),
    ("", "", 498, False, X),
    ("", "", 498, True, X),
    ("", "", 497, True, Y),
    ("", "r", 666, False, None),
    ("", "roo", 666, True, Y),
    ("r", "", 999, False, None),
    ("r", "", 998, True, Y),
]


@pytest.mark.parametrize("before, after, most, rest, patterns", ROWS)
def test_a_row_of_optional_properties_is_followed_up_to_its_limit(
    before, after, most, rest, patterns
):
    """Past it, the library's own error comes when the text gets there."""
    schema = object_of(before + "o" * most + after, rest, patterns)
    text, names = text_of(schema)
    assert takes_text(state_of(schema), text)
    more = object_of(before + "o" * (most + 1) + after, rest, patterns)
    with pytest.raises(
        ValueError,
        match=rf"properties at # has {most + 1} in a row that may be left out, the limit is {most}; list",
    ):
        state_of(more)
    assert "items; max is 2000" in failure_of_the_library(more)


@pytest.mark.parametrize("options", [{}, {"whitespace_flexible": False}])
def test_a_row_between_required_properties_may_be_longer(options):
    guidance = {"x-guidance": options}
    most = 999 if not options else 1999
    schema = object_of("r" + "o" * most + "r") | guidance
    assert takes_text(state_of(schema), text_of(schema)[0].replace(" ", ""))
    with pytest.raises(
        ValueError, match="has 2000 in a row that may be left out, the limit is 1999"
    ):
        state_of(object_of("r" + "o" * 2000 + "r") | guidance)


def failure_of_the_library(schema):
    """What it says itself on the way through the required properties."""
    tokens = GRAMMARS._vocabulary().tokens
    without_check = {**schema, "x-guidance": {"whitespace_flexible": False}}
    source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(without_check))
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokens, source, log_level=0, limits=limits)
    for byte in text_of(schema)[0].replace(" ", "").encode():
        matcher.compute_bitmask()
        matcher.consume_token(byte)
        if matcher.is_error():
            return matcher.get_error()
    return ""


TOO_MANY = object_of("o" * 501)


@pytest.mark.parametrize(
    "schema, place",
    [
        ({"properties": {"a": TOO_MANY}}, "#/properties/a"),
        ({"anyOf": [NULL, TOO_MANY]}, "#/anyOf/1"),
        ({"type": "array", "prefixItems": [NULL, {"items": TOO_MANY}]}, "#/prefixItems/1/items"),
        ({"patternProperties": {"^x": TOO_MANY}}, "#/patternProperties/^x"),
        ({"additionalProperties": {"$ref": "#/x/a"}, "x": {"a": TOO_MANY}}, "#/x/a"),
    ],
)
def test_the_object_is_named_where_random_texts_may_not_reach_it(schema, place):
    with pytest.raises(
        ValueError, match=rf"properties at {place.replace('^', '.')} has 501 in a row"
    ):
        state_of(schema)


SOME_REQUIRED = {"required": ["p250"]}


@pytest.mark.parametrize(
    "schema",
    [
        TOO_MANY | {"allOf": [SOME_REQUIRED]},
        {"allOf": [TOO_MANY, SOME_REQUIRED]},
        {"$ref": "#/$defs/a", "$defs": {"a": TOO_MANY}} | SOME_REQUIRED,
        {
            "properties": {"a": TOO_MANY},
            "patternProperties": {"^a": SOME_REQUIRED},
            "required": ["a"],
        },
        object_of("o" * 501) | {"properties": TOO_MANY["properties"] | {"p500": False}},
        {"const": 1} | TOO_MANY | {"type": ["object", "integer"]},
    ],
    ids=lambda schema: " ".join(schema),
)
def test_what_can_be_followed_is_not_refused(schema):
    schema = {"type": "object"} | schema
    text = {"p250": None}
    if "patternProperties" in schema:
        text = {"a": text}
    assert takes_text(state_of(schema), "1" if "const" in schema else json.dumps(text))


def test_the_limit_is_the_one_that_is_set():
    assert LIMITS["max_items_in_row"] == ROW_ITEMS
    assert too_many_optional({"type": "object"}, {}) is None
    assert followed(json.dumps(object_of("o" * 500)))


def test_time_is_in_proportion_to_a_schema(monkeypatch):
    looked_at = []
    real = optional_properties._run_of
    monkeypatch.setattr(
        optional_properties, "_run_of", lambda schema: (looked_at.append(1), real(schema))[1]
    )
    links = {str(n): {"items": [{"$ref": f"#/$defs/{n + 1}"}] * 9} for n in range(90)}
    assert followed(json.dumps({"$ref": "#/$defs/0", "$defs": links | {"90": NULL}}))
    assert len(looked_at) < 1000

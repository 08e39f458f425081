"""A refusal says what is wrong, where, and what to do: of the library's own errors, too."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints import refusals
from hybrid_jax.constraints import trial as trial_module
from hybrid_jax.constraints.grammar import Grammars
from hybrid_jax.constraints.schemas.refused_part import MOST_ASKED, refused_part
from hybrid_jax.constraints.trial import Worker
from tests.constraints.schemas import takes_text
from tests.llms import byte_tokenizer

GRAMMARS = Grammars(byte_tokenizer(), 256)


def refusal(grammars=GRAMMARS, **given):
    with pytest.raises(ValueError) as raised:
        grammars.state(StructuredOutputsParams(**given))
    text = str(raised.value)
    assert "\n" not in text and len(text) < 500
    return text.partition("cannot be followed: ")[2]


NEVER = {"type": "integer", "minimum": 5, "maximum": 3}
WHY = "minimum (5) is greater than maximum (3); change or leave out one of its keywords: minimum, maximum"
OVERLAPPING = {"oneOf": [{"type": "number"}, {"type": "integer"}]}
ONE_OF = "is not supported, since a value could be valid under two of its schemas; write anyOf if none can"
# Schemas in which a part stands that must have a value, and the path to it.
NEEDED = [
    (lambda part: {"properties": {"a/b": part}, "required": ["a/b"], "type": "object"}, "/properties/a~1b"),
    (lambda part: {"allOf": [{"type": ["integer", "null"]}, part]}, "/allOf/1"),
    (lambda part: {"type": "array", "items": part, "minItems": 1}, "/items"),
    (lambda part: {"type": "array", "prefixItems": [{}, part], "minItems": 2}, "/prefixItems/1"),
    (lambda part: part, ""),
]  # fmt: skip
OTHERS = [
    (lambda part: {"properties": {"x": {}, "y": part}, "type": "object"}, "/properties/y"),
    (lambda part: {"anyOf": [{"type": "null"}, part]}, "/anyOf/1"),
    (lambda part: {"patternProperties": {"^a": part}, "type": "object"}, "/patternProperties/^a"),
    (lambda part: {"additionalProperties": part, "type": "object"}, "/additionalProperties"),
    (lambda part: {"type": "array", "items": part}, "/items"),
]


@pytest.mark.parametrize("inner, outer", [*itertools.product(NEEDED, repeat=2)])
def test_a_schema_without_values_is_named_with_its_place(inner, outer):
    schema = outer[0](inner[0](NEVER))
    said = refusal(json=schema)
    assert said == f"Unsatisfiable schema at #{outer[1]}{inner[1]}: {WHY}"


def test_a_part_that_may_be_left_out_is_not_the_reason():
    other = {"type": "string", "minLength": 3, "pattern": "^a$"}
    schema = {"properties": {"x": NEVER, "y": other}, "required": ["y"], "type": "object"}
    assert refusal(json=schema) == (
        "Unsatisfiable schema at #/properties/y: no text has all that it asks for; change or leave out one of its "
        "keywords: type, minLength, pattern"
    )
    assert refusal(json={"anyOf": [NEVER, NEVER]}).startswith("Unsatisfiable schema at #: ")


@pytest.mark.parametrize(
    "inner, outer", [(OTHERS[0], one) for one in OTHERS] + [(one, OTHERS[1]) for one in OTHERS]
)
def test_one_of_is_refused_with_its_place_and_a_remedy_that_works(inner, outer):
    said = refusal(json=outer[0](inner[0](OVERLAPPING)))
    assert (
        said.startswith(f"oneOf at #{outer[1]}{inner[1]} {ONE_OF}") and "coerce_one_of" not in said
    )
    remedied = outer[0](inner[0]({"anyOf": OVERLAPPING["oneOf"]}))
    GRAMMARS.state(StructuredOutputsParams(json=remedied))


def test_one_of_with_constants_is_followed_as_the_remedy_says():
    kinds = [{"const": "a"}, {"type": "integer"}]
    state = GRAMMARS.state(StructuredOutputsParams(json={"oneOf": kinds}))
    assert takes_text(state, '"a"') and takes_text(state, "1")


def test_a_place_behind_references_is_the_one_of_the_definition():
    schema = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"items": {"$ref": "#/x/b"}}},
        "x": {"b": OVERLAPPING},
    }
    assert refusal(json=schema).startswith("oneOf at #/x/b ")
    tree = {"properties": {"left": {"$ref": "#"}, "kind": OVERLAPPING}, "type": "object"}
    assert refusal(json=tree).startswith("oneOf at #/properties/kind ")


@pytest.mark.parametrize(
    "part, message",
    [
        ({"pattern": "a$b"}, "^ or $ stands in the middle of an expression at #/items ('a$b')"),
        ({"pattern": r"\p{Foo}"}, r"Unicode property not found at #/items ('\\p{Foo}'); write one"),
        ({"patternProperties": {"^a": {}, "a$": {}}}, "patternProperties at #/items are not disjoint"),
        ({"properties": {"a": {}}, "maxProperties": 1}, "minProperties and maxProperties at #/items need"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_named_with_its_place(part, message):
    said = refusal(json={"type": "array", "items": part, "minItems": 1})
    assert said.startswith(message) and "; " in said


def test_the_place_is_found_among_many_with_few_questions():
    asked = []

    def ask(schema):
        asked.append(schema)
        return "oneOf constraints are not supported" if '"oneOf"' in schema else None

    parts = {
        f"p{n}": {"type": "object", "properties": {f"q{m}": {} for m in range(30)}}
        for n in range(900)
    }
    parts["p777"]["properties"]["q20"] = OVERLAPPING
    schema = json.dumps({"type": "object", "properties": parts, "required": ["p0"]})
    found = refused_part(schema, "oneOf constraints are not supported", refusals._kind_of, ask)
    assert found.place.path == "#/properties/p777/properties/q20" and len(asked) < 30
    schema = OVERLAPPING
    for _ in range(90):
        schema = {"items": schema}
    asked.clear()
    found = refused_part(
        json.dumps(schema), "oneOf constraints are not supported", refusals._kind_of, ask
    )
    assert found.place.path.endswith("/items") and len(asked) <= MOST_ASKED


def test_the_place_is_found_without_another_process(monkeypatch):
    monkeypatch.setattr(trial_module, "_worker", worker := Worker())
    monkeypatch.setattr(worker, "_missing", "none here")
    alone = Grammars(byte_tokenizer(), 256)
    said = refusal(alone, json={"properties": {"a": NEVER}, "required": ["a"], "type": "object"})
    assert said == f"Unsatisfiable schema at #/properties/a: {WHY}"


@pytest.mark.parametrize(
    "word", ["lexer ", "schema ", 'patternProperty regexes "', "a ::", "1(1): "]
)
def test_time_is_in_proportion_to_a_message(word):
    """It may repeat a caller's expression. A search that begins again at each word would take minutes."""
    message = word * (250_000 // len(word))
    assert isinstance(refusals._kind_of(message), str)
    wanted = StructuredOutputsParams(grammar=message)
    said = refusals.in_our_words(wanted, message, lambda schema: None)
    assert refusals.in_another_notation(wanted) is None and len(said) < 400


def test_a_pattern_with_the_words_of_another_error_is_not_taken_for_it():
    schema = {"type": "string", "pattern": "^oneOf constraints are not supported$", "maxLength": 3}
    assert refusal(json=schema).startswith(
        "Unsatisfiable schema at #: no text has all that it asks for"
    )


@pytest.mark.parametrize(
    "grammar, message",
    [
        ('root ::= "a" | b\nb ::= [a-z/]', "it has rules with ::=, as EBNF and GBNF do, and must be Lark; write `name"),
        ("<start> ::= 'a'", "it has rules with ::="),
        ("# a ::= b\nstart: 'a'", "line 2, column 8: \"'a'\" cannot be read; put texts in double quotes"),
        ('begin: "::="', "no rule has the name start; name the first one so"),
        ('start: word\nsome: "a"', 'line 1, column 8: unknown name: "word"; define it, or correct the name'),
        ('start: "a" )', "line 1, column 12: "),
        (r"start: /\ba/", "line 1, column 8: "),
        ("start: /a$b/", "^ or $ stands in the middle of an expression in line 1, which"),
        (
            f'start: "x"\n  | %json {json.dumps({"items": OVERLAPPING})}',
            "oneOf at #/items of the schema in line 2 is not supported",
        ),
        ('{"grammars": [{"json_schema": {}}]}', "it is JSON, and must be Lark; give a JSON schema as json"),
        (' {"type": "object"}', "it is JSON, and must be Lark"),
        (f"start: %json {json.dumps(NEVER)}", f"Unsatisfiable schema at # of the schema in line 1: {WHY}"),
    ],
)  # fmt: skip
def test_a_wrong_grammar_is_refused_with_its_line(grammar, message):
    said = refusal(grammar=grammar)
    assert said.startswith(message) and "; " in said


BAD = [
    *({"regex": text} for text in (
        "(a", "a)", "*a", "a{3,1}", "a++", "(?m)a", "(?=a)", "(?~a)", r"\bx", r"(a)\1", r"\pa", "a\\", r"\uD800", r"\q",
        "[a", "[]", "(?i)[^é]", r"[a-\d]", "[b-a]", r"[\d-a]", "(?x)[ a]", "(?i)é", "a{,3}", "a$b", r"\p{Foo}",
        "a{100001}", "(" * 121 + "a" + ")" * 121, "(x?){5000}x{5000}",
    )),
    *({"json": schema} for schema in (
        {"not": {}}, {"type": "any"}, {"enum": []}, {"minimum": "1"}, {"maxLength": -1}, {"multipleOf": 0},
        {"items": 1},
        {"const": 2**53 + 1}, {"const": 1.2345678901234567}, {"exclusiveMinimum": True}, {"required": "a"},
        {"properties": []}, {"prefixItems": {}}, {"pattern": 1}, {"$ref": 1}, {"$ref": "#/a"}, {"$ref": "#"},
        {"items": {"$schema": "x"}}, {"x-guidance": []}, {"x-guidance": {"lenient": True}}, {"maxItems": 10**6},
        {"minimum": 2**63}, {"exclusiveMinimum": 2**53, "type": "integer"}, {"multipleOf": 0.123457},
        {"items": [True], "prefixItems": [True]}, {"allOf": [False]}, {"const": 1, "enum": [2]},
    )),
    *({"grammar": text} for text in (
        'start: "', "start: /", "start: <a", "start: %json {", 'a: "a"', "start: 'a'", "start: %json 3", "a ::= b",
        "start: A~100001", "start: " + "(" * 121, 'start: x{"a"}\nx{y}: y',
    )),
    {"choice": ["a"] * 100_001},
]  # fmt: skip


@pytest.mark.parametrize("given", BAD, ids=lambda given: str(given)[:50])
def test_every_refusal_says_what_to_do(given):
    said = refusal(**given)
    what, _, remedy = said.rpartition("; ")
    assert what and remedy and not re.fullmatch("change it", remedy), said
    assert "lexer error" not in said and "coerce_one_of" not in said

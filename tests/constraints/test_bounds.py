"""Forms are measured before native code reads them. The message names the part, its value and the limit."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import pytest

from hybrid_jax.config.structured_outputs import FORMS, StructuredOutputsParams
from hybrid_jax.constraints.bounds import (
    CHECKS,
    COUNTS,
    TRIED,
    UNTRIED,
    Bounds,
    TooLarge,
    check_bounds,
)
from hybrid_jax.constraints.grammar import SOURCES
from tests.drawing import left_to_all


def form(**given):
    return StructuredOutputsParams(**given)


def chain(length, link=lambda reference: reference, *, reverse=False):
    """References one after another, written in order or in reverse."""
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    links[f"d{length}"] = {"type": "null"}
    return {"$ref": "#/$defs/d0", "$defs": dict(reversed(links.items())) if reverse else links}


def nested(depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def rules(length, name="r", *, reverse=False, head=""):
    lines = [f"{name}{i}{head}: {name}{i + 1}" for i in range(length)] + [f'{name}{length}: "a"']
    return "\n".join([f"start: {name}0", *(reversed(lines) if reverse else lines)])


EDGE = -(2**63)
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const")


def refused(message, bounds=TRIED, **given):
    with pytest.raises(TooLarge, match=re.escape(message)):
        check_bounds(form(**given), bounds)


def test_every_kind_of_form_is_measured_and_compiled():
    assert set(CHECKS) == set(SOURCES) == set(FORMS)


@pytest.mark.parametrize("keyword", COUNTS)
def test_counts_are_limited(keyword):
    for where in ({}, {"properties": {"a": {}}}):
        schema = {keyword: 2**31 - 1} | where
        refused(f"{keyword} is 2147483647, the limit is 100000", json={"items": schema})
    check_bounds(form(json={keyword: 100_000}), TRIED)
    refused(f"{keyword} is 10001, the limit is 10000", UNTRIED, json={keyword: 10_001})


@pytest.mark.parametrize("number", [EDGE, EDGE + 1, EDGE + 512, 2**63 - 1, 2**64, 10**400, -1e300])
@pytest.mark.parametrize("keyword", NUMBERS)
def test_numbers_at_the_edge_of_64_bits_are_refused(keyword, number):
    refused(f"{keyword} has ", json={"anyOf": [{keyword: number}]})
    refused("numbers must be below 2**63 in size", json={"$defs": {"a": {keyword: number}}})
    refused(f"{keyword} has ", grammar='start: "a" | %json ' + json.dumps({keyword: number}))


@pytest.mark.parametrize(
    "number", [EDGE + 1024, 2**63 - 1024, 2**53, -(2**53) - 1, 0.1, -0.0, 5e-324]
)
def test_smaller_numbers_are_left_to_the_library(number):
    check_bounds(form(json={"const": number, "minimum": number, "maximum": number}), TRIED)


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"enum": [0, EDGE]}, "enum has -9223372036854775808, numbers must be below 2**63 in size"),
        ({"const": {"a": [EDGE]}}, "const has -9223372036854775808"),
        ({"properties": {"default": {"const": EDGE}}}, "const has -9223372036854775808"),
        ({"default": {"const": EDGE}, "$ref": "#/default"}, "const has -9223372036854775808"),
        ({"components": {"x": {"enum": [EDGE]}}}, "enum has -9223372036854775808"),
        (
            {"multipleOf": 2**31},
            "multipleOf is 2147483648, without its point 2147483648, the limit",
        ),
        ({"multipleOf": 0.123457}, "multipleOf is 0.123457, without its point 123457, the limit"),
        ({"enum": list(range(100_001))}, "the number of values of an enum is 100001, the limit is"),
        ({"description": "x" * 2**20}, "the length of the schema is 1048595, the limit is 1048576"),
        ({"pattern": "a{1,2147483647}"}, "pattern: the count in '{1,2147483647}' is 2147483647"),
        ({"patternProperties": {"a{100001}": {}}}, "patternProperties: the count in '{100001}'"),
        ({"x-guidance": {"whitespace_pattern": "a{100001}"}}, "x-guidance.whitespace_pattern: the"),
        (
            {"anyOf": [{"pattern": "a" * 2621}] * 100 + [{"patternProperties": {"a" * 99: {}}}]},
            "the length of all expressions up to patternProperties is 262199, the limit is 262144",
        ),
        (
            {"pattern": "a" * 262_144, "x-guidance": {"item_separator": ","}},
            "the length of all expressions up to x-guidance.item_separator is 262145",
        ),
        ({"pattern": "(?x)" + "#\n" * 131_070}, None),
        (nested(121), "the depth of the schema is 121, the limit is 120"),
        ({"const": [[[[[0]]]]]}, None),
        (nested(120), None),
        ({"default": EDGE, "examples": [EDGE]}, None),
        ({"multipleOf": 0.01}, None),
        ({"multipleOf": 1e5}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_schemas_are_measured(schema, message):
    if message is None:
        check_bounds(form(json=schema), TRIED)
    else:
        refused(message, json=schema)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "link",
    [
        lambda reference: reference,
        lambda reference: {"type": "array", "items": reference},
        lambda reference: {"properties": {"a": {"allOf": [reference]}}},
    ],
)
def test_a_chain_of_references_is_limited(link, reverse):
    check_bounds(form(json=chain(199, link, reverse=reverse)), TRIED)
    refused(
        "$ref '#/$defs/d200' comes after 200 references", json=chain(5000, link, reverse=reverse)
    )


@pytest.mark.parametrize(
    ("root", "written"),
    [
        ({}, "#/%24defs/d{}"),
        ({}, "#/%24%64efs/%64{}"),
        ({"$id": "https://a.b/c"}, "https://a.b/c#/$defs/d{}"),
        ({"$id": "https://a.b/c#"}, "https://a.b/c#/$defs/d{}"),
        ({"id": "tag:x", "$schema": "http://json-schema.org/draft-04/schema#"}, "tag:x#/$defs/d{}"),
    ],
)
def test_a_chain_counts_however_its_references_are_written(root, written):
    links = {f"d{i}": {"$ref": written.format(i + 1)} for i in range(5000)}
    schema = root | {"$ref": written.format(0), "$defs": links | {"d5000": {"type": "null"}}}
    refused(f"$ref {written.format(200)!r} comes after 200 references", json=schema)


@pytest.mark.parametrize("key", ["anyOf", "allOf", "prefixItems"])
def test_a_chain_counts_wherever_it_is_entered(key):
    for length, bounds in ((200, TRIED), (50, UNTRIED)):
        schema = chain(length, reverse=True)
        del schema["$ref"]
        entered = [{"$ref": f"#/$defs/d{i}"} for i in range(length, 0, -1)]
        check_bounds(form(json=schema | {key: entered}), bounds)
        message = (
            f"$ref '#/$defs/d0' comes before {length} references, each of which leads to the next"
        )
        refused(message, bounds, json=schema | {key: [*entered, {"$ref": "#/$defs/d0"}]})
        check_bounds(form(json=schema | {key: entered[1:]}), bounds)


def test_a_chain_that_nobody_uses_does_not_count():
    unused = chain(300, reverse=True)["$defs"]
    check_bounds(form(json={"$defs": unused, "anyOf": [{"$ref": "#/$defs/d200"}]}), TRIED)


def test_references_that_come_back_are_no_chain():
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    tree = {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    lost = {"anyOf": [{"$ref": "#/no/0"}, {"$ref": "other"}, {"$ref": "#/anyOf/1"}, {"$ref": 5}]}
    for schema in (loop, tree, lost):
        check_bounds(form(json=schema), TRIED)


@pytest.mark.parametrize(
    "regex, message",
    [
        (
            "a{2147483647}",
            "the expression: the count in '{2147483647}' is 2147483647, the limit is",
        ),
        ("a{3,}b{0, 100001}", "the count in '{0, 100001}' is 100001, the limit is 100000"),
        ("a{" + "9" * 5000 + "}", "is 99999999999999999999, the limit is 100000"),
        ("((a{1000}){1000}){1000}", "the product of counts within counts is 1000000000, the limit"),
        ("((a{1000}b)?c){100000}", "the product of counts within counts is 100000000, the limit"),
        ("(" * 121 + ")" * 121, "the depth of brackets is 121, the limit is 120"),
        ("a" * 262_145, "the length of the expression is 262145, the limit is 262144"),
        ("(a{1000}){1000}b{1000}c{1000}", None),
        (r"[a{999999}\]]{3}\{999999}", None),
        (r"\x{10ffff}\p{Greek}a{,5}{", None),
        ("[]{999999}]", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_expressions_are_measured(regex, message):
    if message is None:
        check_bounds(form(regex=regex), TRIED)
    else:
        refused(message, regex=regex)


@pytest.mark.parametrize(
    "grammar, message",
    [
        ('start: "a"{2147483647}', "the grammar: a count is 2147483647, the limit is 100000"),
        ('start: x~3..2147483647\nx: "a"', "the grammar: a count is 2147483647"),
        ('start: "a"{1, # up to\n 2147483647}', "the grammar: a count is 2147483647"),
        ('start: "a" ~ +2147483647', "the grammar: a count is 2147483647"),
        ("start: /(a{1000}){100001}/", "an expression: the count in '{100001}' is 100001"),
        ('start: "a" %json ' + json.dumps({"maxItems": 2**40}), "maxItems is 1099511627776"),
        ("start: " + "(" * 121, "the depth of brackets is 121, the limit is 120"),
        (rules(5000), "rule 'r200' comes after 200 rules, each of which uses the next"),
        (rules(5000, reverse=True), "rule 'r200' comes after 200 rules"),
        (rules(5000, "T"), "rule 'T200' comes after 200 rules"),
        (rules(5000, head='[stop=/"[a]/, lazy]'), "rule 'r200' comes after 200 rules"),
        (rules(5000, head=" . 2 "), "rule 'r200' comes after 200 rules"),
        ('start: "a{999999}" /\\/{9}/ // b{999999}\n# c{999999}\n', None),
        ("start[max_tokens=999999, temperature=0.5]: <{999999}> @x{2} a.999999", None),
        ("%import common.WORD\nstart[max_tokens=99]: x{1,20} | start\nx.2: WORD", None),
        (rules(199), None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_grammars_are_measured(grammar, message):
    if message is None:
        check_bounds(form(grammar=grammar), TRIED)
    else:
        refused(message, grammar=grammar)


def test_choices_are_measured():
    bounds = Bounds(choices=3, choice_chars=10)
    check_bounds(form(choice=["abc", "defg", "hij"]), bounds)
    refused("the number of choices is 4, the limit is 3", bounds, choice="a b c d".split())
    refused("the length of all choices is 11, the limit is 10", bounds, choice=["abcdef", "ghijk"])
    check_bounds(form(json_object=True), bounds)


LONG = 250_000
UNITS = ("[", "\\p{", "{", "{1", "{1,", "(?:", "\\", "a{1}", "[a]", "|", " ")


@pytest.mark.parametrize(
    "text", [unit * LONG for unit in UNITS] + ["{" + " " * LONG], ids=lambda t: t[:6]
)
def test_time_is_in_proportion_to_an_expression(text):
    """A pattern that looks at what is left again and again would take hours here."""
    with suppress(TooLarge):
        check_bounds(form(regex=text[:LONG]), TRIED)


@left_to_all
@pytest.mark.parametrize(
    "text",
    ['"', '\\"', "/", "/a ", "~", "~1", "%json", "a ", "a::", "a\n", "\n", "a[", "{1 ", "#", " "],
)
def test_time_is_in_proportion_to_a_grammar(text):
    for begin in ("", 'start: "', "start: /", "start "):
        with suppress(ValueError):
            check_bounds(form(grammar=(begin + text * LONG)[:LONG]), TRIED)

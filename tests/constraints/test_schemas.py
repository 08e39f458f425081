"""A schema is followed or refused, and nothing between: random texts of grammars, judged by jsonschema."""

from __future__ import annotations

import itertools
import json
import random
import re
import warnings
from decimal import Decimal
from pathlib import Path

import jsonschema
import jsonschema_specifications
import pytest

import hybrid_jax
from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints.bounds import COUNTS
from hybrid_jax.constraints.grammar import Grammars
from hybrid_jax.constraints.matches import few_texts, finds
from hybrid_jax.constraints.patterns import portable
from hybrid_jax.constraints.schemas import walk as rules
from hybrid_jax.constraints.schemas.in_lark import followed_inside
from hybrid_jax.constraints.schemas.walk import followed
from hybrid_jax.text.tokenizer import Tokenizer
from tests.constraints.schemas import (
    BYTES,
    DRAFT_4,
    DRAFT_7,
    KEYWORDS,
    OLDER,
    OLDEST,
    Findings,
    Walker,
    completed,
    entries,
    is_valid,
    pairs,
    placed,
    takes_text,
    try_schema,
    validator,
)
from tests.drawing import left_to_all
from tests.llms import byte_tokenizer

KINDS = ("integer", "number", "string", "array", "object")
NUM_PAIRS = 100  # of those that every run tries
GRAMMARS = Grammars(byte_tokenizer(), 256)


def state_of(schema):
    return GRAMMARS.state(StructuredOutputsParams(json=schema))


def tried(schemas, seeds=1, grammars=GRAMMARS, walker=BYTES):
    """Tries schemas, which must be followed or refused."""
    found = Findings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of Python, for [[a]
        for schema in schemas:
            try_schema(schema, grammars, walker, seeds, found)
    assert found.faults == []
    return found


def drawn(schemas, count):
    return random.Random(0).sample(list(schemas), count)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_is_followed_or_refused(keyword):
    found = tried(completed({keyword: value}) for value in KEYWORDS[keyword])
    assert found.followed + found.refused == len(KEYWORDS[keyword])


def test_some_pairs_are_followed_or_refused():
    found = tried(map(completed, drawn(pairs(KEYWORDS), NUM_PAIRS)))
    assert found.followed > NUM_PAIRS // 3 and found.values > 500


@pytest.mark.parametrize("beside", ["allOf", "anyOf"])
def test_a_pattern_of_every_name_stands_beside_other_schemas(beside):
    for other in ({"maxLength": 3}, {"title": "x"}, {"properties": {"q": True}}):
        schema = {"patternProperties": {"^.*$": {"type": "integer"}}, beside: [other]}
        assert tried([completed(schema)], seeds=2).followed == 1


@left_to_all
@pytest.mark.parametrize("part", range(8))
def test_all_pairs_are_followed_or_refused(part):
    found = tried(map(completed, list(pairs(KEYWORDS))[part::8]), seeds=2)
    assert found.followed > 1000 and found.texts > 2000


ATOMS = (
    "a",
    "b",
    "[ab]",
    "[^a]",
    r"\d",
    "(?i:k)",
    ".",
    r"\x41",
    r"\D",
    r"\w",
    r"[\d\-x]",
    "(a|b?1)",
)
COUNTS_OF = ("", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?")


def test_a_written_expression_is_found_where_it_is():
    rng, num_found = random.Random(0), 0
    for _ in range(3000):
        part = lambda: rng.choice(ATOMS) + rng.choice(COUNTS_OF)
        inner = rng.choice(("", "|")).join(part() for _ in range(rng.randint(1, 3)))
        pattern = (
            rng.choice(("", "^")) + rng.choice(("(?:%s)", "%s")) % inner + rng.choice(("", "$"))
        )
        text = "".join(rng.choice("abkK1A-x_") for _ in range(rng.randint(0, 5)))
        found = finds(portable(pattern, ecma=True), text)
        assert found is bool(re.search(pattern, text, re.ASCII)), (pattern, text)
        num_found += found
    assert 500 < num_found < 2500


def test_a_search_that_takes_long_says_nothing():
    assert finds("^(?:(?:(?:a+)+)+)+b", "a" * 100) is False
    assert finds("^" + "a?" * 10_000, "a" * 200) is None
    assert finds(r"^\p{Greek}", "a") is None and finds(r"^\p{Lu}\P{L}$", "A1") is True


@pytest.mark.parametrize(
    "pattern, texts",
    [
        ("^c$", "c"),
        ("^(?:a|b[01])?$", ["", "a", "b0", "b1"]),
        ("(^a$|^b$)", "ab"),
        ("(?i)^k$", "kK"),
        (r"^\d$", "0123456789"),
        ("^a{3}$", ["aaa"]),
        ("^a$b", ""),
        *(
            (pattern, None)
            for pattern in ("^a", "a$", "", "^a*$", "^[^a]$", ".", "^a{100000}$", "^[a-z]$")
        ),
    ],
)
def test_the_texts_of_an_expression_are_known_if_they_are_few(pattern, texts):
    found = few_texts(portable(pattern, ecma=True), 10, 20)
    assert found == (None if texts is None else set(texts))


@pytest.mark.parametrize("seeds", [0, pytest.param(3, marks=left_to_all)])
def test_a_keyword_beside_a_type_and_inside_other_schemas(seeds):
    inside = [placed(schema, place) for schema in entries(KEYWORDS) for place in range(5)]
    typed = [{"type": kind} | s for s in entries(KEYWORDS) if "type" not in s for kind in KINDS]
    schemas = [*inside, *typed]
    found = tried(map(completed, schemas if seeds else drawn(schemas, 60)), seeds=seeds or 1)
    assert found.followed > 30


@pytest.mark.parametrize("draft, keywords", [(DRAFT_7, OLDER), (DRAFT_4, OLDEST)], ids="74")
def test_older_drafts(draft, keywords):
    schemas = [*entries(keywords), *drawn(pairs(keywords), 30)]
    assert tried(completed(s, draft) for s in schemas).followed > 20


@left_to_all
@pytest.mark.parametrize("draft, keywords", [(DRAFT_7, OLDER), (DRAFT_4, OLDEST)], ids="74")
def test_all_pairs_of_older_drafts(draft, keywords):
    assert tried((completed(s, draft) for s in pairs(keywords)), seeds=2).followed > 100


def test_tokens_of_several_bytes_give_valid_texts_too():
    folder = Path(hybrid_jax.__file__).parent / "bundled"
    backend = Tokenizer.from_directory(folder).backend
    grammars = Grammars(Tokenizer.from_directory(folder), backend.get_vocab_size())
    texts = [backend.decode([token]) for token in range(backend.get_vocab_size())]
    schemas = [*entries({k: KEYWORDS[k] for k in ("const", "enum", "maximum", "format")})]
    schemas += drawn(pairs(KEYWORDS), 20)
    found = tried(map(completed, schemas), 2, grammars, Walker(texts, backend.decode))
    assert found.texts > 60


FOLLOWED = [
    *(None, True, 0, -0.0, 1.0, 1.5, -7, 0.1, 1e-7, 2**53, -(2**53), 2**60, 123456789.12345),
    *("", "C:\\Users\\somebody\\Documents\\report.txt", 'say "no"', "a/b", "\x00\t\n\x1f\x7f"),
    *("\u00e9\u2028\U0001f600", "a" * 300, "\\", "\\u0041", "null", "{}"),
    *([], [[], {}], [1, "\\", None], {}, {"a": {'"': "\n"}}, {"": 0, "\x7f": 1.5}),
]


@pytest.mark.parametrize("constant", FOLLOWED, ids=lambda constant: repr(constant)[:30])
@pytest.mark.parametrize("place", ["const", "enum", "property"])
def test_a_constant_comes_out_as_it_is(constant, place):
    schema = {"enum": [constant]} if place == "enum" else {"const": constant}
    value = constant
    if place == "property":
        schema = {"properties": {"\u00e9": schema}, "required": ["\u00e9"], "type": "object"}
        schema["additionalProperties"] = False
        value = {"\u00e9": constant}
    state = state_of(schema)
    texts = [BYTES.walk(state, seed) for seed in range(3)]
    assert [(json.loads(text), how) for text, how in texts] == [(value, "end")] * 3
    plain = json.loads(
        json.dumps(value), parse_float=lambda t: int(t[:-2]) if t.endswith(".0") else float(t)
    )
    text = json.dumps(plain, ensure_ascii=False)
    spellings = (text, text.replace("\x7f", "\\u007f"))
    assert constant == 1e-7 or any(takes_text(state, spelling) for spelling in spellings)


@pytest.mark.parametrize("keyword", ["const", "enum", "minimum", "exclusiveMaximum", "multipleOf"])
@pytest.mark.parametrize(
    "number",
    [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63) + 1, -(2**63), 10**30, 1e300, 1.2345678901234567e15],
)  # fmt: skip
def test_a_number_that_would_be_rounded_is_refused_by_name(keyword, number):
    schema = {keyword: [number] if keyword == "enum" else number}
    with pytest.raises(ValueError, match=f"^{keyword} .* at # "):
        followed(json.dumps(schema))
    with pytest.raises(ValueError, match=f"cannot be followed: {keyword} "):
        state_of(schema)


def random_number(rng):
    digits = rng.choice([1, 2, 3, 4, 9, 15])
    number = rng.randint(-(10**digits), 10**digits)
    return number if rng.random() < 0.5 else number / 10 ** rng.randint(1, 3)


def holds(schema, number):
    """Whether a number keeps to the bounds, by its digits."""
    return all(
        bound not in schema or holds_one(number, Decimal(str(schema[bound])))
        for bound, holds_one in {
            "minimum": Decimal.__ge__,
            "maximum": Decimal.__le__,
            "exclusiveMinimum": Decimal.__gt__,
            "exclusiveMaximum": Decimal.__lt__,
        }.items()
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=left_to_all) for s in range(1, 12))])
def test_ranges_of_numbers_begin_and_end_where_they_should(seed):
    rng, num_checked = random.Random(seed), 0
    for _ in range(60):
        low, high = sorted([random_number(rng), random_number(rng)])
        high = rng.choice([high, high, high, low, int(low) + 0.5])
        schema = {"type": rng.choice(["integer", "number"])}
        schema |= {rng.choice(["minimum", "exclusiveMinimum"]): low} if rng.random() < 0.8 else {}
        schema |= {rng.choice(["maximum", "exclusiveMaximum"]): high} if rng.random() < 0.8 else {}
        judge = validator(schema)
        near = [Decimal(str(x)) + Decimal(d) for x in (low, high, 0) for d in NEAR]
        texts = [format(number.normalize(), "f") for number in near if number]
        if schema["type"] == "integer":
            texts = [text for text in texts if "." not in text]
        good = {
            text
            for text in texts
            if judge.is_valid(json.loads(text)) and holds(schema, Decimal(text))
        }
        try:
            state = state_of(schema)
        except ValueError as error:
            assert not good and "Unsatisfiable" in str(error), (schema, good)
            continue
        for text in texts:
            if text in good and len(re.sub("[-.]|^-?0[.]0*", "", text)) > 15:
                continue
            if text in good:  # some need more zeros at the end
                assert takes_text(state, text) or takes_text(state, text + "0" * 9), (schema, text)
            elif not judge.is_valid(json.loads(text)):
                assert not takes_text(state, text), (schema, text)
            num_checked += 1
    assert num_checked > 1000


NEAR = (
    *("0", "1", "-1", "0.1", "-0.1", "0.001", "-0.001", "0.5", "-0.5", "10", "-10", "99", "-99"),
    *("1000", "-1000", "1e-9", "-1e-9", "1e-14", "-1e-14"),
)


@pytest.mark.parametrize(
    "number, text",
    [(5, "5"), (5, "5.000"), (5, "5." + "0" * 20 + "1"), (0, "0"), (0, "-0.0"), (-0.5, "-0.50")],
)
def test_a_bound_that_is_left_out_does_not_come_in(number, text):
    assert not takes_text(state_of({"exclusiveMinimum": number, "maximum": number + 0.5}), text)
    assert takes_text(state_of({"minimum": number, "maximum": number + 0.5}), str(number))


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"type": "null"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"enum": [1, "a b"]}, "minItems": 2, "maxItems": 2},
        {"const": {"a": [1, {}]}},
        {"type": "object", "x-guidance": {"whitespace_flexible": True}},
        None,
    ],
)
def test_white_space_is_bounded_between_all_tokens_and_none_is_around_them(schema):
    if schema is None:
        state = GRAMMARS.state(StructuredOutputsParams(json_object=True))
    else:
        state = state_of(schema)
    text = liking_space(state)
    assert text == text.strip() and json.loads(text) is not None
    outside = re.sub(r'"[^"]*"', '""', text)
    runs = re.findall(r"\s+", outside)
    assert runs and all(re.fullmatch(r" |\r?\n[ \t]{0,20}", run) for run in runs)


def liking_space(state):
    """The text of a model that writes line ends and spaces wherever it may."""
    state.restart()
    text = b""
    while True:
        words, may_end, _ = state.allowed()
        if may_end and len(text) > 1:
            return text.decode()
        allowed = [byte for byte in b'\r\n\t }]"1n:,a' if words[byte // 32] >> byte % 32 & 1]
        if not allowed:
            allowed = [byte for byte in range(256) if words[byte // 32] >> byte % 32 & 1]
        text += bytes(allowed[:1])
        state.advance(allowed[:1])
        assert len(text) < 400, text


@pytest.mark.parametrize(
    "options, text, other",
    [
        ({"whitespace_flexible": False}, '{"a":1}', '{"a": 1}'),
        ({"whitespace_pattern": " ?"}, '{"a": 1}', '{\n"a":1}'),
        ({"whitespace_pattern": "[ \\n]{1,2}|\\t"}, '{ \n"a":\t1}', '{\n\n\n"a":1}'),
        ({"whitespace_flexible": False, "item_separator": ", "}, '{"a":1, "b":2}', '{"a":1,"b":2}'),
        ({"whitespace_flexible": False, "key_separator": ": ?"}, '{"a": 1,"b":2}', '{"a":1, "b":2}'),
        ({"json_allowed_escapes": '\\"n'}, '{"a":"\\n"}', '{"a":"\\u0000"}'),
    ],
)  # fmt: skip
def test_a_schema_may_narrow_how_its_text_is_written(options, text, other):
    state = state_of({"type": "object", "x-guidance": options})
    assert takes_text(state, text) and not takes_text(state, other)


@pytest.mark.parametrize(
    "options",
    [
        *({"lenient": True}, {"lenient": False}, {"coerce_one_of": True}, {"whitespace_flexible": 1}),
        *({"json_allow_general_unicode_escapes": True}, {"unknown": 1}, {"whitespace_pattern": None}),
        *({"whitespace_pattern": p} for p in (" *", " +", " {3,}", "\\s", "a", "[^a]", ".", "(?: *)", "[ ]|\\S")),
        *({"item_separator": p} for p in (";", ",?", ", *", ",|;", "", "(,)", "\\s,")),
        *({"key_separator": p} for p in ("=", ":*", "")),
        *({"json_allowed_escapes": p} for p in ("x", "n", 1)),
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_may_not_loosen_how_its_text_is_written(options):
    with pytest.raises(ValueError, match=f"cannot be followed: x-guidance {next(iter(options))} "):
        state_of({"type": "object", "x-guidance": options})


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"items": {"uniqueItems": True}}, "uniqueItems True at #/items is not supported"),
        ({"properties": {"a/b": {"not": {}}}}, "not {} at #/properties/a~1b is not supported"),
        ({"allOf": [{"if": {}, "then": False}]}, "if {} at #/allOf/0 is not supported"),
        ({"contains": {}, "minContains": 1}, "contains {} at # is not supported"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired {'a': ['b']} at # is not supported"),
        ({"patternProperties": {"^a": {"propertyNames": False}}}, "propertyNames False at #/patternProperties/^a"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties False at # is not supported"),
        ({"$dynamicRef": "#a"}, "$dynamicRef '#a' at # is not supported"),
        ({"format": "colour"}, "format 'colour' at # is not supported; these are: date-time, time, date"),
        ({"multipleOf": 0.01}, "multipleOf 0.01 at # is not supported: only integers, and 0.5, 0.25"),
        ({"multipleOf": 0}, "multipleOf 0 at # is not above 0"),
        ({"multipleOf": 99991, "items": {"multipleOf": 11}}, " is not supported: the product"),
        ({"minProperties": 2}, "minProperties 2 at # is not supported: a name could come twice"),
        ({"pattern": "a(?!b)"}, "the pattern 'a(?!b)' at # is not supported: look-around"),
        ({"pattern": 1}, "pattern 1 at # is not text"),
        ({"patternProperties": {r"\w": {}}, "additionalProperties": {"items": {}}}, "is not the same for all"),
        ({"patternProperties": {r"^\d$": True, "^[0-9]$": True}}, "are not disjoint"),
        (
            {"properties": {"a": {"const": ["\x7f"]}}},
            "const ['\\x7f'] at #/properties/a has a control character that needs \\u, which could",
        ),
        ({"enum": ["\n"], "x-guidance": {"json_allowed_escapes": '"\\t'}}, "enum ['\\n'] at # has a control character"),
        (
            {"items": {"pattern": "^\x00$", "type": "string"}, "minItems": 1, "anyOf": [{"required": ["a"]}]}
            | {"type": "array"},
            "Unsatisfiable schema at #/items: no text has all that it asks for",
        ),
        ({"$schema": "https://example.org/mine"}, "$schema 'https://example.org/mine' at # is not the address of"),
        ({"items": {"$schema": DRAFT_7}}, "at #/items differs from that of the whole schema"),
        ({"items": {"$id": "b", "$ref": "#/c"}, "c": {}}, "an $id at #/items beside $ref is not supported"),
        (
            {"$ref": "#/a/b", "a": {"$id": "x", "b": {"$ref": "#/c"}}, "c": {}},
            "an $id at #/a/b beside $ref is not supported",
        ),
        ({"$ref": "other.json"}, "$ref 'other.json' at # is not in this schema; copy it here"),
        ({"$ref": "#/c"}, "$ref '#/c' at # is nowhere: Pointer '/c' does not exist"),
        ({"$ref": "#/title", "title": "a"}, "'a' at #/title is not a schema"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "$ref # leads to itself"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "$ref # describes values that"),
        (
            {"patternProperties": {"^(chi|x)": {"$ref": "#"}}, "required": ["child"], "type": "object"},
            "$ref # describes values that never end",
        ),
        (
            {"properties": {"é": {}}, "patternProperties": {r"[^\x00-\x7f]+$": {"$ref": "#"}}, "required": ["é"]}
            | {"type": "object"},
            "$ref # describes values that never end",
        ),
        ({"items": {"$ref": "#"}, "minItems": 1, "type": "array"}, "$ref # describes values that never end"),
        ({"type": []}, "type [] at # is not a type"),
        ({"type": "any"}, "type 'any' at # is not a type"),
        ({"enum": []}, "enum [] at # is not a list with at least one entry"),
        ({"anyOf": {}}, "anyOf {} at # is not a list"),
        ({"maxLength": -1}, "maxLength -1 at # is not a count"),
        ({"maxItems": True}, "maxItems True at # is not a count"),
        ({"minimum": "1"}, "minimum '1' at # is not a number"),
        ({"exclusiveMinimum": True}, "exclusiveMinimum True at # needs minimum beside it"),
        ({"properties": []}, "properties [] at # is not an object"),
        ({"required": "a"}, "required 'a' at # is not a list of names"),
        ({"items": 1}, "1 at #/items is not a schema"),
        ({"items": [True], "prefixItems": [True]}, "prefixItems [True] at # is not supported beside items"),
        ({"x-guidance": []}, "x-guidance [] at # is not an object"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_followed_is_refused_by_name_value_and_place(schema, message):
    with pytest.raises(
        ValueError, match="^structured_outputs.json .* cannot be followed: .*" + re.escape(message)
    ):
        state_of(schema)


# Objects in which a name could be one that is known, in another spelling; and texts that would be wrong or not.
INTEGER = {"type": "integer"}
KINDS_OF_V = [
    {"properties": {"kind": {"const": kind}, "v": v}, "required": ["kind", "v"], "type": "object"}
    for kind, v in (("x", INTEGER), ("y", {"type": "null"}))
]
ONE_SPELLING = [
    ({"properties": {"a": INTEGER}}, '{"a": 1, "b": "x"}', r'{"\u0061":"x"}'),
    ({"properties": {"a": INTEGER}, "required": ["a"]}, '{"a": 1}', r'{"a":1,"\u0061":"x"}'),
    ({"required": ["a"], "minProperties": 2}, '{"a": 1, "b": 2}', r'{"a":1,"\u0061":"x"}'),
    ({"properties": {"a": INTEGER}, "required": ["a"], "minProperties": 2}, '{"a": 1, "b": 2}', r'{"a":1,"\u0061":2}'),
    ({"patternProperties": {"^[^a]": INTEGER}}, '{"b": 1, "a": "x"}', r'{"\u0062":"x"}'),
    ({"patternProperties": {"^b": INTEGER}}, r'{"b\n": 1, "a": "x"}', r'{"b\u000a":"x"}'),
    ({"properties": {"é": INTEGER}}, '{"é": 1}', r'{"\u00E9":"x"}'),
    ({"properties": {"😀": INTEGER}}, '{"😀": 1}', r'{"\ud83d\ude00":"x"}'),
    ({"properties": {"a/b": INTEGER}}, '{"a/b": 1}', r'{"a\/b":"x"}'),
    ({"properties": {"a\n": INTEGER}}, r'{"a\n": 1, "\n": "x"}', r'{"a\u000A":"x"}'),
    ({"properties": {"\x01": INTEGER}}, r'{"\u0001": 1}', r'{"\u0001":"x"}'),
    ({"required": ["\x7f"], "additionalProperties": INTEGER}, '{"\x7f": 1}', '{"\x7f":1,"\\u007f":"x"}'),
    (
        {"properties": {"\n": INTEGER}, "patternProperties": {r"^[\n\t]$": True}, "additionalProperties": False},
        r'{"\n":1}',
        r'{"\u000a":"x"}',
    ),
    ({"anyOf": KINDS_OF_V}, '{"kind": "x", "v": 1}', r'{"kind":"x","v":1,"\u006bind":"z"}'),
    ({"properties": {"a": INTEGER}, "x-guidance": {"json_allowed_escapes": 'un\\"'}}, '{"a": 1}', r'{"\u0061":"x"}'),
    ({"properties": {"a": {"pattern": "^[\x00-\x1fb]$", "type": "string"}}}, '{"a": "b"}', r'{"\u0061":"x"}'),
]  # fmt: skip


@pytest.mark.parametrize("schema, right, wrong", ONE_SPELLING, ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_a_name_has_one_spelling(schema, right, wrong, inside):
    judge = validator(schema)
    assert judge.is_valid(json.loads(right)) and not judge.is_valid(json.loads(wrong))
    schema = {"type": "object"} | schema
    if inside:
        options = {key: schema.pop(key) for key in ["x-guidance"] if key in schema}
        schema = {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": schema}, "type": "array"} | options
        right, wrong = f"[{right}]", f"[{wrong}]"
    state = state_of(schema)
    assert takes_text(state, right) and not takes_text(state, wrong)
    assert tried([schema], seeds=20).texts > 5


@pytest.mark.parametrize("control", ["\x00", "a\x1f", "\x7f"])
def test_control_characters_are_written_where_no_name_could_be(control):
    for schema, value in (
        ({"const": control}, control),
        ({"type": "array", "items": {"enum": [control]}, "minItems": 1, "maxItems": 1}, [control]),
        ({"type": "string", "pattern": f"^{control}$"}, control),
        (
            {
                "type": "object",
                "properties": {control: {"const": control}},
                "additionalProperties": False,
                "required": [control],
            },
            {control: control},
        ),
    ):
        text, how = BYTES.walk(state_of(schema), 0)
        assert (json.loads(text), how) == (value, "end")


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"properties": {"c": INTEGER}, "patternProperties": {"^c$": {"minimum": 0}}}, '{"c":1'),
        ({"properties": {"c": INTEGER}, "patternProperties": {"^(c)?$": INTEGER}, "required": [""]}, '{"c":1,"":2'),
        ({"properties": {"": {}}, "patternProperties": {"^$": {"type": "null"}}}, '{"":null'),
        ({"properties": {"a": {}, "b": {}}, "patternProperties": {"^[ab]$": INTEGER}}, '{"a":1,"b":2'),
        ({"properties": {"é": {}}, "patternProperties": {"^\u00e9{1}$": INTEGER}}, '{"é":1'),
        ({"properties": {"k": {}, "K": {}}, "patternProperties": {"^(?:k|K){1,1}$": INTEGER}}, '{"k":1,"K":1'),
        ({"properties": {"a": {}}, "patternProperties": {"": False}, "additionalProperties": True}, "{"),
        (
            {"properties": {"\x01": {}, "a": {}}, "patternProperties": {"^\x01$": INTEGER, "^a$": True}},
            r'{"\u0001":1,"a":1',
        ),
    ],
    ids=str,
)  # fmt: skip
def test_no_comma_comes_where_no_name_is_left(schema, text):
    schema = {"type": "object", "additionalProperties": False} | schema
    state = state_of(schema)
    assert takes_text(state, text + "}")
    assert not allows(state, text + ",") and not allows(state, text + " ,")
    assert tried([schema], seeds=10).texts >= 5


def allows(state, beginning):
    """Whether a text may begin like this."""
    state.restart()
    for byte in beginning.encode():
        if not state.allowed()[0][byte // 32] >> (byte % 32) & 1:
            return False
        state.advance([byte])
    return True


def test_a_pattern_without_names_that_can_be_written_holds_for_those_that_are_known():
    schema = {"properties": {"\x01": {}, "a": {}}, "patternProperties": {"^[\x01b]": INTEGER}}
    for rest in (True, False):
        state = state_of({"type": "object", "additionalProperties": rest} | schema)
        assert takes_text(state, r'{"\u0001":1,"a":"x","b":1}')
        assert not takes_text(state, r'{"\u0001":"x"}') and not takes_text(state, '{"b":"x"}')
    schema = {"type": "object", "required": ["\x01"], "patternProperties": {"^\x01": INTEGER}}
    with pytest.raises(ValueError, match="at # leaves only names with control characters"):
        state_of(schema)
    schema["patternProperties"] = {"^[\x01\x02]{1,2}$": INTEGER}
    state = state_of(schema)
    assert takes_text(state, r'{"\u0001":1,"a":"x"}')
    assert not takes_text(state, r'{"\u0001":"x"}') and not takes_text(
        state, r'{"\u0001":1,"\u0002":1}'
    )


@pytest.mark.parametrize(
    "first",
    [r"[\x00-\x1f]", r"[\x00-\x0f\x10-\x1fz]", r"(?:[\x00-\x0f]|[\x10-\x1f])", "[^ -\U0010ffff]"],
)
def test_a_set_of_all_control_characters_has_no_others(first):
    state = state_of({"type": "string", "pattern": f"^{first}$"})
    names = {"type": "object", "patternProperties": {f"^{first}$": INTEGER}}
    closed, open_ended = state_of(names | {"additionalProperties": False}), state_of(names)
    for escape in (r"\n", r"\u0001", r"\u001f"):
        assert takes_text(state, f'"{escape}"') and takes_text(closed, f'{{"{escape}":1}}')
    for other in (r"\\", r"\"", "a"):
        assert not takes_text(state, f'"{other}"') and not takes_text(closed, f'{{"{other}":1}}')
        assert takes_text(open_ended, f'{{"{other}":"x"}}')
    assert takes_text(state_of({"type": "string", "pattern": r"^[\x00]$"}), r'"\u0000"')


@pytest.mark.parametrize("pattern", ["^[^a]", r"^\D{2}$", "^x-", "^$"])
def test_a_pattern_that_a_required_name_does_not_have_may_lead_back(pattern):
    schema = {"patternProperties": {pattern: {"$ref": "#"}}, "required": ["a"], "type": "object"}
    assert takes_text(state_of(schema), '{"a": 1}')


def test_a_pattern_with_one_more_name_is_kept():
    schema = {"properties": {"a": {}}, "patternProperties": {"^[ab]$": INTEGER}}
    state = state_of({"type": "object", "additionalProperties": False} | schema)
    assert takes_text(state, '{"a":1,"b":1}') and not takes_text(state, '{"a":1,"b":null}')
    assert not takes_text(state, '{"a":null}')


EACH = range(18_000)
CHAIN = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in EACH} | {"18000": {"type": "null"}}
RING = CHAIN | {"18000": {"$ref": "#/$defs/0"}}
ENTERED = [{"$ref": f"#/$defs/{i}"} for i in EACH]
ONE_OF_ALL = {"anyOf": [{"const": i} for i in EACH]}
REQUIRED = {"type": "object", "required": [str(i) for i in EACH]}


@pytest.mark.parametrize(
    "schema, refusal",
    [
        ({"anyOf": ENTERED[::-1], "$defs": CHAIN}, None),
        ({"allOf": ENTERED, "$defs": RING}, "leads to itself"),
        ({"$ref": "#/$defs/all", "$defs": CHAIN | {"all": {"allOf": ENTERED}}}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": REQUIRED | {"additionalProperties": ONE_OF_ALL}}}, None),
        ({"properties": {"x" * 500_000: ONE_OF_ALL}}, None),
    ],
    ids=["chain", "ring", "all", "required", "path"],
)  # fmt: skip
def test_a_large_schema_takes_time_in_proportion(schema, refusal):
    if refusal is None:
        assert followed(json.dumps(schema))
        return
    with pytest.raises(ValueError, match=refusal):
        followed(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        *({"uniqueItems": False}, {"not": False}, {"if": {"type": "null"}}, {"then": False}, {"minContains": 3}),
        *({"propertyNames": True}, {"dependencies": {}}, {"unevaluatedProperties": {}}, {"requird": ["a"]}),
        *({"title": 1, "default": 2**70, "examples": [1e300]}, {"$defs": {"a": {"not": {}}}}, {"nullable": True}),
    ],
    ids=str,
)  # fmt: skip
def test_what_asks_for_nothing_is_accepted(schema):
    state = state_of({"type": ["object", "array"]} | schema)
    assert takes_text(state, "[1, 1]") and takes_text(state, '{"a": {}}')


JUNK = (
    None,
    True,
    5,
    -1,
    1.5,
    "a",
    "",
    [],
    [1],
    [None],
    [{}],
    {},
    {"a": 1},
    {"a": {}},
    {"a": [True]},
    [["a"]],
)


def test_no_value_of_a_keyword_gives_another_error_than_a_refusal():
    num_refused = 0
    for keyword, other in itertools.product(KEYWORDS, [*KEYWORDS, None]):
        for value in JUNK if other is None else JUNK[:: len(JUNK) - 1]:
            schema = {keyword: value} | ({other: JUNK[2]} if other else {})
            try:
                followed(json.dumps(schema))
            except ValueError:
                num_refused += 1
    assert num_refused > 3000


@pytest.mark.parametrize("depth", [20, 90, 101, 400])
def test_a_schema_is_followed_or_refused_at_any_depth(depth):
    schema = {"const": 1}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    if depth < 100:
        assert followed(json.dumps(schema)).count("properties") == depth
        return
    with pytest.raises(ValueError, match="recursion limit exceeded"):
        followed(json.dumps(schema))


@pytest.mark.parametrize("rest", [True, False, {"type": "null"}])
def test_a_name_before_a_line_end_is_as_its_pattern_says(rest):
    """To Python, "a" and a line end match ^a$."""
    schema = {"patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": rest}
    state = state_of({"type": "object"} | schema)
    assert takes_text(state, '{"a": 1}') and not takes_text(state, '{"a": null}')
    assert takes_text(state, '{"a\\n": 1}') is (rest is not False)
    assert not takes_text(state, '{"a\\n": null}')
    assert takes_text(state, '{"b": null}') is (rest is not False)


LINE_END = {"type": "object", "properties": {"a": {}, "a\n": {"type": ["integer", "null"]}}}


@pytest.mark.parametrize(
    "pattern, is_refused",
    [
        *(("^a$", True), ("^[a-c]+$", True), ("(b|a)$", True), ("^a\n?$", False), ("^a", False)),
        *(("^b$", False), ("\n$", False), ("^a$|b$", True)),
    ],
)
@pytest.mark.parametrize("rest", [False, True])
def test_a_known_name_with_a_line_end_beside_a_pattern_is_as_validators_say_or_refused(
    pattern, is_refused, rest
):
    """To Python, "a" and a line end match ^a$; to ECMAScript they do not."""
    schema = LINE_END | {"patternProperties": {pattern: INTEGER}, "additionalProperties": rest}
    judge = validator(schema)
    if is_refused and rest is False:
        with pytest.raises(
            ValueError, match=r"the name 'a\\n' at # ends in a line end.*; leave out"
        ):
            state_of(schema)
        return
    state = state_of(schema)
    for text in (r'{"a\n": 1}', r'{"a\n": null}', r'{"a": 1, "a\n": null}', r'{"a": null}'):
        assert takes_text(state, text) is judge.is_valid(json.loads(text)), text
    assert tried([schema], seeds=9).texts > 2


def test_many_known_names_with_line_ends_take_limited_time():
    names = {f"{n}\n": {} for n in range(3000)}
    patterns = {f"^{n}x$": {} for n in range(300)}
    schema = {"properties": names, "patternProperties": patterns, "additionalProperties": False}
    with pytest.raises(ValueError, match="ends in a line end"):
        followed(json.dumps(schema))


def test_a_schema_reaches_itself_by_any_pointer():
    schema = {
        "$id": "https://example.org/tree",
        "type": "object",
        "properties": {"c": {"$ref": "#"}, "d": {"$ref": "https://example.org/tree#/x/y~1%7Ez/0"}},
        "x": {"y/~z": [{"const": "C:\\"}]},
        "additionalProperties": False,
    }
    state = state_of(schema)
    assert takes_text(state, '{"c": {"c": {}}, "d": "C:\\\\"}')
    assert not takes_text(state, '{"c": {"d": 1}}')


def test_a_schema_inside_a_grammar_is_followed_or_refused_too():
    grammar = """
    // %json {"not": {}}
    start: "%json {" A %json {"type": "array", "items": {"const": "a\\\\"}} /["x]/ %json {"const": 1.0}
    A: "a" | /%json b/
    """
    state = GRAMMARS.state(StructuredOutputsParams(grammar=grammar))
    assert takes_text(state, '%json {a["a\\\\", "a\\\\"]x1') and takes_text(
        state, '%json {%json b[]"1'
    )
    assert not takes_text(state, "%json {a[  ]x1")
    for schema, message in [
        ('{"items": {"uniqueItems": true}}', "uniqueItems True at #/items is not supported"),
        ('{"const": 9007199254740993}', "const 9007199254740993 at # holds 9007199254740993"),
    ]:
        with pytest.raises(ValueError, match=f"^structured_outputs.grammar .*{message}"):
            GRAMMARS.state(StructuredOutputsParams(grammar=f"start: %json {schema}"))
    with pytest.raises(ValueError, match=r"%json must be followed by JSON \(Expecting"):
        followed_inside("start: %json {,")


DRAFTS = {
    4: jsonschema.Draft4Validator,
    6: jsonschema.Draft6Validator,
    7: jsonschema.Draft7Validator,
    2019: jsonschema.Draft201909Validator,
    2020: jsonschema.Draft202012Validator,
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_hears_its_own_keywords(draft):
    of_draft = set(DRAFTS[draft].VALIDATORS)
    every = {name for kind in DRAFTS.values() for name in kind.VALIDATORS}
    # Refused in drafts that lack them, since validators differ, or read together with others.
    every -= {
        "dependencies",
        "additionalItems",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "$recursiveRef",
    }
    heard = set(rules._heard(dict.fromkeys(every - {"$ref"}), draft)) | {"$ref"}
    assert heard == of_draft & every
    neighbours = rules._heard({"type": "string", "$ref": "#"}, draft)
    assert set(neighbours) == ({"$ref"} if draft < 2019 else {"type", "$ref"})


ANY_7 = {"$schema": DRAFT_7, "definitions": {"any": {}, "text": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"$schema": DRAFT_4, "oneOf": [{"type": "number"}, {"const": "a"}]}, "0"),
        ({"$schema": DRAFT_4, "oneOf": [{"type": "string"}, {"type": "number", "const": 1}]}, "2"),
        ({"$schema": DRAFT_4, "contains": {}, "if": {}, "then": False, "propertyNames": False}, '{"a": 1}'),
        (ANY_7 | {"oneOf": [{"$ref": "#/definitions/any", "type": "string"}, {"type": "integer"}]}, "5"),
        (ANY_7 | {"oneOf": [{"$ref": "#/definitions/text", "type": "null"}, {"type": "integer"}]}, '"a"'),
        (ANY_7 | {"items": {"$ref": "#/definitions/text", "maxLength": 1, "not": {}}, "type": "array"}, '["ab"]'),
        (ANY_7 | {"oneOf": [{"type": "array", "prefixItems": [False], "minItems": 1}, {"type": "string"}]}, "[1]"),
        (ANY_7 | {"unevaluatedProperties": False, "dependentRequired": {"a": ["b"]}, "type": "object"}, '{"a": 1}'),
        (ANY_7 | {"oneOf": [{"const": 1}, {"const": "a"}]}, "1"),
    ],
    ids=str,
)  # fmt: skip
def test_keywords_that_a_draft_lacks_and_neighbours_of_references_are_not_heard(schema, text):
    judge = validator(schema)
    try:
        state = state_of(schema)
    except ValueError as error:
        assert "oneOf" in str(error)
        return
    assert takes_text(state, text) is judge.is_valid(json.loads(text))


def test_draft_4_has_its_own_exclusive_limits():
    with pytest.raises(ValueError, match="exclusiveMinimum 5 at # is not true or false"):
        state_of({"$schema": DRAFT_4, "minimum": 1, "exclusiveMinimum": 5})


NAMES = {"a": {"b": {"type": "string"}, "%": INTEGER}, "a/b": INTEGER, "a~1b": {"type": "null"}}


@pytest.mark.parametrize(
    "pointer",
    [
        *("a%2Fb", "a%2fb", "a/b", "%61/b", "a~1b", "a%7E1b", "a~01b", "a%252Fb"),
        *("a/%25", "a%2F%25", "a/%", "a/b/0", "list/1", "list/01", "list%2F0"),
    ],
)
def test_a_pointer_leads_where_a_validator_finds_it(pointer):
    schema = {"$ref": f"#/x/{pointer}", "x": NAMES | {"list": [INTEGER, {"type": "null"}]}}
    judge = validator(schema)
    expected = {text: is_valid(judge, json.loads(text)) for text in ("1", '"a"', "null")}
    if None in expected.values() or pointer == "list/01":
        with pytest.raises(ValueError, match="is nowhere: Pointer"):
            state_of(schema)
        return
    state = state_of(schema)
    assert {text: takes_text(state, text) for text in expected} == expected


def test_every_keyword_of_every_draft_is_known():
    """One that nobody has thought of would be taken for a note, and left out without a word."""
    dialects = [
        jsonschema_specifications.REGISTRY[uri].contents
        for uri in jsonschema_specifications.REGISTRY
    ]
    keywords = {name for part in dialects for name in part.get("properties", ())}
    assert len(keywords) > 50
    with_others = {"then", "else", "minContains", "maxContains"}  # they mean nothing alone
    of_draft_3 = {"disallow", "divisibleBy", "extends"}
    known = {*rules._SILENT, *rules._COUNTS, *rules._BOUNDS, *rules._ARRAYS, *rules._OTHERS}
    known |= {*rules._UNSUPPORTED, "allOf", "anyOf", "oneOf"} | with_others | of_draft_3
    assert keywords <= known, keywords - known
    assert set(rules._COUNTS) < set(COUNTS)

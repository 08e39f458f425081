"""Random schemas, random texts of their grammars, and an independent judge of both."""

from __future__ import annotations

import datetime
import itertools
import json
import re
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np

from hybrid_jax.config.structured_outputs import StructuredOutputsParams
from hybrid_jax.constraints.grammar import Grammars, GrammarState

DRAFT_7, DRAFT_4 = (
    "http://json-schema.org/draft-07/schema#",
    "http://json-schema.org/draft-04/schema#",
)
FORMATS = jsonschema.FormatChecker()
MAX_TOKENS = 400

# Schemas with one keyword each, or as few as make it meaningful. Each line is one keyword.
KEYWORDS: dict[str, list[Any]] = {
    "type": [
        "null",
        "integer",
        "number",
        "string",
        "array",
        "object",
        ["integer", "null"],
        ["string", "object"],
    ],
    "const": [
        *(
            None,
            True,
            0,
            1,
            1.0,
            -0.0,
            1.5,
            -3,
            1e22,
            1e23,
            0.1,
            1e-7,
            123456789.123456789,
            2**53,
            2**53 + 1,
            -(2**63),
        ),
        *("", "a", 'a"b\\c/', "\x00\n\x1f\x7f", "\u00e9\u2028\U0001f600", "C:\\Users\\somebody"),
        *([], [1, "a\\"], {}, {"a": None}, {'b"\n': [1.5]}),
    ],
    "enum": [
        [1, 2.5, "a"],
        ["a", "b"],
        [None, False, 0],
        [{"a": 1}, [1, 2]],
        [2**60, 2**53 + 1],
        ["x"] * 2,
        [],
    ],
    "minimum": [0, 1.5, -2, -2.25, 10, 2**53, 2**53 + 2, 1e-9, 1e300],
    "maximum": [0, 2.5, -1, -1.5, 9, 2**53, 2**63 - 1, 1e-9],
    "exclusiveMinimum": [0, 1, -1, 0.5, -0.5, 9.99],
    "exclusiveMaximum": [0, 1, -1, 0.5, 10.25],
    "multipleOf": [1, 2, 3, 7, 0.5, 0.25, 0.1, 0.01, 1.5, 2.0, 100, 2**31],
    "minLength": [0, 1, 3, 2.0],
    "maxLength": [0, 1, 2],
    "pattern": [
        *(
            "^a",
            "b$",
            "^[a-c]+$",
            "a|b",
            "^a|b$",
            r"^\d+$",
            r"^\D$",
            r"^\w\W$",
            r"^\s\S$",
            r"^[^\d\s]$",
            "^.$",
            "^$",
            "",
        ),
        *(
            r"^[\w.]{1,3}$",
            "^[a&&b]$",
            "^[[a]$",
            r"^\"\\\n$",
            "(^|-)x($|-)",
            "^(?:ab)*?$",
            "a++",
            "(?=a)b",
            r"\bx\b",
        ),
        *(
            "^a{2}$",
            "^a{,2}$",
            "^{a}$",
            "^[^a-z]{2}$",
            r"^\u00e9$",
            "^[a-]$",
            "^[\\]a]$",
            "^\\x41/$",
            "[\\b]",
            "^(a)\\1$",
        ),
    ],
    "format": [
        *(
            "date",
            "date-time",
            "time",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uuid",
            "uri",
            "int32",
            "regex",
        ),
        *("unknown", "json-pointer"),
    ],
    "items": [
        True,
        False,
        {"type": "integer"},
        {"enum": ["a", 1]},
        {"type": "array", "maxItems": 1},
    ],
    "prefixItems": [
        [{"type": "integer"}],
        [{"type": "string", "maxLength": 1}, {"type": "null"}],
        [False],
        [True, {"const": 1}],
    ],
    "minItems": [0, 1, 2],
    "maxItems": [0, 1, 2],
    "uniqueItems": [True, False],
    "contains": [{"type": "integer"}, True],
    "minContains": [0, 2],
    "maxContains": [1],
    "properties": [
        {"a": {"type": "integer"}},
        {"a": True, "b": {"type": "null"}},
        {"a": False},
        {"b": {"const": "x"}, "a": {"type": "string", "maxLength": 2}},
        {"\n": {"type": "null"}},
        {"\u00e9": {"type": "null"}, 'q"\\': {"type": "null"}},
    ],
    "required": [["a"], ["b", "a"], [], ["c"]],
    "additionalProperties": [
        True,
        False,
        {"type": "integer"},
        {"type": "array", "items": {"type": "null"}},
    ],
    "patternProperties": [
        {"^a": {"type": "integer"}},
        {"b$": {"type": "null"}, "^c$": True},
        {"^[ab]$": {"maximum": 3}},
        {r"^\d$": {"type": "null"}},
        {"^.*$": {"type": "integer"}},
        {"a": True, "b": {"type": "null"}},
        {"x": False},
    ],
    "propertyNames": [{"maxLength": 1}, True, {"pattern": "^a"}],
    "minProperties": [0, 1, 2, 3],
    "maxProperties": [0, 1, 2],
    "dependentRequired": [{"a": ["b"]}, {}],
    "dependentSchemas": [{"a": {"required": ["b"]}}, {}],
    "unevaluatedProperties": [False, True, {"type": "null"}],
    "unevaluatedItems": [False, True],
    "allOf": [
        [{"type": "integer"}, {"minimum": 2}],
        [{"required": ["a"]}, {"properties": {"a": {"type": "null"}}}],
        [{"maxLength": 3}],
        [{"properties": {"a": {"type": "integer"}}, "additionalProperties": False}],
        [{"type": ["integer", "string"]}, {"type": ["string", "null"]}],
        [{"prefixItems": [{"type": "integer"}]}, {"items": {"maximum": 5}}],
        [{"pattern": "^a"}, {"pattern": "b$"}],
        [{"multipleOf": 3}, {"multipleOf": 4}],
        [True],
    ],
    "anyOf": [
        [{"type": "integer"}, {"type": "string", "maxLength": 1}],
        [{"minimum": 5}, {"maxLength": 2}],
        [{"required": ["a"]}, {"required": ["b"]}],
        [False, {"type": "null"}],
        [{"items": {"type": "null"}}],
    ],
    "oneOf": [
        [{"type": "integer"}, {"type": "string"}],
        [{"type": "integer"}, {"type": "number"}],
        [{"const": "a"}, {"const": "b"}],
        [
            {"properties": {"a": {"const": "x"}}, "required": ["a"]},
            {"properties": {"a": {"const": "y"}}, "required": ["a"]},
        ],
        [
            {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]},
            {"type": "object", "properties": {"a": {"const": "y"}}, "required": ["a"]},
        ],
        [
            {"type": "object", "properties": {"a": {"const": 1}}},
            {"type": "object", "properties": {"a": {"const": 2}}},
        ],
        [{"const": 1}, {"const": 1.0}],
        [
            {"type": "array", "items": {"type": "null"}},
            {"type": "array", "items": {"type": "string"}},
        ],
        [True],
    ],
    "not": [{"type": "string"}, False, {}],
    "if": [{"type": "string"}],
    "then": [{"maxLength": 1}],
    "else": [{"maximum": 1}],
    "$ref": [
        *(
            "#/$defs/int",
            "#/$defs/a~1b%25",
            "#/$defs/tree",
            "#/nowhere",
            "#name",
            "https://example.org/x",
            "#",
            "#/$defs/loop",
        ),
        *("#/$defs/list", "#/$defs/child"),
    ],
    "$dynamicRef": ["#int"],
    "$anchor": ["here"],
    "$comment": ["maxLength: 1"],
    "title": ["A"],
    "default": [5],
    "examples": [[1]],
    "readOnly": [True],
    "deprecated": [True],
    "contentMediaType": ["application/json"],
    "contentEncoding": ["base64"],
    "requird": [["a"]],
    "definitions": [{"x": {"type": "null"}}],
}
OLDER: dict[str, list[Any]] = {
    "items": [
        [{"type": "integer"}],
        [{"type": "null"}, {"type": "string", "maxLength": 1}],
        {"type": "integer"},
    ],
    "additionalItems": [False, {"type": "boolean"}, True],
    "dependencies": [{"a": ["b"]}, {"a": {"required": ["b"]}}, {}],
    "$ref": ["#/definitions/x", "#/definitions/y/items/0"],
    "minItems": [1, 2],
    "maxItems": [1],
    "type": ["array", "integer", "object"],
    "prefixItems": [[{"type": "null"}]],
    "minimum": [1, 2.5],
    "maximum": [3],
    "required": [["a"]],
    "properties": [{"a": {"type": "integer"}}],
    "id": ["http://example.org/root"],
    "title": ["A"],
}
OLDEST: dict[str, list[Any]] = OLDER | {
    "exclusiveMinimum": [True, False],
    "exclusiveMaximum": [True, False],
}
DEFINITIONS = {
    "int": {"type": "integer", "minimum": 1},
    "a/b%": {"type": "string", "maxLength": 2},
    "tree": {
        "type": "object",
        "properties": {"c": {"$ref": "#/$defs/tree"}},
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"$ref": "#/$defs/list"}, "maxItems": 2},
    "loop": {"$ref": "#/$defs/loop"},
    "child": {"type": "object", "properties": {"c": {"$ref": "#/$defs/child"}}, "required": ["c"]},
}
OLD_DEFINITIONS = {"x": {"type": "integer"}, "y": {"items": [{"type": "null"}]}}
# Values that a grammar must take if the schema allows them.
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        12,
        14,
        100,
        -1,
        -2,
        -3,
        -4,
        2**31,
        2**53,
        2**53 + 1,
    ),
    *(0.5, 1.5, 2.5, -0.5, -1.5, 0.25, 0.75, 2.25, 9.99, 10.25, 1e22, 0.001),
    *(
        "",
        "a",
        "b",
        "ab",
        "abc",
        "xb",
        "x",
        "-x-",
        "1",
        "12",
        "aa",
        "é",
        "é1",
        "😀",
        'a"',
        "a\\",
        "\n",
        "a\nb",
        "x y",
        "A/",
    ),
    *(
        "2024-02-29",
        "2024-02-29T23:59:59Z",
        "12:00:00.5+01:00",
        "P1DT2H",
        "a@b.c",
        "a.example",
        "1.2.3.4",
        "::1",
    ),
    *(
        "123e4567-e89b-12d3-a456-426614174000",
        "http://example.org/a?b#c",
        "_",
        "0",
        "[]",
        "{a}",
        "&",
        "a]",
        "[",
        "]",
    ),
    *(
        [],
        [1],
        [1, 2],
        ["a"],
        [None],
        [1, "a"],
        [[]],
        [None, "a"],
        ["a", None],
        [1, 2, 3],
        [[None]],
    ),
    *(
        {},
        {"a": 1},
        {"b": None},
        {"a": None},
        {"a": "x"},
        {"a": 1, "b": None},
        {"b": "x", "a": "y"},
        {"c": {}},
    ),
    *(
        {"é": None},
        {'q"\\': None},
        {"\n": None},
        {"1": None},
        {"x": 1},
        {"a": 1, "b": 2, "c": 3},
        {"zb": None},
    ),
    *({"a": 1, "c": "d"}, {"c": {"c": {}}}, {"a": [None]}),
]


def _raises(read: Any) -> Any:
    def good(value: Any) -> bool:
        if isinstance(value, str):
            read(value)
        return True

    return good


def _host(text: str) -> None:
    if len(text) > 253 or not all(
        re.fullmatch("[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?", part)
        for part in text.split(".")
    ):
        raise ValueError(text)


def _uri(text: str) -> None:
    parts = urllib.parse.urlsplit(text)
    if not parts.scheme or not re.fullmatch(r"[!#$%&'()*+,\-./:;=?@\[\]_~0-9A-Za-z]*", text):
        raise ValueError(text)


def _duration(text: str) -> None:
    if not re.fullmatch(r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)", text):
        raise ValueError(text)


# What jsonschema itself checks only with more packages.
for _name, _read in {
    "date-time": lambda text: datetime.datetime.fromisoformat(_in_full("^.{10}T.{8}", text)),
    "time": lambda text: datetime.time.fromisoformat(_in_full("^.{8}", text)),
    "hostname": _host,
    "uri": _uri,
    "duration": _duration,
}.items():
    FORMATS.checks(_name, raises=ValueError)(_raises(_read))


def _in_full(beginning: str, text: str) -> str:
    """A time with its zone and six digits of a second, since Python reads shorter ones and at most six digits."""
    text = text.upper()
    if not re.match(beginning + r"(\.\d+)?(Z|[+-]\d\d:\d\d)$", text):
        raise ValueError(text)
    return re.sub(r"\.(\d+)", lambda found: "." + found[1][:6].ljust(6, "0"), text).replace(
        "Z", "+00:00"
    )


def validator(schema: dict[str, Any]) -> Any:
    """A validator of the schema's draft; None if the schema is wrong."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError:
        return None
    return kind(schema, format_checker=FORMATS)


def is_valid(judge: Any, value: Any) -> bool | None:
    """None if the judge itself cannot say: a reference that leads nowhere, or an expression that Python cannot read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # [[a]
        try:
            return judge.is_valid(value)
        except (re.error, RecursionError, OverflowError):  # 1e400 is infinite to Python
            return None
        except Exception as error:
            said = f"{type(error).__name__} {error}"
            if "Unresolvable" in said or "PointerToNowhere" in said:
                return None
            raise


def tokens_of(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


class Walker:
    """Draws random texts of grammars over one vocabulary. They like the names and texts of a schema in odd spellings.

    Args:
        texts: of each token.
        decode: makes a text of tokens.
    """

    def __init__(self, texts: list[str], decode: Callable[[list[int]], str]) -> None:
        self._texts, self._decode = texts, decode
        self._token = {text: token for token, text in reversed(list(enumerate(texts)))}

    def walk(self, state: GrammarState, seed: int, like: str = "") -> tuple[str, str]:
        """A random text of a grammar, and how it ended: "end", "long", or what went wrong.

        Args:
            state: of the grammar.
            seed: of the draws.
            like: JSON text, with characters and texts to prefer.
        """
        rng = np.random.default_rng(seed)
        state.restart()
        preferred = [
            np.array([t for t, text in enumerate(self._texts) if text and set(text) <= set(wanted)])
            for wanted in ('"}]', like, map(chr, range(32, 127)))
        ]
        wanted_texts = [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', like)] or [""]
        tokens: list[int] = []
        plan: list[int] = []  # what to write next, as far as it is allowed
        while True:
            words, may_end, failure = state.allowed()
            allowed = tokens_of(words)
            if failure or (not len(allowed) and not may_end):
                return self._decode(tokens), failure or "no token may come next"
            if may_end and (not len(allowed) or rng.random() < 0.4):
                return self._decode(tokens), "end"
            if len(tokens) > 3 * MAX_TOKENS:
                return "", "long"
            if plan and plan[0] in allowed:
                tokens.append(plan.pop(0))
                state.advance(tokens[-1:])
                continue
            plan = []
            draw = rng.random()
            kind = 0 if draw < 0.3 or len(tokens) > MAX_TOKENS else 1 if draw < 0.7 else 2
            some = np.intersect1d(allowed, preferred[kind]) if draw < 0.9 else allowed
            tokens.append(int(rng.choice(some if len(some) else allowed)))
            state.advance(tokens[-1:])
            if self._texts[tokens[-1]].endswith('"') and rng.random() < 0.5:
                wanted_text = wanted_texts[rng.integers(len(wanted_texts))]
                plan = self._tokens_of(spelled(wanted_text, rng) + '"')

    def _tokens_of(self, text: str) -> list[int]:
        """A text in tokens of one byte or one character each, up to what has none."""
        parts = map(chr, text.encode()) if self is BYTES else iter(text)
        return [self._token[part] for part in itertools.takewhile(self._token.__contains__, parts)]


def spelled(text: str, rng: np.random.Generator) -> str:
    """A text inside quotes in JSON, each character in any of its spellings."""
    return "".join(
        spellings[rng.integers(len(spellings))]
        for char in text[:20]
        for spellings in [_spellings(char)]
    )


def _spellings(char: str) -> list[str]:
    units = char.encode("utf-16-be").hex()
    codes = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    plain = [json.dumps(char, ensure_ascii=False)[1:-1]]
    return [*plain, codes, codes.upper().replace("\\U", "\\u"), *(["\\/"] if char == "/" else [])]


BYTES = Walker([chr(byte) for byte in range(256)], lambda tokens: bytes(tokens).decode())


def takes(state: GrammarState, value: Any) -> bool:
    """Whether a grammar over bytes takes a value, with its properties in one order or another."""
    orders = [value]
    if isinstance(value, dict):
        orders = [dict(items) for items in itertools.permutations(value.items())]
    return any(takes_text(state, json.dumps(order, ensure_ascii=False)) for order in orders)


def takes_text(state: GrammarState, text: str) -> bool:
    state.restart()
    for byte in text.encode():
        words, _, failure = state.allowed()
        if failure or not words[byte // 32] >> (byte % 32) & 1:
            return False
        state.advance([byte])
    return state.allowed()[1]


@dataclass
class Findings:
    """What trying schemas showed.

    Attributes:
        followed, refused: how many schemas.
        texts: how many random texts were judged.
        values: how many values were tried.
        faults: sentences; none if a schema is followed or refused, and nothing between.
    """

    followed: int = 0
    refused: int = 0
    texts: int = 0
    values: int = 0
    faults: list[str] = field(default_factory=list)


def try_schema(
    schema: dict[str, Any], grammars: Grammars, walker: Walker, seeds: int, found: Findings
) -> None:
    """Judges random texts of a schema's grammar, and which values the grammar takes."""
    given = json.dumps(schema)
    judge = validator(schema)
    try:
        state = grammars.state(StructuredOutputsParams(json=schema))
    except ValueError as error:
        found.refused += 1
        if "cannot be followed: " not in str(error) or "\n" in str(error):
            found.faults.append(f"{given}: {error}")
        return
    found.followed += 1
    if judge is None:
        found.faults.append(f"{given}: followed, and it is no schema")
        return
    words, may_end, _ = state.allowed()
    if not words.any() and not may_end:
        return  # refused with a message of its own: no token may come first
    for seed in range(seeds):
        text, how = walker.walk(state, seed, like=given)
        if how != "end":
            if how != "long":
                found.faults.append(f"{given}: {text!r} {how}")
            continue
        found.texts += 1
        try:
            value = json.loads(text)
        except ValueError as error:
            found.faults.append(f"{given}: {text!r} is no JSON: {error}")
            continue
        if is_valid(judge, value) is False:
            found.faults.append(f"{given}: {text!r} is not valid")
    if walker is not BYTES:
        return
    for value in VALUES:
        if is_valid(judge, value):
            found.values += 1
            if not takes(state, value) and not _is_written_otherwise(value, schema):
                found.faults.append(f"{given}: {json.dumps(value)} is not taken")


def _is_written_otherwise(value: Any, schema: dict[str, Any]) -> bool:
    """Whether docs/how_to/structured.md says that such a value is written in another way, or not at all."""
    text, given = json.dumps(value), json.dumps(schema)
    return (
        (
            "multipleOf" in given and ("." in text or len(text) > 15)
        )  # with all its decimals; validators round
        or "e+" in text
        or ("$ref" in given and "draft-0" in given)  # $ref and its neighbours hold together
        or ('\\n"' in text and "$" in given)  # to Python, a text may end behind $
        or ("\u00e9" in str(value) and ("\\\\w" in given or "\\\\D" in given))
    )


def entries(keywords: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [{name: value} for name, values in keywords.items() for value in values]


def completed(schema: dict[str, Any], draft: str | None = None) -> dict[str, Any]:
    """The schema with what its references need."""
    names = json.dumps(schema)
    if draft:
        return {"$schema": draft} | schema | {"definitions": OLD_DEFINITIONS}
    return schema | ({"$defs": DEFINITIONS} if "#/$defs" in names else {})


def pairs(keywords: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Every value of every keyword with every value of every other one, in both orders in turn."""
    for n, (one, other) in enumerate(itertools.combinations(entries(keywords), 2)):
        if set(one) != set(other):
            yield one | other if n % 2 else other | one


def placed(schema: dict[str, Any], place: int) -> dict[str, Any]:
    """A schema inside another one."""
    return [
        {"type": "array", "items": schema, "minItems": 1, "maxItems": 2},
        {
            "type": "object",
            "properties": {"a": schema},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"anyOf": [schema, {"type": "null"}]},
        {"type": "object", "additionalProperties": schema},
        {"allOf": [schema, {"type": ["integer", "string", "array", "object"]}]},
    ][place]

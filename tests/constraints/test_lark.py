"""A grammar is cut into parts as llguidance cuts it, in time in proportion to its length."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints.bounds import TRIED, check_bounds
from hybrid_jax.constraints.lark import parts
from hybrid_jax.constraints.schemas.in_lark import followed_inside
from tests.drawing import left_to_all

llguidance = pytest.importorskip("llguidance")
SCHEMA = '{"const": 1.0}'  # it is written as 1 where it is taken for a schema


def kinds(grammar):
    return [(part.kind, part.text) for part in parts(grammar)]


@pytest.mark.parametrize(
    "written, expected",
    [
        (r'"a\"#" b', [("text", r'"a\"#"'), ("name", "b")]),
        ('"a"i"b"ib', [("text", '"a"i'), ("text", '"b"i'), ("name", "b")]),
        ("/a\nb\\/c/imx d", [("expression", "/a\nb\\/c/imx"), ("name", "d")]),
        ('// /a/ "\n/b/', [("comment", '// /a/ "'), ("line", "\n"), ("expression", "/b/")]),
        ('# " %json', [("comment", '# " %json')]),
        (
            '</think> <|a"#//|> @b-1',
            [("token", "</think>"), ("token", '<|a"#//|>'), ("token", "@b-1")],
        ),
        ('%json\n[1,"]"]2', [("schema", '[1,"]"]'), ("number", "2")]),
        ('%jsontrue %regex{"a": "/"}', [("schema", "true"), ("data", '{"a": "/"}')]),
        ("%import common.A", [("name", "import"), ("name", "common"), ("name", "A")]),
        ("a::b: c~3..45 @{ {1}", "a :: b : c ~ 3 .. 45 @{ { 1 }".split()),
    ],
)
def test_the_parts_of_a_grammar(written, expected):
    found = kinds(written)
    assert (found if isinstance(expected[0], tuple) else [text for _, text in found]) == expected
    assert all(written[part.begin : part.end] == part.text for part in parts(written))


@pytest.mark.parametrize(
    "written, message",
    [
        ('a\n "b\n"', "line 2 has a text that is not closed on its line"),
        (
            r'"\q"',
            "line 1 has a text that is not closed on its line, or has an escape that JSON lacks",
        ),
        ("/a", "line 1 has an expression that is not closed"),
        ("/a\\\n/", "or has a backslash before a line end"),
        ("<a", "line 1 has a name of a token that is not closed"),
        ("%json {a: 1}", "%json must be followed by JSON"),
        ("%json\xa01", "%json must be followed by JSON"),
        ("%regex", "%regex must be followed by JSON"),
        ("%json " + "[" * 200_000, "what follows %json is nested too deeply"),
        ("%json 1" + "0" * 5000, "%json has a number with thousands of digits"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_does_not_end_is_refused(written, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_bounds(StructuredOutputsParams(grammar="start: " + written), TRIED)


@pytest.mark.parametrize(
    "hidden",
    [
        '"%json {s}"',
        "/%json {s}/",
        "# %json {s}\n",
        "// %json {s}\n",
        "/\n%json {s}\n/",
        "<%json{s}>",
    ],
)
@pytest.mark.parametrize("before", ["", "</think>", '<">', 'a[stop=/"/]: ', "/\n/"])
def test_a_schema_is_one_only_where_the_library_takes_it_for_one(hidden, before):
    """Its text may also stand in a text, an expression, a comment or a name of a token."""
    hidden = hidden.replace("{s}", json.dumps(SCHEMA)[1:-1] if hidden[0] == '"' else SCHEMA)
    grammar = f'start: {before} {hidden} %json {SCHEMA} "\\"" /"]:/'
    assert followed_inside(grammar).count('"const": 1.0') == (hidden[0] != '"')
    assert followed_inside(grammar).count('{"const": 1,') == 1


PIECES = (
    '"',
    "/",
    "\\",
    "\n",
    "#",
    "//",
    "<",
    ">",
    "a",
    "i",
    " ",
    '"a"',
    "/a/",
    "u0041",
    "\x7f",
    "é",
    "[",
    "]",
)


def lexes(grammar):
    """Whether llguidance can cut a grammar; whether it is one is another question."""
    matcher = llguidance.LLMatcher
    return "lexer error" not in matcher.validate_grammar(matcher.grammar_from_lark(grammar))


def ends(grammar):
    try:
        return bool([*parts(grammar)])
    except ValueError:
        return False


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=left_to_all) for s in range(1, 20))])
def test_what_is_refused_is_refused_by_the_library(seed):
    rng, agreed = random.Random(seed), 0
    for _ in range(300):
        grammar = "start: " + "".join(rng.choices(PIECES, k=rng.randint(1, 8)))
        assert ends(grammar) or not lexes(grammar), grammar
        agreed += ends(grammar) == lexes(grammar)
    assert agreed > 150  # the library also refuses a single backslash, and the like


LONG = 250_000


@pytest.mark.parametrize(
    "begin, unit",
    [
        *itertools.product(('start: "', "start: /", "start: "), ('\\"', "\\/", "/\\", "<a", "@")),
        ("start: /", "a"),
        ("start: ", '"a" '),
        ("start[", "a"),
    ],
)
def test_time_is_in_proportion_to_a_grammar(begin, unit):
    """A search that begins again at each quote would take hours here, and nothing else could run meanwhile."""
    grammar = (begin + unit * LONG)[:LONG]
    assert isinstance(ends(grammar), bool)

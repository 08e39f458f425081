"""An expression matches what all dialects of regular expressions match, and texts are compared with Python's `re`."""

from __future__ import annotations

import json
import random
import re

import pytest

from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints.grammar import Grammars
from hybrid_jax.constraints.patterns import NotPortable, portable
from tests.constraints.schemas import BYTES, takes_text
from tests.drawing import left_to_all
from tests.llms import byte_tokenizer

GRAMMARS = Grammars(byte_tokenizer(), 256)


def state_of(**form):
    return GRAMMARS.state(StructuredOutputsParams(**form))


@pytest.mark.parametrize(
    "pattern, matched, others",
    [
        ("a*?b+?", ["b", "aabb"], ["a"]),
        ("^ab$", ["ab"], ["a", "ab\n"]),
        ("^a|b$", ["a", "b"], ["ab"]),
        (r"\Aab\Z", ["ab"], []),
        (r"\d", ["7", "\u0663"], ["a"]),
        (r"\w+", ["a_1", "\u00e9\u00e9"], ["-", "\u0301", "\u00b2"]),
        (r"\s", [" ", "\n", "\xa0", "\x85"], ["\x1c", "\ufeff"]),
        (r"\S\D\W", ["aa-", "\u4e00b\u2028"], ["\x1caa", "a\u0663a", "aaa", "aa\u00b2"]),
        (r"[^\w]", ["-"], ["\u00e9", "_", "\u0301"]),
        (r"[^\s]", ["a"], ["\x1c", "\x85", "\ufeff"]),
        (r"[\d\-x.]{2}", ["3-", "x."], ["a"]),
        (".", ["a", "\r", "\u2028"], ["\n", ""]),
        ("(?s).", ["\n", "a"], []),
        ("(?s:.).", ["\na"], ["a\n"]),
        ("(?i)k[a-c]", ["kA", "Kb"], ["k"]),
        ("(?i:k)k", ["Kk"], ["KK"]),
        ("(?i)[^k]", ["a"], ["k", "K", "\u212a"]),
        ("(?x) a b # c\n | [ ]", ["ab", " "], ["a b"]),
        ("(?x)a\\ [\\ \\#]\\#[#]+  # (", ["a  ##", "a ###"], ["a", "a ##"]),
        ("(?x: a +\n){2} b", ["aaa b"], ["aab", "a b"]),
        ("(?x)\x1ca\v\f\t\r{,b}", ["\x1ca{,b}"], ["a{,b}"]),
        ("a{\u0661}", ["a{\u0661}"], ["a"]),
        (r"[a&|~\[\]^-]", ["&", "|", "~", "[", "]", "^", "-"], ["b"]),
        (r"[\b\x41\u0042]\t", ["\x08\t", "A\t", "B\t"], ["C\t"]),
        ("{a}]}", ["{a}]}"], []),
        ("(?P<x>a)(?:b)(c)", ["abc"], []),
        (r"\p{Lu}\P{L}", ["A1"], ["a1"]),
        ("a{2}b{1,}c{0,1}", ["aab", "aabbc"], ["ab"]),
        ('"/\\\\', ['"/\\'], []),
        ("(?:)|a", ["", "a"], []),
        ("\u00e9\U0001f600", ["\u00e9\U0001f600"], []),
    ],
)
def test_what_an_expression_matches(pattern, matched, others):
    state = state_of(regex=pattern)
    assert [text for text in matched if not takes_text(state, text)] == []
    assert [text for text in others if takes_text(state, text)] == []
    if "\\p" not in pattern.lower():
        assert all(re.fullmatch(pattern, text) for text in matched)


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("a++", "++ is possessive"),
        ("a{1}+", "{1}+ is possessive"),
        ("a**", "nothing that * could repeat"),
        ("(*a)", "nothing that * could repeat"),
        ("^*", "nothing that * could repeat"),
        ("a{,3}", "{,3} is a count for some"),
        ("(?x)a{2 }", "{2 } is a count for some"),
        ("(?x)a{ 2 # or more\n,}", "{ 2 # or more ,} is a count for some and text for others"),
        ("(?x)a{ , 2}", "{ , 2} is a count for some"),
        ("(?x)[a b]", "' ' in a character class of a verbose expression (x) is left out by some"),
        ("(?x)[^a\\ #]", "'#' in a character class of a verbose expression (x)"),
        ("(?x)a\xa0b", "U+00A0 in a verbose expression (x) is left out by some; write \\x{a0}"),
        ("a{3,2}", "the counts of {3,2} are in the wrong order"),
        ("(?=a)", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        (r"a\b", r"\b is not supported"),
        (r"\Ba", r"\B is not supported"),
        (r"a\Ab", r"\A is not supported"),
        ("(?m)^a$", "the flags (?m)"),
        ("a(?i)b", "the flags (?i)"),
        ("(?-i:a)", "(?-i is not supported"),
        ("(?>a)", "(?>a is not supported"),
        ("(a", "unclosed group"),
        ("a)", "unopened group"),
        ("[a", "unclosed character class"),
        ("[]a]", "[] and [^] are text for some"),
        ("[a&&b]", "&& in a character class"),
        ("[[:alpha:]]", "[: in a character class"),
        ("[b-a]", "the range b-a is in the wrong order"),
        (r"[a-\d]", "a range of characters from a- to a set"),
        (r"[\d-z]", r"a range of characters from \d"),
        (r"\q", r"\q is not supported"),
        (r"\ud800", r"\ud800 is not a character"),
        (r"\x{110000}", "is not a character"),
        ("a\\", "a backslash at the end"),
        (r"\pé", r"\p needs a property"),
        ("(?i)\u00e9", "\u00e9 while case is ignored"),
        ("(?i)[^\u4e00]", "needs plain ASCII"),
    ],
)
def test_what_dialects_read_differently_is_refused(pattern, message):
    with pytest.raises(NotPortable, match=re.escape(message)):
        portable(pattern, ecma=False)
    with pytest.raises(ValueError, match="^structured_outputs.regex .*" + re.escape(message)):
        state_of(regex=pattern)


@pytest.mark.parametrize("char", [*map(chr, range(128)), "\u00e9", "\u2028", "\U0001f600"])
def test_each_character_matches_itself_alone(char):
    escaped = re.escape(char)
    for pattern in (escaped, f"[{escaped}]", f"[{escaped}-{escaped}]", f"(?:{escaped})"):
        state = state_of(regex=pattern)
        assert takes_text(state, char)
        assert not any(
            takes_text(state, other) for other in ("<", "a", "", char + char) if other != char
        )
    state = state_of(json={"pattern": f"^{escaped}$", "type": "string"})
    assert json.loads(BYTES.walk(state, 0)[0]) == char


@pytest.mark.parametrize(
    "pattern, narrow, wide",
    [
        (".", r"[^\n\r\x{2028}\x{2029}]", r"[^\n]"),
        (r"\d", "[0-9]", r"[\p{Nd}]"),
        (r"[^\d]", r"[^\p{Nd}]", "[^0-9]"),
        ("[[a&&b]", r"[\[a\&\&b]", r"[\[a\&\&b]"),
        ("a-b", r"a\-b", r"a\-b"),
        ("(?x)[a #] {2 }\xa0", r"[a \#]\{2\}\x{a0}", r"[a \#]\{2\}\x{a0}"),
    ],
)
def test_sets_of_a_schema_are_written_out(pattern, narrow, wide):
    assert portable(pattern, ecma=True) == narrow
    assert portable(pattern, ecma=True, wide=True) == wide


LONG = 250_000


@pytest.mark.parametrize(
    "begin, unit",
    [
        *(
            (begin, unit)
            for begin in ("(?x)", "(?x)a{")
            for unit in ("#\n", " ", "a #\n", "1 ", "{1")
        ),
        *(
            ("", unit)
            for unit in ("a", "(a)", r"\x41", r"\u", "a{1}", "{,", "(?", "(?a", r"\p{a", "|")
        ),
        *(("[", unit) for unit in ("ab", "a-b", r"\d", r"\]", "-", "[")),
    ],
)
@pytest.mark.parametrize("ecma", [True, False])
def test_time_is_in_proportion_to_an_expression(begin, unit, ecma):
    """A copy of the rest for each character would take minutes here."""
    text = (begin + unit * LONG)[:LONG]
    try:
        assert len(portable(text, ecma=ecma)) <= 8 * LONG
    except NotPortable:
        assert unit not in ("#\n", "a #\n", "a", "a{1}", "|")


ATOMS = (
    *(
        "a",
        "b",
        "é",
        ".",
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"\W",
        r"\S",
        "[ab]",
        "[^ab]",
        r"[^\w]",
        r"[\D]",
        "[a-c.]",
        "-",
    ),
    *(
        r"[^\s-]",
        r"\.",
        r"\\",
        r"\t",
        "/",
        '"',
        "&",
        "(?:ab|c)",
        "(a|)",
        "(?i:k)",
        "(?s:.)",
        "#",
        " ",
        r"[^\d]",
        "~",
    ),
)
COUNTS = ("", "", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}?", "*?", "{2,}")


def random_pattern(rng, atoms):
    pieces = ["".join([rng.choice(atoms), rng.choice(COUNTS)]) for _ in range(rng.randint(1, 5))]
    half = len(pieces) // 2
    middle = rng.choice(["", "", "|"])
    return "".join([*pieces[:half], middle, *pieces[half:]])


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=left_to_all) for s in range(1, 20))])
def test_texts_of_random_expressions_match_them(seed):
    rng, num_ended = random.Random(seed), 0
    for number in range(80):
        pattern = random_pattern(rng, ATOMS)
        text, how = BYTES.walk(state_of(regex=pattern), number, like="ab1- ")
        assert how in ("end", "long"), pattern
        num_ended += how == "end"
        assert how == "long" or re.fullmatch(pattern, text), (pattern, text)
    assert num_ended > 60


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=left_to_all) for s in range(1, 20))])
def test_texts_of_random_patterns_of_a_schema_have_a_match(seed):
    rng, num_ended = random.Random(seed), 0
    for number in range(60):
        pattern = random_pattern(rng, ATOMS)
        pattern = (
            rng.choice(["", "^"]) + rng.choice([pattern, f"(?:{pattern})"]) + rng.choice(["", "$"])
        )
        schema = {"type": "string", "pattern": pattern}
        text, how = BYTES.walk(state_of(json=schema), number, like='ab1- "')
        assert how in ("end", "long"), pattern
        num_ended += how == "end"
        assert how == "long" or re.search(pattern, json.loads(text)), (pattern, text)
    assert num_ended > 30


@pytest.mark.parametrize(
    "choice",
    [
        ["a", "ab", "abc"],
        ["{}[]().*+?^$|\\", "#&~- /", "\"'"],
        ["\x00\t\n\r\x7f", "\u00e9\u2028\U0001f600"],
        ["<|endoftext|>", "<0x41>", "(?i)a"],
        [" ", "  ", "a" * 300],
    ],
)
def test_a_choice_is_each_of_its_texts_and_no_other(choice):
    state = state_of(choice=choice)
    assert all(takes_text(state, text) for text in choice)
    assert not any(
        takes_text(state, text + text[-1]) for text in choice if text + text[-1] not in choice
    )
    for seed in range(4):
        text, how = BYTES.walk(state, seed, like="".join(choice))
        assert (text in choice, how) == (True, "end")

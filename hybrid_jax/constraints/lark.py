"""Grammars in llguidance's variant of Lark, cut into the parts that matter here, as llguidance (1.9.1) cuts them.

A text in quotes ends on its line and has the escapes of JSON. An expression between slashes may have line ends, but no
backslash before one. JSON stands behind `%json`, `%regex` and `%llguidance`, and the name of a token between `<` and
`>`: quotes, slashes and `#` in it begin nothing.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator
from typing import Any, NamedTuple

# Each alternative takes time in proportion to what it reads: a run that cannot match is not tried in parts (`*+`).
_PART = re.compile(
    r"""
    (?P<comment> (?: // | \# ) [^\n]*+ )
    | (?P<text> "(?: \\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}) | [^"\\\x00-\x1f\x7f] )*+"i?+ )
    | (?P<expression> /(?: \\. | [^/\\] )++/[imslux]*+ )
    | (?P<token> <[^<>]++> | @[A-Za-z0-9_-]++ )
    | (?P<unclosed> ["/<] )
    | (?P<schema> %json ) | (?P<data> %(?:llguidance|regex) )
    | (?P<name> [A-Za-z_][\w-]*+ )
    | (?P<number> [0-9]++ )
    | (?P<nested> @[{}] )
    | (?P<bracket> [(\[{~)\]}] | \.\. )
    | (?P<colon> :++ )
    | (?P<line> \n )
    """,
    re.X,
)
_JSON_SPACES = re.compile(r"[ \t\r\n]*+")


class Part(NamedTuple):
    """A part of a grammar.

    Attributes:
        kind: "comment", "text", "expression", "token", "schema", "data", "name", "number", "nested", "bracket",
            "colon" or "line", which is its end. Brackets are also `~` and `..`.
        text: what stands there.
        begin, end: where it stands. For JSON this is the JSON alone, without its keyword.
        value: the JSON of a schema or of data; None for all others.
    """

    kind: str
    text: str
    begin: int
    end: int
    value: Any = None


def parts(grammar: str) -> Iterator[Part]:
    """The parts of a grammar from left to right. What stands between them is of no importance here.

    Raises:
        ValueError: something does not end, or JSON is wrong or nested too deeply. llguidance refuses it as well.

    Example:
        >>> [part.text for part in parts('start: "a#" /b/i %json {"c": 1} # d')]
        ['start', ':', '"a#"', '/b/i', '{"c": 1}', '# d']
    """
    position = 0
    while (found := _PART.search(grammar, position)) is not None:
        kind = found.lastgroup
        assert kind is not None, "each alternative has a name"
        begin, position = found.span(kind)[0], found.end()
        if kind == "unclosed":
            raise ValueError(_unclosed(grammar, begin))
        value, text = None, found[kind]
        if kind in ("schema", "data"):
            value, begin, position = _json(grammar, position, text)
            text = grammar[begin:position]
        yield Part(kind, text, begin, position, value)


def _json(grammar: str, position: int, keyword: str) -> tuple[Any, int, int]:
    """The JSON behind a keyword, and where it begins and ends."""
    spaces = _JSON_SPACES.match(grammar, position)
    begin = spaces.end() if spaces else position
    try:
        value, end = json.JSONDecoder().raw_decode(grammar, begin)
    except RecursionError:
        raise ValueError(f"what follows {keyword} is nested too deeply; nest less") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{keyword} must be followed by JSON ({error}); correct it") from None
    except ValueError:
        raise ValueError(f"{keyword} has a number with thousands of digits; shorten it") from None
    return value, begin, end


def _unclosed(grammar: str, begin: int) -> str:
    """What does not end, in words."""
    what, remedy = {
        '"': (
            "a text that is not closed on its line, or has an escape that JSON lacks",
            "close it, and write a backslash twice",
        ),
        "/": (
            "an expression that is not closed, or is empty, or has a backslash before a line end",
            "close it with /",
        ),
        "<": ("a name of a token that is not closed", "close it with >, or put it in quotes"),
    }[grammar[begin]]
    line = grammar.count("\n", 0, begin) + 1
    return f"line {line} has {what}: {reprlib.repr(grammar[begin : begin + 100])}; {remedy}"

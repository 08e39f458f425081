"""What is said of a form that llguidance refuses: what is wrong, where, and what to do."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from hybrid_jax.config.structured_outputs import StructuredOutputsParams
from hybrid_jax.constraints.lark import parts
from hybrid_jax.constraints.schemas.refused_part import UNSATISFIABLE, RefusedPart, refused_part
from hybrid_jax.constraints.schemas.walk import followed

MAX_MESSAGE = 160  # characters of the library's own message
# A rule of EBNF or GBNF, at the beginning of a line. Lark has this sign in texts alone.
EBNF_RULE = re.compile(r"^[ \t]*+<?[\w-]++>?[ \t]*+::=", re.M)
EBNF_HINT = (
    "it has rules with ::=, as EBNF and GBNF do, and must be Lark; write `name: ...` for each rule, and `start: ...` "
    "for the first"
)
OF_TRIAL = ("compiling it ", "one of its tokens ")  # messages that are in our words already
AT_LINE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.S)
IN_SCHEMA = "failed to compile JSON schema: "
IN_EXPRESSION = re.compile(r'invalid regex ".*" \(in regex\): (.*)', re.S)
# What the library (1.9.1) says, and how it is said here: {at} is the place, {of} the pattern there, and {0} what the
# first group has found. What is looked for is short, since a message may repeat a pattern of the caller's.
WORDS: dict[str, str] = {
    r"oneOf constraints are not supported": (
        "oneOf{at} is not supported, since a value could be valid under two of its schemas; write anyOf if none can, "
        "or give them different types or constants"
    ),
    r"patternProperty regexes ": (
        "patternProperties{at} are not disjoint, since a name could match two of them; write patterns that exclude "
        "each other"
    ),
    r"min/maxProperties only supported": (
        "minProperties and maxProperties{at} need all properties in required; list them there, or leave out these two"
    ),
    r"(Unicode property (?:value )?not found)": "{0}{at}{of}; write one that Unicode has, as in \\p{{L}}",
    r"lookarounds not supported yet; (?:Start|End)": (
        "^ or $ stands in the middle of an expression{at}{of}, which is not supported; write it where its part begins "
        "or ends, or leave it out"
    ),
    r"Current row has (\d+ items; max is \d+)": (
        "too much could come next{at}, {0}; leave out alternatives, or list more properties as required"
    ),
    r"(too many expressions|Too many items|(?:[Ll]exer|[Ss]chema|[Gg]rammar) .{0,60}?too (?:large|big))": (
        "it is too large for llguidance{at}{of}: {0}; lower its counts, or leave out alternatives"
    ),
    r"no start rule found": "no rule has the name start; name the first one so",
}


def in_another_notation(wanted: StructuredOutputsParams) -> str | None:
    """What to do with a grammar that is not Lark but EBNF or GBNF; None for all other forms."""
    grammar: Any = wanted.value
    return EBNF_HINT if wanted.kind == "grammar" and EBNF_RULE.search(grammar) else None


def in_our_words(
    wanted: StructuredOutputsParams, message: str, ask: Callable[[str], str | None]
) -> str:
    """Why a form is refused, where, and what to do.

    Args:
        wanted: the form.
        message: what the library or the trial says.
        ask: what they say of a JSON schema alone, as JSON text; None if it compiles.

    Example:
        >>> in_our_words(StructuredOutputsParams(grammar="begin: x"), "no start rule found", lambda schema: None)
        'no rule has the name start; name the first one so'
    """
    if message.startswith(OF_TRIAL):
        return message
    value: Any = wanted.value
    if wanted.kind == "json":
        return _of_part(refused_part(value, message, _kind_of, ask))
    line, column, text = (
        found.groups() if (found := AT_LINE.match(message)) else (None, None, message)
    )
    if wanted.kind != "grammar":  # the library takes it for a grammar of one line
        inner = IN_EXPRESSION.match(text)
        text = inner[1] if inner else text
        return _worded(text) or f"{shortened(text)}; write it without that"
    if text.startswith(IN_SCHEMA):
        return _of_schemas(value, text.removeprefix(IN_SCHEMA), ask)
    where = f" in line {line}" if line else ""
    return _worded(text, at=where) or _of_line(value, line, column, shortened(text))


def shortened(message: str) -> str:
    """A parser's message in short: its line "error: ..." if it has one, else its first line."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["unknown error"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = (errors or lines)[0]
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def _kind_of(message: str) -> str:
    """What messages of the same kind have in common."""
    if UNSATISFIABLE in message:
        return UNSATISFIABLE
    return next((said for said in WORDS if re.search(said, message)), shortened(message))


def _worded(message: str, at: str = "", of: str = "") -> str | None:
    for said, words in WORDS.items():
        if found := re.search(said, message):
            return words.format(*found.groups(), at=at, of=of)
    return None


def _of_part(part: RefusedPart, of_schema: str = "") -> str:
    """Args: of_schema: which schema of several it is."""
    place, message = part
    at = f" at {place.path}{of_schema}"
    if UNSATISFIABLE not in message and (words := _worded(message, at, _patterns(place.given))):
        return words
    reason = shortened(message).removeprefix(UNSATISFIABLE).removeprefix(": ")
    named = [name for name in place.keywords if name in reason] or place.keywords
    remedy = f"change or leave out one of its keywords: {', '.join(named)}"
    if UNSATISFIABLE not in message:
        return f"{reason}{at}; {remedy}"
    if reason.startswith("Regex is empty"):
        reason = "no text has all that it asks for"
    return f"{UNSATISFIABLE}{at}: {reason}; {remedy}"


def _patterns(given: Mapping[str, Any]) -> str:
    """The patterns of a schema itself, for messages."""
    patterns = [given["pattern"]] if "pattern" in given else [*given.get("patternProperties", ())]
    return f" ({', '.join(map(reprlib.repr, patterns[:3]))})" if patterns else ""


def _of_schemas(grammar: str, message: str, ask: Callable[[str], str | None]) -> str:
    """Why a grammar is refused for one of its schemas."""
    for part in parts(grammar):
        if part.kind == "schema" and isinstance(part.value, Mapping):
            schema = json.dumps(part.value)
            if refused := ask(followed(schema)):
                line = grammar.count("\n", 0, part.begin) + 1
                found = refused_part(schema, refused, _kind_of, ask)
                return _of_part(found, f" of the schema in line {line}")
    return f"{shortened(message)}; correct the schema"


def _of_line(grammar: str, line: str | None, column: str | None, message: str) -> str:
    """An error of the library's in the notation of a grammar."""
    if line is None or column is None:
        return f"{message}; correct it"
    where = f"line {line}, column {column}"
    if message == "lexer error":
        text = grammar.split("\n")[int(line) - 1][int(column) - 1 :]
        remedy = "put texts in double quotes, and expressions between slashes"
        return f"{where}: {reprlib.repr(text)} cannot be read; {remedy}"
    remedy = (
        "define it, or correct the name" if message.startswith("unknown name") else "correct it"
    )
    return f"{where}: {message}; {remedy}"

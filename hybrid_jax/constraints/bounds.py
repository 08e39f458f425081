"""How large a form may be: sizes, depths, counts and numbers, looked at before native code reads it.

llguidance limits some of what it makes from a form, but little of what it reads. An integer at the edge of 64 bits, or
some thousand references one after another, end the process by a signal. So each form is measured here first, in plain
Python and without recursion. What is within the bounds can still cost too much: `trial.py` finds that out.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from hybrid_jax.config.structured_outputs import StructuredOutputsParams
from hybrid_jax.constraints.lark import parts
from hybrid_jax.constraints.schemas.references import places, pointer_of

LARGEST = 1 << 63  # numbers must be below this in size: the library counts in 64 bits
COUNTS = (
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
# Notes for people, which may hold any number. They are read only where a reference leads into them.
NOTES = ("default", "examples", "title", "description", "$comment")
# Below these a schema has names of its own, each with a schema.
NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
UNUSED = ("$defs", "definitions")
DATA = ("const", "enum")  # values, not schemas
# The patterns below take time in proportion to the text: a run that cannot match is not tried in parts again (`*+`).
COUNT_IN_BRACES = re.compile(r"\{\s*+(\d++)\s*+(?:,\s*+(\d*+)\s*+)?\}")
ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]{0,100}\}|.?)", re.S)
CLASS = re.compile(
    r"\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)", re.S
)  # a "]" at its beginning is a letter


# What helps a form that is too large.
SHORTEN, FEWER, NEST_LESS = "shorten it", "leave some out", "nest less"
LESS_CHAINED = "write some of them out in place of the reference"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The largest form that may be compiled.

    Attributes:
        schema_chars: characters of a schema, as JSON.
        text_chars: characters of a regular expression, of all expressions in a schema together, or of a grammar.
        choices: texts of a choice, and values of an `enum`.
        choice_chars: characters of all texts of a choice together.
        depth: of values in a schema, and of brackets in an expression or a grammar.
        count: of `maxItems` and its like, of the numbers in `{1,20}`, and of the digits of `multipleOf` as an integer.
        repeats: of what stands inside several counts, one within the other: their product.
        chain: references of a schema, or rules of a grammar, each of which names the next.
    """

    schema_chars: int = 1 << 20
    text_chars: int = 1 << 18
    choices: int = 100_000
    choice_chars: int = 1 << 21
    depth: int = 120
    count: int = 100_000
    repeats: int = 10_000_000
    chain: int = 200


TRIED = Bounds()  # for forms that another process tries first
# For forms that nobody tries: far below all that ever ended a process.
UNTRIED = Bounds(
    schema_chars=1 << 17,
    text_chars=1 << 14,
    choices=10_000,
    choice_chars=1 << 18,
    depth=50,
    count=10_000,
    repeats=10_000,
    chain=50,
)


class TooLarge(ValueError):
    """A form exceeds a bound. The message names the part, its value, the limit and what to do.

    Args:
        what: the part, its value and the limit.
        remedy: what to do; "" if `what` says it.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what, self.remedy = what, remedy


def check_bounds(wanted: StructuredOutputsParams, bounds: Bounds) -> None:
    """Measures a form. Does not check whether it is correct.

    Raises:
        TooLarge: it exceeds a bound.
        ValueError: something that must be JSON is not.

    Example:
        >>> check_bounds(StructuredOutputsParams(regex="a{1,20}"), TRIED)
        >>> check_bounds(StructuredOutputsParams(json={"maxItems": 2147483647}), TRIED)
        Traceback (most recent call last):
        hybrid_jax.constraints.bounds.TooLarge: maxItems is 2147483647, the limit is 100000; lower it
    """
    CHECKS[wanted.kind](wanted.value, bounds)


def _check_json(text: str, bounds: Bounds) -> None:
    _at_most("the length of the schema", len(text), bounds.schema_chars, SHORTEN)
    check_schema(json.loads(text), bounds)


def _check_expression(text: str, bounds: Bounds) -> None:
    _at_most("the length of the expression", len(text), bounds.text_chars, SHORTEN)
    check_regex("the expression", text, bounds)


def _check_choice(texts: tuple[str, ...], bounds: Bounds) -> None:
    _at_most("the number of choices", len(texts), bounds.choices, FEWER)
    _at_most("the length of all choices", sum(map(len, texts)), bounds.choice_chars, SHORTEN)


def _check_grammar(text: str, bounds: Bounds) -> None:
    _at_most("the length of the grammar", len(text), bounds.text_chars, SHORTEN)
    check_lark(text, bounds)


# What each kind of form is measured by, from its value.
CHECKS: dict[str, Callable[[Any, Bounds], None]] = {
    "json": _check_json,
    "regex": _check_expression,
    "choice": _check_choice,
    "grammar": _check_grammar,
    "json_object": lambda value, bounds: None,
}


def _at_most(what: str, value: float, limit: int, remedy: str = "lower it") -> None:
    if value > limit:
        raise TooLarge(f"{what} is {reprlib.repr(value)}, the limit is {limit}", remedy)


# --- JSON schemas ---------------------------------------------------------------------------------


def check_schema(schema: Any, bounds: Bounds) -> None:
    """As `check_bounds`, for a schema as JSON data of any kind.

    It follows references as the library does: each place is read once, when it is first reached. Then it looks for
    the longest chain of references, from wherever they are reached.
    """
    _check_depth(schema, bounds.depth)
    seen, num_chars = set(), 0
    # Of each place that the schema itself leads to: what is below, and the reference on the way, if there is one.
    links: dict[tuple[int, str], list[tuple[tuple[int, str], str | None]]] = {}
    # value, the keyword it belongs to, what it is ("schema", "names" or "data"), references on the way to it
    waiting: list[tuple[Any, str, str, int]] = [(schema, "the schema", "schema", 0)]
    unused: list[
        tuple[Any, str, str, int]
    ] = []  # what the library reads where a reference leads to it, or not at all
    while waiting or unused:
        is_used = bool(waiting)
        value, keyword, kind, num_references = (waiting or unused).pop()
        if _is_number(value):
            _check_number(keyword, value)
        if not isinstance(value, dict | list) or (id(value), kind) in seen:
            continue
        seen.add((id(value), kind))
        below = []
        reference = None
        if isinstance(value, list) or kind != "schema":
            parts = value if isinstance(value, list) else list(value.values())
            part_kind = "data" if kind == "data" else "schema"
            below = [(part, keyword, part_kind, num_references) for part in parts]
        else:
            for name, part in value.items():
                _check_keyword(name, part, bounds)
                for what, expression in _expressions(name, part):
                    num_chars += len(expression)
                    _at_most(
                        f"the length of all expressions up to {what}",
                        num_chars,
                        bounds.text_chars,
                        SHORTEN,
                    )
                    check_regex(what, expression, bounds)
                entry = (part, name, _kind_below(name), num_references)
                if name == "$ref" and isinstance(part, str):
                    if num_references == bounds.chain:
                        raise TooLarge(
                            f"$ref {reprlib.repr(part)} comes after {num_references} references, each "
                            "of which leads to the next; that is the limit",
                            LESS_CHAINED,
                        )
                    target = _resolved(schema, part)
                    below.append((target, "$ref", "schema", num_references + 1))
                    reference = part
                elif name in UNUSED:
                    unused.append(entry)
                elif name not in NOTES:
                    below.append(entry)
        waiting += reversed(below)
        if is_used:
            links[id(value), kind] = [
                ((id(part), what), reference if name == "$ref" else None)
                for part, name, what, _ in below
                if isinstance(part, dict | list)
            ]
    _check_chains(links, (id(schema), "schema"), bounds.chain)


def _check_chains(
    links: Mapping[tuple[int, str], list[tuple[tuple[int, str], str | None]]],
    root: tuple[int, str],
    limit: int,
) -> None:
    """TooLarge if a chain of references is longer than a limit. A reference that comes back to its own chain ends it.

    Args:
        links: for each place, what is below and the reference on the way. root: where to begin.
    """
    chains: dict[
        tuple[int, str], int
    ] = {}  # the longest one from each place; 0 while it is looked at
    path = [(root, iter(links.get(root, ())))]
    while path:
        place, rest = path[-1]
        for below, _ in rest:
            if below in links and below not in chains:
                chains[below] = 0
                path.append((below, iter(links[below])))
                break
        else:
            path.pop()
            for below, reference in links.get(place, ()):
                length = chains.get(below, 0) + (reference is not None)
                if length > limit:
                    raise TooLarge(
                        f"$ref {reprlib.repr(reference)} comes before {limit} references, each of which leads to the "
                        "next; that is the limit",
                        LESS_CHAINED,
                    )
                chains[place] = max(chains.get(place, 0), length)


def _check_depth(value: Any, limit: int) -> None:
    """Goes through a value level by level."""
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        _at_most("the depth of the schema", depth, limit, NEST_LESS)
        parts = (
            part for node in level for part in (node.values() if isinstance(node, dict) else node)
        )
        level = [part for part in parts if isinstance(part, dict | list)]
        depth += 1


def _kind_below(name: str) -> str:
    """What stands under a keyword. Under one that is unknown there may be schemas to which references lead."""
    if name in NAMES:
        return "names"
    return "data" if name in DATA else "schema"


def _resolved(schema: Any, reference: str) -> Any:
    """The place in a schema to which a reference leads; None if that is no place in it."""
    pointer = pointer_of(reference, schema)
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    try:
        *_, place = places(schema, pointer)
    except LookupError:
        return None
    return place


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_number(keyword: str, value: float) -> None:
    # The library reads some integers as floats. Those just below 2**63 become 2**63 then.
    if abs(value) >= LARGEST or float(abs(value)) >= LARGEST:
        what = f"{keyword} has {reprlib.repr(value)}, numbers must be below 2**63 in size"
        raise TooLarge(what, "write a smaller one")


def _check_keyword(name: str, value: Any, bounds: Bounds) -> None:
    """Looks at what a keyword counts or lists."""
    if name in COUNTS and _is_number(value):
        _at_most(name, value, bounds.count)
    elif name == "multipleOf" and _is_number(value):
        _check_number(name, value)
        # The library follows the remainders of the digits: 0.25 is 25 to it.
        _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
        whole = abs(int(value)) if int(exponent) >= 0 else int("".join(map(str, digits)))
        if whole > bounds.count:
            raise TooLarge(
                f"{name} is {value!r}, without its point {whole}, the limit is {bounds.count}",
                "write fewer digits",
            )
    elif name == "enum" and isinstance(value, list):
        _at_most("the number of values of an enum", len(value), bounds.choices, FEWER)


def _expressions(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The regular expressions of a keyword, each with its name in messages."""
    if name == "pattern" and isinstance(value, str):
        yield name, value
    elif name == "patternProperties" and isinstance(value, dict):
        yield from ((name, pattern) for pattern in value)
    elif name == "x-guidance" and isinstance(value, dict):
        for option, text in value.items():
            if isinstance(text, str):
                yield f"x-guidance.{option}", text


# --- regular expressions and grammars ---------------------------------------------------------------


def check_regex(what: str, text: str, bounds: Bounds) -> None:
    """As `check_bounds`, for a regular expression. `what` is its name in messages.

    Example:
        >>> check_regex("pattern", "a{1,9}", Bounds(count=5))
        Traceback (most recent call last):
        hybrid_jax.constraints.bounds.TooLarge: pattern: the count in '{1,9}' is 9, the limit is 5; lower it
    """
    # The most repeats so far of anything inside each open bracket, and those of what was read last.
    most, last, position = [1], 1, 0
    while position < len(text):
        letter = text[position]
        counted = COUNT_IN_BRACES.match(text, position) if letter == "{" else None
        if counted is not None:
            last *= max(1, _count(what, counted, counted.groups(), bounds))
            _at_most(
                f"{what}: the product of counts within counts", last, bounds.repeats, "lower them"
            )
        elif letter == "(":
            most.append(1)
            _at_most(f"{what}: the depth of brackets", len(most) - 1, bounds.depth, NEST_LESS)
        else:
            last = most.pop() if letter == ")" and len(most) > 1 else 1
        most[-1] = max(most[-1], last)
        position = _after(text, position) if counted is None else counted.end()


def _after(text: str, position: int) -> int:
    """Where a letter, an escape or a class of letters ends."""
    pattern = {"\\": ESCAPE, "[": CLASS}.get(text[position])
    found = pattern.match(text, position) if pattern else None
    return found.end() if found else position + 1


def _count(what: str, found: re.Match, numbers: Iterable[str | None], bounds: Bounds) -> int:
    """The larger one of two numbers in braces, of which any may be missing."""
    count = max(_digits(number) for number in numbers if number)
    _at_most(f"{what}: the count in {reprlib.repr(found[0])}", count, bounds.count)
    return count


def _digits(number: str) -> int:
    """A number of any length, or one that is too large as well: Python reads no more than 4300 digits."""
    return int(number.lstrip("0")[:20] or 0)


def check_lark(text: str, bounds: Bounds) -> None:
    """As `check_bounds`, for a grammar, with the expressions and schemas in it. ValueError if a schema is not JSON."""
    uses: dict[str, list[str]] = {}  # by rule
    current: list[str] = []
    line: list[str] = []  # names on this line so far, and on those before it if a bracket is open
    depth, counts = 0, False  # whether a number counts: in braces, and behind `~`
    for part in parts(text):
        if part.kind == "name":
            line.append(part.text)
            counts = False
        elif (
            part.kind == "colon" and part.text == ":" and line
        ):  # the line began with a rule and what it is given
            current, line, depth, counts = uses.setdefault(line[0], []), [], 0, False
        elif part.kind == "line" and not depth:
            current += line
            line = []
        elif part.kind == "number" and counts:
            _at_most("the grammar: a count", _digits(part.text), bounds.count)
        elif part.kind == "bracket":
            counts = part.text in ("{", "~") or (counts and part.text == "..")
            depth = max(0, depth + (part.text in "([") - (part.text in ")]"))
            _at_most("the depth of brackets", depth, bounds.depth, NEST_LESS)
        elif part.kind == "expression":
            check_regex("an expression", part.text, bounds)
        elif part.kind == "schema":
            check_schema(part.value, bounds)
    current += line
    _check_rules(uses, bounds.chain)


def _check_rules(uses: Mapping[str, list[str]], limit: int) -> None:
    """Follows the rules from `start` as the library does: each is read once, where it is first used."""
    seen: set[str] = set()
    waiting = [("start", 0)]
    while waiting:
        name, chain = waiting.pop()
        if name in seen or name not in uses:
            continue
        seen.add(name)
        if chain > limit:
            raise TooLarge(
                f"rule {reprlib.repr(name)} comes after {limit} rules, each of which uses the next; that "
                "is the limit",
                "write some of them out where they are used",
            )
        waiting += [(used, chain + 1) for used in reversed(uses[name])]

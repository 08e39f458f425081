"""A JSON schema, written again so that llguidance follows all of it, or refused.

llguidance (1.9.1) silently ignores or misreads some of what a schema may say. Here each keyword is known to be
followed, is rewritten into a form that is followed, changes nothing, or is refused with its name, value and place. A
keyword that no draft of JSON Schema has is ignored, as by every validator.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import reprlib
import warnings
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from hybrid_jax.constraints.matches import few_texts, finds
from hybrid_jax.constraints.patterns import WIDE_END, NotPortable, portable
from hybrid_jax.constraints.schemas.definitions import MOST_LOOKS, TYPES, Facts
from hybrid_jax.constraints.schemas.optional_properties import too_many_optional
from hybrid_jax.constraints.schemas.references import places, pointer_of
from hybrid_jax.constraints.schemas.texts import (
    CONTROLS,
    ESCAPES,
    FORMATS,
    LETTERS,
    LONGEST_HOSTNAME,
    OWN_FORMATS,
    is_unusual,
    without,
)

# Between the tokens of JSON: a space, or a line end and some indentation. With unlimited white space, small models may
# write nothing else. There is none before the first token or after the last one.
WHITESPACE = r" |\r?\n[ \t]{0,20}"
MAX_DEPTH = 100  # levels of schemas in schemas; llguidance reads 128 levels of JSON
EXACT = 2**53  # up to here, 64-bit floats have every integer
MAX_MULTIPLES = 10**6  # llguidance 1.9.1 counts multiples in 32 bits, and takes forever for 2**31
DRAFTS = {
    "json-schema.org/draft/2020-12/schema": 2020,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-04/schema": 4,
}
# Keywords that say nothing about which values are valid, or that are read where they are needed.
_SILENT = frozenset(
    "$schema $id id $anchor $dynamicAnchor $recursiveAnchor $vocabulary $comment $defs definitions title description "
    "default examples deprecated readOnly writeOnly contentEncoding contentMediaType contentSchema x-guidance".split()
)
# Keywords that not every draft has. In the others, validators take them for notes.
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$recursiveRef"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ARRAYS = ("items", "prefixItems", "additionalItems")
# Keywords that llguidance does not know, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
MANY, LONG = (
    1000,
    200,
)  # names, and characters of a name, up to which patterns are looked at for what they leave
SHORT = 8
# Names of many kinds. Patterns that have them all have every name.
_SHORT_NAMES = (
    "",
    "\n",
    "\t",
    "\u00e9",
    "\u6f22",
    "\U0001f600",
    *map(chr, range(32, 127)),
    "aB3 _-\u00e9\n",
)

_BLANK = r"(?:[ \t\r\n]|\\[trn]|\\x(?:20|0[9aAdD]))"
_SOME_BLANKS = rf"(?:(?:{_BLANK}|\[{_BLANK}+\])(?:\?|\{{\d{{1,2}}(?:,\d{{1,2}})?\}})?)"
# What "x-guidance" may hold: only what keeps the text a JSON text of the schema.
_OPTIONS: dict[str, re.Pattern[str]] = {
    "whitespace_pattern": re.compile(rf"{_SOME_BLANKS}*(?:\|{_SOME_BLANKS}*)*"),
    "item_separator": re.compile(f"{_SOME_BLANKS}*,{_SOME_BLANKS}*"),
    "key_separator": re.compile(f"{_SOME_BLANKS}*:{_SOME_BLANKS}*"),
    "json_allowed_escapes": re.compile(r'[nrbtfu]*(?:\\[nrbtfu]*"|"[nrbtfu]*\\)[nrbtfu]*'),
}


class Place(NamedTuple):
    """Where a written schema comes from.

    Attributes:
        path: a JSON pointer.
        given: the schema there.
    """

    path: str
    given: Mapping[str, Any]

    @property
    def keywords(self) -> list[str]:
        """The keywords there that say which values are valid."""
        return [name for name in self.given if name in _LIMITING]


def followed(schema: str) -> str:
    """Writes a JSON schema so that llguidance gives only valid values.

    Args:
        schema: the schema as JSON text, an object.

    Returns:
        a schema of draft 2020-12 with the same valid values, as JSON text.

    Raises:
        ValueError: a keyword cannot be followed; the message has its name, value and place.

    Example:
        >>> followed('{"$ref": "#/$defs/a", "$defs": {"a": {"title": "A", "const": 1.0}}}')  # doctest: +ELLIPSIS
        '{"$ref": "#/$defs/0", "$defs": {"0": {"const": 1}}, "x-guidance": {"whitespace_pattern": ...}}'
    """
    return json.dumps(written(schema)[0], ensure_ascii=False)


def written(schema: str) -> tuple[dict[str, Any], dict[int, Place]]:
    """As `followed`, as data, and the places from which its schemas come, by their ids."""
    try:
        root = json.loads(schema)
        walk = _Walk(root)
        whole = walk.write()
        if walk.named is not None:
            walk = _Walk(root, named=walk.named)
            whole = walk.write()
        return whole, walk.places
    except RecursionError:
        raise ValueError(
            "recursion limit exceeded: the schema is nested too deeply; nest less"
        ) from None


def _refuse(keyword: str, value: Any, path: str, why: str) -> ValueError:
    return ValueError(f"{keyword} {reprlib.repr(value)} at {_short(path)} {why}")


def _short(path: str) -> str:
    return path if len(path) <= 60 else f"{path[:20]}...{path[-37:]}"


def _below(path: str, *keys: object) -> str:
    """A JSON pointer to what stands below a place, shortened like that of the place."""
    names = (str(key).replace("~", "~0").replace("/", "~1") for key in keys)
    return _short("/".join([path, *names]))


class _Walk:
    """One schema on its way to llguidance.

    Args:
        root: the whole schema.
        named: as the attribute, from a walk before. Then every text has one spelling.

    Attributes:
        draft: 4, 6, 7, 2019 or 2020.
        named: the place of an object with names, beside which others may come that must not be spellings of them;
            None if there is none, or if texts have one spelling.
        unwritten: characters that no text can have.
        plain: patterns of names by how they are written for llguidance, where that differs.
        places: where each written schema comes from, by its id.
    """

    def __init__(self, root: Mapping[str, Any], *, named: str | None = None) -> None:
        self._root = root
        self.draft = self._find_draft()
        self._options = self._find_options()
        self.named: str | None = None
        escapes = self._options.get("json_allowed_escapes", ESCAPES)
        self._why = "an escape that x-guidance json_allowed_escapes leaves out"
        if named is not None and "u" in escapes:
            self._why = f"\\u, which could also spell the names at {named} in another way"
            escapes = escapes.replace("u", "")
            self._options["json_allowed_escapes"] = escapes
        self._spells = "u" in escapes
        known = {char for char, letter in LETTERS.items() if letter in escapes}
        self.unwritten = frozenset() if self._spells else CONTROLS - known
        self._names: dict[str, str] = {}  # of what references point at
        self._written: dict[str, Any] = {}  # definitions by name
        self.plain: dict[str, str] = {}
        self.places: dict[int, Place] = {}
        self._numbers = itertools.count()
        self._waiting: list[tuple[str, Any, str]] = []
        self._nested_id: str | None = None
        self._multiples: dict[Fraction, tuple[Any, str]] = {}
        self._looks = MOST_LOOKS

    def write(self) -> dict[str, Any]:
        whole = self.schema(self._root, "#", 0)
        while self._waiting:
            name, schema, path = self._waiting.pop()
            self._written[name] = self.schema(schema, path, 0)
        if self._names and self._nested_id:
            raise ValueError(
                f"an $id at {_short(self._nested_id)} beside $ref is not supported; leave it out"
            )
        self._check_multiples()
        self._check_ends()
        self._check_optional(whole)
        if self._written:
            whole["$defs"] = dict(sorted(self._written.items(), key=lambda item: int(item[0])))
        root = whole | {"x-guidance": self._options}
        self.places[id(root)] = Place("#", self._root)
        return root

    def _find_draft(self) -> int:
        named = self._root.get("$schema")
        if named is None:
            return 2020
        draft = DRAFTS.get(named.rstrip("#").split("://")[-1]) if isinstance(named, str) else None
        if draft is None:
            raise _refuse(
                "$schema",
                named,
                "#",
                "is not the address of a draft from 4 to 2020-12; leave it out",
            )
        return draft

    def _find_options(self) -> dict[str, Any]:
        """What the schema says under "x-guidance", with our own bound on white space."""
        given = self._root.get("x-guidance", {})
        if not isinstance(given, Mapping):
            raise _refuse("x-guidance", given, "#", "is not an object; leave it out")
        options: dict[str, Any] = {}
        for name, value in given.items():
            if name == "whitespace_flexible" and isinstance(value, bool):
                options[name] = value
                continue
            pattern = _OPTIONS.get(name)
            if pattern is None or not isinstance(value, str) or not pattern.fullmatch(value):
                raise _refuse(
                    f"x-guidance {name}",
                    value,
                    "#",
                    "would let the text be no bounded JSON; leave it out",
                )
            options[name] = value
        if options.get("whitespace_flexible", True) and "whitespace_pattern" not in options:
            options["whitespace_pattern"] = WHITESPACE
        return options

    def schema(self, schema: Any, path: str, depth: int) -> Any:
        """A part of the schema as llguidance gets it."""
        if depth > MAX_DEPTH:
            raise ValueError(
                f"recursion limit exceeded: schemas in more than {MAX_DEPTH} schemas; put inner ones into $defs and "
                "refer to them"
            )
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValueError(
                f"{reprlib.repr(schema)} at {_short(path)} is not a schema; write an object or true"
            )
        written = _One(self, schema, path, depth).write()
        self.places[id(written)] = Place(path, schema)
        return written

    def reference(self, target: Any, path: str) -> str:
        """The new name of what a reference points at, which is written later."""
        if not isinstance(target, str):
            raise _refuse("$ref", target, path, "is not text; write a pointer such as #/$defs/NAME")
        pointer = pointer_of(target, self._root, ["id" if self.draft == 4 else "$id"])
        if pointer not in self._names:
            found = self._find(pointer, target, path)
            self._names[pointer] = str(next(self._numbers))
            self._waiting.append((self._names[pointer], found, pointer))
        return self._names[pointer]

    def define(self, written: Any) -> str:
        """The name of a new definition, a written schema."""
        name = str(next(self._numbers))
        self._written[name] = written
        return name

    def _find(self, pointer: str, target: str, path: str) -> Any:
        """What a JSON pointer in a fragment points at."""
        if pointer != "#" and not pointer.startswith("#/"):
            why = "is not in this schema; copy it here and write #/$defs/NAME"
            raise _refuse("$ref", target, path, why)
        try:
            *through, found = places(self._root, pointer)
        except LookupError:
            why = f"is nowhere: Pointer '{pointer[1:]}' does not exist; point to a place of this schema"
            raise _refuse("$ref", target, path, why) from None
        for place in through[1:]:
            if isinstance(place, Mapping):
                self.note_nested(place, pointer)
        return found

    def note_nested(self, schema: Mapping[str, Any], path: str) -> None:
        """Notes what changes the meaning of references and keywords below the root."""
        named = schema.get("$schema")
        if isinstance(named, str) and named != self._root.get("$schema"):
            raise _refuse(
                "$schema", named, path, "differs from that of the whole schema; leave it out"
            )
        key = "id" if self.draft == 4 else "$id"
        if isinstance(schema.get(key), str) and not schema[key].startswith("#"):
            self._nested_id = self._nested_id or path

    def note_names(self, path: str) -> None:
        """Notes that a name must have one spelling."""
        if self._spells and self.named is None:
            self.named = path

    def finds(self, pattern: str, name: str) -> bool | None:
        """As `matches.finds`, and None past a limit of time for the whole schema."""
        self._looks -= len(pattern) * (1 + len(name))
        return finds(pattern, name) if self._looks > 0 else None

    def check_written(self, keyword: str, value: Any, text: str, path: str) -> None:
        if not self.unwritten.isdisjoint(text):
            raise _refuse(
                keyword,
                value,
                path,
                f"has a control character that needs {self._why}; leave the character out",
            )

    def note_multiple(self, multiple: Fraction, value: Any, path: str) -> None:
        self._multiples.setdefault(multiple, (value, path))

    def _check_multiples(self) -> None:
        """Several schemas may hold for one value, and llguidance multiplies their `multipleOf`."""
        scale = max((_decimal_scale(multiple) for multiple in self._multiples), default=1)
        product = 1
        for multiple, (value, path) in self._multiples.items():
            product *= int(multiple * scale)
            if product > MAX_MULTIPLES:
                why = f"is not supported: the product of all here is above {MAX_MULTIPLES:,}; write smaller ones"
                raise _refuse("multipleOf", value, path, why)

    def _check_optional(self, whole: Mapping[str, Any]) -> None:
        found = too_many_optional(whole, self._written)
        if found is not None:
            place = _short(self.places[id(found[0])].path)
            raise ValueError(
                f"properties at {place} has {found[1]} in a row that may be left out, the limit is {found[2]}; "
                "list some of them as required, or put groups of them into objects"
            )

    def _check_ends(self) -> None:
        """ValueError if a reference leads to itself, or if a value could never end, such as a child in every child."""
        for what, rule in (
            ("leads to itself; give its target a type, or properties", Facts.at_same_place),
            (
                "describes values that never end; let what it repeats be left out, or be null",
                Facts.can_end,
            ),
        ):
            facts = Facts(self._written, self.plain)
            for name, schema in self._written.items():
                facts.set_definition(name, rule(facts, schema))
            facts.conclude()
            for pointer, name in self._names.items():
                if not facts.holds_for(name):
                    raise ValueError(f"$ref {_short(pointer)} {what}")


def _decimal_scale(number: Fraction) -> int:
    """The power of ten that makes an integer of a number with finitely many decimals."""
    scale = 1
    while (number * scale).denominator > 1:
        scale *= 10
    return scale


def _heard(schema: Mapping[str, Any], draft: int) -> Mapping[str, Any]:
    """What a draft reads of a schema: before 2019-09, $ref alone; and only its own keywords."""
    if draft < 2019 and "$ref" in schema:
        return {"$ref": schema["$ref"]}
    return {name: value for name, value in schema.items() if _SINCE.get(name, 0) <= draft}


class _One:
    """One schema object.

    Args:
        walk: of the whole.
        schema: the object.
        path: a JSON pointer to it, for messages.
        depth: how many schemas it is in.
    """

    def __init__(self, walk: _Walk, schema: Mapping[str, Any], path: str, depth: int) -> None:
        self._walk, self._path, self._depth = walk, path, depth
        if path != "#":
            walk.note_nested(schema, path)
        self._given = _heard(schema, walk.draft)
        self._out: dict[str, Any] = {}
        self._patterns: list[str] = []  # of texts
        # Patterns that no names have but these, which are known.
        self._spent: dict[str, Set[str]] = {}

    def write(self) -> dict[str, Any]:
        """The schema as llguidance gets it. The order of keywords stays, since it is that of the properties."""
        self._note_names()
        for keyword, value in self._given.items():
            self._keyword(keyword, value)
        self._settle_names()
        if self._patterns:
            first, *others = self._patterns
            self._out["pattern"] = first
            if others:
                both = self._out.get("allOf", []) + [{"pattern": other} for other in others]
                self._out["allOf"] = both
        return self._out

    def _keyword(self, keyword: str, value: Any) -> None:
        if keyword in _SILENT:
            return
        if keyword in _UNSUPPORTED:
            self._unsupported(keyword, value)
        elif keyword in _COUNTS:
            self._out[keyword] = self._count(keyword, value)
        elif keyword in _BOUNDS:
            self._bound(keyword, value)
        elif keyword in _ARRAYS:
            self._items()
        elif keyword in ("allOf", "anyOf", "oneOf"):
            schemas = self._list(keyword, value)
            self._out[keyword] = [self._sub(s, keyword, n) for n, s in enumerate(schemas)]
        elif keyword in _OTHERS:
            getattr(self, "_" + keyword.removeprefix("$"))(value)

    def _refuse(self, keyword: str, why: str) -> ValueError:
        return _refuse(keyword, self._given[keyword], self._path, why)

    def _sub(self, schema: Any, *keys: object) -> Any:
        return self._walk.schema(schema, _below(self._path, *keys), self._depth + 1)

    def _list(self, keyword: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._refuse(
                keyword,
                "is not a list with at least one entry; write one, or leave the keyword out",
            )
        return value

    def _object(self, keyword: str) -> Mapping[str, Any]:
        value = self._given.get(keyword, {})
        if not isinstance(value, Mapping):
            raise self._refuse(keyword, "is not an object; write one, or leave the keyword out")
        return value

    def _types(self) -> list[str]:
        given = self._given.get("type", list(TYPES))
        types = [given] if isinstance(given, str) else given
        if not isinstance(types, list) or not types or not all(kind in TYPES for kind in types):
            raise self._refuse("type", f"is not a type; types are {', '.join(TYPES)}")
        return types

    def _names(self) -> list[str]:
        """The names in `required`."""
        names = self._given.get("required", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._refuse("required", "is not a list of names; write one, such as ['a']")
        return list(dict.fromkeys(names))

    def _note_names(self) -> None:
        """Has names spelled in one way where a name beside those given could be another spelling of one of them."""
        names = [*self._object("properties"), *self._names()]
        patterns = self._object("patternProperties")
        others = self._given.get("additionalProperties") is not False
        if (others and (names or patterns)) or (
            patterns and not CONTROLS.isdisjoint("".join(names))
        ):
            self._walk.note_names(self._path)

    def _unsupported(self, keyword: str, value: Any) -> None:
        if keyword == "if" and not {"then", "else"} & set(self._given):
            return
        if any(value is nothing or (value == nothing == {}) for nothing in _UNSUPPORTED[keyword]):
            return
        raise self._refuse(
            keyword, "is not supported; leave it out, and check the values of the answers for it"
        )

    def _count(self, keyword: str, value: Any) -> int:
        whole = (
            isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
        )
        if not whole or value < 0:
            raise self._refuse(keyword, "is not a count; write a whole number of at least 0")
        if keyword == "minProperties":
            if value - len(self._names()) > 1:
                # llguidance 1.9.1 does not see that a name comes twice, and a reader keeps one of them.
                raise self._refuse(
                    keyword, "is not supported: a name could come twice; list them as required"
                )
        if keyword == "maxLength":
            value = min(value, self._out.get(keyword, value))
        return int(value)

    def _bound(self, keyword: str, value: Any) -> None:
        """Writes a bound as `minimum` or `maximum`."""
        plain = keyword.removeprefix("exclusive").lower()
        if self._walk.draft == 4 and keyword != plain and not isinstance(value, bool):
            raise self._refuse(
                keyword, f"is not true or false beside {plain}, as draft 4 has it; write true"
            )
        if isinstance(value, bool) and keyword != plain:  # as in draft 4
            if plain not in self._given:
                raise self._refuse(
                    keyword, f"needs {plain} beside it; add it, or write a number here"
                )
            if not value:
                return
            keyword, value = plain, self._given[plain]
            number = self._inside(plain, self._number(plain, value))
        elif keyword == plain:
            number = self._number(keyword, value)
        else:
            number = self._inside(plain, self._number(keyword, value))
        tighter = max if plain == "minimum" else min
        self._out[plain] = tighter(number, self._out.get(plain, number))

    def _inside(self, plain: str, bound: int | float) -> int | float:
        """The first number inside a bound that the bound leaves out.

        llguidance 1.9.1 allows 5 where more than 5 and at most 5.5 is required. And it compares all digits of a
        number, while most readers keep 16 or 17 of them: to them, 5.00000000000000000001 is 5.
        """
        sign = 1 if plain == "minimum" else -1
        if "number" not in self._types():
            whole = math.floor(bound * sign) + 1
            if whole > EXACT:
                raise self._refuse(
                    "exclusive" + plain.capitalize(),
                    "is too large; write a number of at most 2**53",
                )
            return whole * sign
        exact = Decimal(repr(bound)) * sign
        for digits in (16, 15):
            # llguidance 1.9.1 reads up to 22 decimals right.
            unit = Decimal(1).scaleb(max((exact or Decimal("1e-30")).adjusted() + 1 - digits, -22))
            steps = int(exact // unit) if exact >= 0 else -int(-exact // unit) - 1
            for more in (1, 2, 3):
                number = float((steps + more) * unit)
                if number > bound * sign and abs(steps + more) <= EXACT:
                    return number * sign
        raise self._refuse(
            "exclusive" + plain.capitalize(),
            "has too many digits to be exact; write at most 15",
        )

    def _number(self, keyword: str, value: Any) -> int | float:
        """A number that llguidance keeps as it is."""
        constant = keyword in ("const", "enum")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refuse(keyword, "is not a number; write one")
        if isinstance(value, int):
            # llguidance 1.9.1 reads integers as 64-bit floats.
            most = 2**63 - 1 if constant else EXACT
            if abs(value) > most or int(float(value)) != value:
                raise self._refuse(
                    keyword,
                    f"holds {value}, which no 64-bit float has exactly; write text",
                )
            return value
        if value == int(value) and abs(value) <= EXACT:
            return int(value)  # also -0.0
        digits = Decimal(repr(value)).as_tuple()
        coefficient = int("".join(map(str, digits.digits)))
        # llguidance 1.9.1 reads numbers with more digits as a neighbour.
        if value == int(value) or coefficient > EXACT or abs(int(digits.exponent)) > 22:
            raise self._refuse(
                keyword, f"holds {value}, which has too many digits to be exact; write at most 15"
            )
        return value

    def _multipleOf(self, value: Any) -> None:
        number = self._number("multipleOf", value)
        multiple = Fraction(number)
        if multiple <= 0:
            raise self._refuse("multipleOf", "is not above 0; write a number that is")
        both = multiple.numerator * multiple.denominator
        if isinstance(value, float) and both & (both - 1):  # no power of two
            # To validators, which divide 64-bit floats, 0.29 is no multiple of 0.01, and 9007199254740993 none of 3.0.
            why = (
                "is not supported: only integers, and 0.5, 0.25, 0.125 ... are exact; leave it out"
            )
            raise self._refuse("multipleOf", why)
        self._walk.note_multiple(multiple, value, self._path)
        self._out["multipleOf"] = number

    def _type(self, value: Any) -> None:
        self._out["type"] = self._types() if isinstance(value, list) else self._types()[0]

    def _const(self, value: Any) -> None:
        self._out["const"] = self._value("const", value)

    def _enum(self, value: Any) -> None:
        self._out["enum"] = [self._value("enum", v) for v in self._list("enum", value)]

    def _value(self, keyword: str, value: Any, depth: int = 0) -> Any:
        """A constant that llguidance writes as it is."""
        if depth > MAX_DEPTH:
            raise self._refuse(keyword, f"is nested in more than {MAX_DEPTH} levels; nest less")
        if isinstance(value, list):
            return [self._value(keyword, part, depth + 1) for part in value]
        if isinstance(value, Mapping):
            return {key: self._value(keyword, part, depth + 1) for key, part in value.items()}
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._number(keyword, value)
        if isinstance(value, str):
            self._walk.check_written(keyword, self._given[keyword], value, self._path)
        return value

    def _ref(self, value: Any) -> None:
        self._out["$ref"] = "#/$defs/" + self._walk.reference(value, self._path)

    def _properties(self, _: Any) -> None:
        schemas = self._object("properties")
        self._out["properties"] = {k: self._sub(s, "properties", k) for k, s in schemas.items()}

    def _required(self, _: Any) -> None:
        self._out["required"] = self._names()

    def _additionalProperties(self, value: Any) -> None:
        # llguidance 1.9.1 must see the patterns at the same time, so they come first.
        if "patternProperties" in self._given:
            self._patternProperties(None)
        self._out["additionalProperties"] = self._sub(value, "additionalProperties")

    def _patternProperties(self, _: Any) -> None:
        if "patternProperties" in self._out:
            return
        rest = self._given.get("additionalProperties", True)
        names = {*self._object("properties"), *self._names()}
        written: dict[str, Any] = {}
        for pattern, schema in self._object("patternProperties").items():
            narrow, wide = self._pattern_text(pattern), self._pattern_text(pattern, wide=True)
            if wide.replace(WIDE_END, "$") != narrow:
                # Names that only some validators match with the pattern: none, or as the pattern says.
                open_ended = rest is True or rest == {}
                if not (open_ended or rest is False) or any(is_unusual(name) for name in names):
                    raise ValueError(
                        f"the pattern {reprlib.repr(pattern)} at {_short(self._path)} is not the same for all "
                        "validators; write its characters out, as in [0-9]"
                    )
            if rest is False and wide != narrow:
                self._check_line_ends(pattern, narrow, wide, names)
            names_of = narrow if rest is False else wide
            few = self._all_known(names_of, names)
            if "\0" not in "".join(names):
                plain, names_of = names_of, without(names_of, frozenset())
                self._walk.plain[names_of] = plain
            if names_of in written:
                raise ValueError(
                    f"the pattern {reprlib.repr(pattern)} at {_short(self._path)} comes twice; join them with allOf"
                )
            written[names_of] = self._sub(schema, "patternProperties", pattern)
            if few is not None:
                self._spent[names_of] = few
        self._out["patternProperties"] = written

    def _check_line_ends(self, pattern: str, narrow: str, wide: str, names: Iterable[str]) -> None:
        """ValueError if a known name has a pattern only in Python, where `$` also stands before a last line end."""
        for name in names:
            if not name.endswith("\n") or self._walk.finds(narrow, name):
                continue
            if self._walk.finds(wide, name) is not False:
                raise ValueError(
                    f"the name {reprlib.repr(name)} at {_short(self._path)} ends in a line end, and validators differ "
                    f"in whether it has the pattern {reprlib.repr(pattern)}; leave out the line end, or write the "
                    "pattern without $"
                )

    def _all_known(self, pattern: str, names: Set[str]) -> Set[str] | None:
        """The names that a pattern has, if no other name that can be written has it."""
        longest, unwritten = min(LONG, max(map(len, names), default=0)), self._walk.unwritten
        few = few_texts(pattern, min(MANY, len(names)), longest, unwritten)
        if few is None or not few <= names:
            return None
        if all(unwritten.isdisjoint(name) for name in names):
            return few
        few = few_texts(pattern, MANY, longest + SHORT)
        if few is None:
            raise ValueError(
                f"the pattern {reprlib.repr(pattern)} at {_short(self._path)} leaves only names with control "
                "characters; write these as properties"
            )
        return few & names

    def _settle_names(self) -> None:
        """Leaves out patterns, and other names, of which no name is left.

        llguidance 1.9.1 does not see that none is left, and lets a comma come before it.
        """
        patterns = self._out.get("patternProperties", {})
        for pattern, names in self._spent.items():
            schema = patterns.pop(pattern)
            if len(names) > 1:
                schema = {"$ref": f"#/$defs/{self._walk.define(schema)}"}
            properties = self._out.setdefault("properties", {})
            for name in sorted(names):
                both = [properties[name], schema] if name in properties else [schema]
                properties[name] = schema if both == [schema] else {"allOf": both}
        if self._out.get("patternProperties") and self._is_all(self._object("patternProperties")):
            # Right behind the patterns: with allOf between them llguidance 1.9.1 takes no name at all.
            given, self._out = self._out, {}
            for key, value in given.items():
                if key != "additionalProperties":
                    self._out[key] = value
                if key == "patternProperties":
                    self._out["additionalProperties"] = False

    def _is_all(self, patterns: Iterable[str]) -> bool:
        """Whether every name has one of these patterns, as far as short names show."""
        others = set(self._names()) - set(self._out.get("properties", ()))
        if any(len(name) > SHORT for name in others):
            return False  # trying it could take forever
        left = {*_SHORT_NAMES, *others}
        for pattern in patterns:
            with warnings.catch_warnings(), suppress(re.error, OverflowError, RecursionError):
                warnings.simplefilter("ignore", FutureWarning)
                found = re.compile(pattern)
                left = {name for name in left if not found.search(name)}
        return not left

    def _pattern(self, value: Any) -> None:
        if not isinstance(value, str):
            raise self._refuse("pattern", "is not text; write a regular expression")
        self._patterns.append(without(self._pattern_text(value), self._walk.unwritten))
        self._out["pattern"] = ""  # keeps its place

    def _pattern_text(self, pattern: str, *, wide: bool = False) -> str:
        try:
            return portable(pattern, ecma=True, wide=wide)
        except NotPortable as error:
            at = _short(self._path)
            raise ValueError(
                f"the pattern {reprlib.repr(pattern)} at {at} is not supported: {error}"
            ) from None

    def _format(self, value: Any) -> None:
        if "string" not in self._types():
            return  # such as int32, which says nothing to validators
        if not isinstance(value, str) or value not in FORMATS:
            raise self._refuse("format", f"is not supported; these are: {', '.join(FORMATS)}")
        if value in OWN_FORMATS:
            self._patterns.append(f"^(?:{OWN_FORMATS[value]})$")
            self._out.setdefault("pattern", "")
            return
        if value == "hostname":
            self._out["maxLength"] = min(
                LONGEST_HOSTNAME, self._out.get("maxLength", LONGEST_HOSTNAME)
            )
        self._out["format"] = value

    def _items(self) -> None:
        """`items` and `prefixItems` as draft 2020-12 has them."""
        if "items" in self._out or "prefixItems" in self._out:
            return
        items, older = self._given.get("items", True), self._walk.draft < 2020
        if "prefixItems" in self._given and (older or isinstance(items, list)):
            raise self._refuse(
                "prefixItems",
                "is not supported beside items or a $schema of an older draft; use one of them",
            )
        keyword = "items" if isinstance(items, list) else "prefixItems"
        if keyword in self._given:
            first = self._given[keyword]
            if not isinstance(first, list):
                raise self._refuse(keyword, "is not a list; write a list of schemas")
            self._out["prefixItems"] = [self._sub(s, keyword, n) for n, s in enumerate(first)]
        keyword = "additionalItems" if isinstance(items, list) else "items"
        if keyword in self._given:
            self._out["items"] = self._sub(self._given[keyword], keyword)


# Keywords with a method of their own.
_OTHERS = frozenset(
    "type const enum $ref properties required additionalProperties patternProperties pattern format multipleOf".split()
)
# All that are followed and may leave no value.
_LIMITING = {*_COUNTS, *_BOUNDS, *_ARRAYS, *_OTHERS, "allOf", "anyOf", "oneOf"}

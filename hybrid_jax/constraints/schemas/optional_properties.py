"""How many properties of an object may be left out: llguidance follows only so many that could come next.

llguidance (1.9.1) keeps an item for each way in which a text can go on, and a limited number of them. Of an object it
has four for each property that may come first, three if a required one follows, and one or two behind a required one.
Of those that may come first the number is exact. Behind a required one it is the least, so nothing is refused that
could be followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

ROW_ITEMS = 2000  # llguidance's own default
# Keywords after which a schema is taken together with others, so that a property may be required elsewhere.
TOGETHER = ("allOf", "anyOf", "oneOf", "$ref")


def too_many_optional(
    root: Mapping[str, Any], definitions: Mapping[str, Any]
) -> tuple[Any, int, int] | None:
    """Looks for an object that cannot be followed since too many of its properties in a row may be left out.

    Objects that are taken together with other schemas are not looked at, nor the sum of several that could begin at
    the same place: llguidance refuses them, or ends their text.

    Args:
        root, definitions: schemas as llguidance gets them, with references such as "#/$defs/NAME".

    Returns:
        the object, how many properties in a row may be left out, and the most that may be; None if there is none.

    Example:
        >>> too_many_optional({"properties": dict.fromkeys(map(str, range(501)), {})}, {})[1:]
        (501, 498)
    """
    waiting, seen = [root], set()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        together = [keyword for keyword in TOGETHER if keyword in schema]
        if not together:
            if (found := _run_of(schema)) is not None:
                return schema, *found
            waiting += _below(schema)
        elif set(schema) <= {together[0], "x-guidance"} and together[0] != "allOf":
            alone = schema[together[0]]
            named = (
                [definitions[alone.removeprefix("#/$defs/")]] if together[0] == "$ref" else alone
            )
            waiting += named
    return None


def _below(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of values inside. A property that has a pattern too is taken together with it."""
    if not schema.get("patternProperties"):
        yield from schema.get("properties", {}).values()
    yield from schema.get("patternProperties", {}).values()
    yield from schema.get("prefixItems", ())
    yield from (
        schema[keyword] for keyword in ("items", "additionalProperties") if keyword in schema
    )


def _run_of(schema: Mapping[str, Any]) -> tuple[int, int] | None:
    """The first row of properties that may be left out and is too long, and how long it may be."""
    types = schema.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types) or {"const", "enum"} & set(
        schema
    ):
        return None
    properties, required = schema.get("properties", {}), set(schema.get("required", ()))
    # Those without any value are left out of the grammar.
    names = [name for name, part in properties.items() if part is not False or name in required]
    kinds = [name in required for name in names] + [True] * bool(required - set(properties))
    others = [
        *schema.get("patternProperties", {}).values(),
        schema.get("additionalProperties", True),
    ]
    num_others = sum(part is not False for part in others)
    runs = [(is_required, len([*run])) for is_required, run in groupby(kinds)]
    for at, (is_required, length) in enumerate(runs):
        is_last = at == len(runs) - 1
        if is_required:
            continue
        if at == 0 and is_last:
            each, extra = 4, 6 + num_others if num_others else -1
        elif at == 0:
            each, extra = 3, 1
        elif is_last:
            each, extra = 2, 3 if num_others else 1
        else:
            each, extra = 1, 1
        most = (ROW_ITEMS - extra) // each
        if length > most:
            return length, most
    return None

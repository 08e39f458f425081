"""Which part of a schema the library refuses. Its own errors seldom say that."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hybrid_jax.constraints.schemas.walk import Place, written

MOST_ASKED = 100  # parts of a schema that are tried alone
SECONDS = 1.0  # for all of them
UNSATISFIABLE = "Unsatisfiable schema"
# Keywords with schemas in a list or an object.
LISTED, NAMED = ("allOf", "anyOf", "oneOf", "prefixItems"), ("properties", "patternProperties")

Ask = Callable[[str], str | None]


class RefusedPart(NamedTuple):
    """A part of a schema.

    Attributes:
        place: where it stands in the given schema.
        message: what the library says of it alone.
    """

    place: Place
    message: str


def refused_part(schema: str, message: str, kind_of: Callable[[str], Any], ask: Ask) -> RefusedPart:
    """The smallest part that is refused alone for the same reason as the whole.

    Args:
        schema: as given.
        message: what the library says of the whole.
        kind_of: what messages of the same kind have in common.
        ask: what the library says of a schema, as JSON text; None if it compiles.
    """
    whole, places = written(schema)
    return _Search(whole, places, kind_of, ask).down_from(whole, message)


class _Search:
    """Goes down from a schema to the part that is refused. Half of the parts at a time are tried together."""

    def __init__(
        self,
        whole: Mapping[str, Any],
        places: Mapping[int, Place],
        kind_of: Callable[[str], Any],
        ask: Ask,
    ) -> None:
        self._places, self._kind_of, self._ask = places, kind_of, ask
        self._definitions = whole.get("$defs", {})
        self._shared = {"$defs": {**self._definitions}, "x-guidance": whole["x-guidance"]}
        self._left, self._stop = MOST_ASKED, time.monotonic() + SECONDS

    def down_from(self, schema: Mapping[str, Any], message: str) -> RefusedPart:
        place, kind = self._places[id(schema)], self._kind_of(message)
        while True:
            self._leave_out(place)
            found = self._first(self._parts(schema, kind), kind)
            if found is None:
                return RefusedPart(place, message)
            schema, message = found
            place = self._places.get(id(schema), place)

    def _leave_out(self, place: Place) -> None:
        """Cuts references back to a place on the way: what leads there is refused whatever the reason."""
        for name, schema in self._definitions.items():
            own = self._places.get(id(schema))
            if own is not None and own.given is place.given:
                self._shared["$defs"][name] = True

    def _parts(self, schema: Mapping[str, Any], kind: Any) -> Iterator[Any]:
        """The parts that could be the reason. A schema without values is none if another one may be taken."""
        if "$ref" in schema:
            yield self._shared["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        if kind == UNSATISFIABLE:
            yield from _needed(schema)
            return
        for keyword in LISTED:
            yield from schema.get(keyword, ())
        for keyword in NAMED:
            yield from schema.get(keyword, {}).values()
        yield from (schema[key] for key in ("items", "additionalProperties") if key in schema)

    def _first(self, parts: Iterable[Any], kind: Any) -> tuple[Mapping[str, Any], str] | None:
        left = [part for part in parts if isinstance(part, Mapping)]
        while len(left) > 1:
            half = left[: len(left) // 2]
            least = len(half) if kind == UNSATISFIABLE else 0
            together = {"type": "array", "prefixItems": half, "items": False, "minItems": least}
            left = half if self._is_refused(together, kind) else left[len(half) :]
        message = self._asked(left[0]) if left else None
        return (
            (left[0], message) if message is not None and self._kind_of(message) == kind else None
        )

    def _is_refused(self, schema: Mapping[str, Any], kind: Any) -> bool:
        message = self._asked(schema)
        return message is not None and self._kind_of(message) == kind

    def _asked(self, schema: Mapping[str, Any]) -> str | None:
        self._left -= 1
        if self._left < 0 or time.monotonic() > self._stop:
            return None
        return self._ask(json.dumps({**schema, **self._shared}, ensure_ascii=False))


def _needed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that some value must have if the written schema has any."""
    yield from schema.get("allOf", ())
    properties, first = schema.get("properties", {}), schema.get("prefixItems", [])
    yield from (properties[name] for name in schema.get("required", ()) if name in properties)
    yield from first[: schema.get("minItems", 0)]
    if schema.get("minItems", 0) > len(first) and "items" in schema:
        yield schema["items"]

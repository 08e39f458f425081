"""Whether the definitions of a written schema lead to themselves, or describe values that never end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hybrid_jax.constraints.matches import finds

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MOST_LOOKS = 1_000_000  # for known names that have a pattern, in characters of both


class Facts:
    """What follows about definitions that refer to each other. Each fact needs others; each is visited once.

    Args:
        names: of the definitions.
        plain: patterns of names by how they are written for llguidance, where that differs.
    """

    def __init__(self, names: Iterable[str], plain: Mapping[str, str]) -> None:
        self._plain = plain
        self._missing: list[int] = []  # of each fact, how many others it still needs
        self._needed_by: list[list[int]] = []
        self._known: dict[int, int] = {}  # facts of schemas that several facts need
        self._definitions = {name: self._add(1) for name in names}
        self._looks = MOST_LOOKS

    def _add(self, missing: int, needs: Iterable[int] = ()) -> int:
        fact = len(self._missing)
        self._missing.append(missing)
        self._needed_by.append([])
        for need in needs:
            self._needed_by[need].append(fact)
        return fact

    def _all(self, needs: Iterable[int]) -> int:
        needs = list(needs)
        return self._add(len(needs), needs)

    def _any(self, needs: Iterable[int]) -> int:
        return self._add(1, needs)

    def set_definition(self, name: str, fact: int) -> None:
        """Says which fact holds for a definition."""
        self._needed_by[fact].append(self._definitions[name])

    def conclude(self) -> None:
        """Finds all that holds."""
        holding = [fact for fact, missing in enumerate(self._missing) if not missing]
        while holding:
            for fact in self._needed_by[holding.pop()]:
                self._missing[fact] -= 1
                if self._missing[fact] == 0:
                    holding.append(fact)

    def holds_for(self, name: str) -> bool:
        """Whether the fact of a definition holds, once all are concluded."""
        return self._missing[self._definitions[name]] <= 0

    def _of_reference(self, schema: Mapping[str, Any]) -> list[int]:
        named = [schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else []
        return [self._definitions[name] for name in named]

    def at_same_place(self, schema: Any) -> int:
        """That no definition applies to the value which it describes by way of itself."""
        if isinstance(schema, bool):
            return self._all(())
        parts = (p for key in ("allOf", "anyOf", "oneOf") for p in schema.get(key, ()))
        return self._all([*self._of_reference(schema), *map(self.at_same_place, parts)])

    def can_end(self, schema: Any) -> int:
        """That some value of a written schema is finite."""
        if isinstance(schema, bool) or "const" in schema or "enum" in schema:
            return self._all(())
        if id(schema) in self._known:
            return self._known[id(schema)]
        needs = [*self._of_reference(schema), *map(self.can_end, schema.get("allOf", ()))]
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                needs.append(self._any(map(self.can_end, schema[keyword])))
        types = schema.get("type", TYPES)
        types = [types] if isinstance(types, str) else types
        if not set(types) - {"array", "object"}:
            needs.append(
                self._any(
                    self._all(map(self.can_end, self._needed(kind, schema))) for kind in types
                )
            )
        self._known[id(schema)] = self._all(needs)
        return self._known[id(schema)]

    def _needed(self, kind: str, schema: Mapping[str, Any]) -> Iterator[Any]:
        """The schemas of what every array or object of a written schema holds."""
        if kind == "object":
            for name in schema.get("required", ()):
                properties = schema.get("properties", {})
                named = [properties[name]] if name in properties else []
                named += self._of_patterns(name, schema.get("patternProperties", {}))
                yield from named or [schema.get("additionalProperties", True)]
            return
        first = schema.get("prefixItems", [])
        yield from first[: schema.get("minItems", 0)]
        if schema.get("minItems", 0) > len(first):
            yield schema.get("items", True)

    def _of_patterns(self, name: str, patterns: Mapping[str, Any]) -> Iterator[Any]:
        """The schemas that a name has by its patterns. Past a limit of time they are left out."""
        for pattern, schema in patterns.items():
            pattern = self._plain.get(pattern, pattern)
            self._looks -= len(pattern) * (1 + len(name))
            if self._looks > 0 and finds(pattern, name):
                yield schema

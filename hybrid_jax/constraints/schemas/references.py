"""Where references of a JSON schema lead: JSON pointers in fragments (RFC 6901), within the schema itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

INDEX = re.compile(r"0|[1-9][0-9]{0,6}")


def pointer_of(reference: str, root: Any, keys: Iterable[str] = ("$id", "id")) -> str:
    """A reference without the schema's own address, which it may begin with.

    Args:
        reference, root: as the schema has them.
        keys: keywords that may hold its address.

    Example:
        >>> pointer_of("https://a.b/c#/$defs/x", {"$id": "https://a.b/c"})
        '#/$defs/x'
    """
    for key in keys:
        base = root.get(key) if isinstance(root, Mapping) else None
        base = base.rstrip("#") if isinstance(base, str) else ""
        if base and reference.startswith(base):
            return reference[len(base) :] or "#"
    return reference


def places(root: Any, pointer: str) -> Iterator[Any]:
    """The places that a pointer leads through, the schema itself first and its target last.

    Args:
        root: the schema.
        pointer: "#", or one that begins with "#/", as a reference has it: %2F is a slash between names, as a slash is.

    Raises:
        LookupError: there is no such place.

    Example:
        >>> list(places({"a": {"b": 1}}, "#/a%2Fb"))
        [{'a': {'b': 1}}, {'b': 1}, 1]
    """
    place = root
    yield place
    for part in unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place[key]
        elif isinstance(place, list) and INDEX.fullmatch(key):
            place = place[int(key)]
        else:
            raise LookupError(pointer)
        yield place

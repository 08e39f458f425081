"""How checks report that books are wrong: what was counted on the way against what is found by counting anew."""

from __future__ import annotations

from typing import Any


def agree(where: str, **pairs: tuple[Any, Any]) -> None:
    """Checks that what was counted is what is found.

    Args:
        where: whose books they are; the message begins with it.
        pairs: by what they count: the books' value, and the value that a recount finds.

    Raises:
        AssertionError: some differ; the message has both values, and of dicts the entries that differ.
    """
    for name, (counted, found) in pairs.items():
        if counted == found:
            continue
        if isinstance(counted, dict):
            counted, found = _beyond(counted, found), _beyond(found, counted)
        raise AssertionError(f"{where}: counts {counted} {name.replace('_', ' ')}, found {found}")


def _beyond(one: dict, other: dict) -> dict:
    """The entries of `one` that `other` has not."""
    return {key: value for key, value in one.items() if other.get(key) != value}

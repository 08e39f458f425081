"""What the descriptions check of themselves: errors name the class, the field and the value."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any


def require(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{where}: {what}")


def one_of(value: object, allowed: tuple, where: str, name: str) -> None:
    require(value in allowed, where, f"{name} must be one of {allowed}, got {value!r}")


def positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, type(config).__name__, f"{name} must be positive, got {value}")


def integers(config: object, *names: str) -> None:
    """Integers only, not what compares like one: a float that reaches a shape fails far from here.

    Those of other libraries become Python's own.
    """
    for name in names:
        value = getattr(config, name)
        good = hasattr(value, "__index__") and not isinstance(value, bool)
        require(good, type(config).__name__, f"{name} must be an integer, got {value!r}")
        object.__setattr__(config, name, operator.index(value))


def flags(config: object, *names: str) -> None:
    """True or False only, not what counts as one; numpy's become Python's own."""
    for name in names:
        value = getattr(config, name)
        good = type(value).__name__ in ("bool", "bool_")
        require(good, type(config).__name__, f"{name} must be True or False, got {value!r}")
        object.__setattr__(config, name, bool(value))


def is_integer(value: object) -> bool:
    """An integer of any kind, numpy's too, but no boolean."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def integers_of(given: Any) -> tuple[int, ...] | None:
    """The integers in a list or another iterable; None if it is not one or holds something else."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | bytearray | Mapping):
        return None
    entries = tuple(given)
    return tuple(map(operator.index, entries)) if all(map(is_integer, entries)) else None

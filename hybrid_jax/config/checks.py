"""What the descriptions check of themselves: errors name the class, the field and the value."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any


def require(condition: bool, where: str, what: str) -> None:
    """Raises a ValueError that says `where` and `what` unless the condition holds."""
    if not condition:
        raise ValueError(f"{where}: {what}")


def refusal(config: object, name: str, what: str, got: str | None = None) -> ValueError:
    """The error for a field that must be `what`; `got` is its value, shortened, when None."""
    got = reprlib.repr(getattr(config, name)) if got is None else got
    return ValueError(f"{type(config).__name__}: {name} must be {what}, got {got}")


def must(config: object, name: str, good: bool, what: str, got: str | None = None) -> None:
    """Raises `refusal` for a field that is not good."""
    if not good:
        raise refusal(config, name, what, got)


def one_of(config: object, name: str, allowed: tuple[str, ...]) -> None:
    """The field has one of the allowed values."""
    what = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
    must(config, name, getattr(config, name) in allowed, what)


def positive(config: object, *names: str) -> None:
    """The fields are above 0."""
    for name in names:
        must(config, name, getattr(config, name) > 0, "positive")


def multiple(config: object, name: str, divisor: str, what: str = "") -> None:
    """The field is a multiple of another one, which messages may call something else."""
    whole, part = getattr(config, name), getattr(config, divisor)
    must(config, name, whole % part == 0, f"a multiple of {what or divisor}", f"{whole} and {part}")


def integers(config: object, *names: str) -> None:
    """The fields are integers and not floats that equal one: a float that reaches a shape fails far from here.

    Integers of other libraries become Python's own.
    """
    for name in names:
        value = getattr(config, name)
        must(config, name, is_integer(value), "an integer")
        object.__setattr__(config, name, operator.index(value))


def natural(value: Any, name: str, *, least: int | None = 0) -> int:
    """A number from outside that must be whole, and at least `least` unless that is None."""
    if type(value) is not int or (least is not None and value < least):
        what = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be a whole number{what}, got {value!r}")
    return value


def flags(config: object, *names: str) -> None:
    """The fields are True or False; numpy's booleans become Python's own."""
    for name in names:
        value = getattr(config, name)
        must(config, name, type(value).__name__ in ("bool", "bool_"), "True or False")
        object.__setattr__(config, name, bool(value))


def is_integer(value: object) -> bool:
    """Whether a value is an integer of any kind, numpy's too, but not a boolean."""
    try:
        operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return not isinstance(value, bool)


def integers_of(given: Any) -> tuple[int, ...] | None:
    """The integers in a list or another iterable; None if it is not one or holds something else."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | bytearray | Mapping):
        return None
    entries = tuple(given)
    if {*map(type, entries)} == {int}:  # a look at each would take as long as tokenizing
        return entries
    return tuple(map(operator.index, entries)) if all(map(is_integer, entries)) else None


def refuse_constant(name: str) -> None:
    """For `json.loads`, which takes NaN and Infinity for numbers. JSON has neither."""
    raise ValueError(f"{name} is not a JSON number")


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can write a text: a lone surrogate stands in no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""Refuses names of other libraries with a word of help. `other_names.toml` lists them.

The error for one says what is meant instead, or that the feature is not built yet.
"""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Collection
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
SIMILAR = 0.75  # of names that may be the same one misspelt, from 0 to 1
TABLES = Path(__file__).with_suffix(".toml")


@functools.cache
def other_names(where: str) -> dict[str, dict[str, str]]:
    """What the tables say of the names that one place refuses: "ours", "later" or "needless" to name to meaning."""
    tables = tomllib.loads(TABLES.read_text(encoding="utf-8"))[where]
    return {
        sort: {
            name: meaning
            for meaning, names in tables.get(sort, {}).items()
            for name in names.split()
        }
        for sort in ("ours", "later", "needless")
    }


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that is most like a name, if one is that may be meant."""
    return next(iter(get_close_matches(name[:60], known, n=1, cutoff=SIMILAR)), None)


def refuse_name(
    where: str,
    name: str,
    known: Collection[str],
    *,
    what: str = "field",
    tables_of: str | None = None,
) -> NoReturn:
    """Raises for a name that is not among the known ones.

    Args:
        where: the place, as messages and the tables call it.
        name: the one that was given.
        known: names that exist there.
        what: what a name stands for there.
        tables_of: a place whose tables serve here, too, as far as they mean names that exist here; None for its own.

    Raises:
        NotImplementedError: it belongs to a feature that does not exist yet.
        TypeError: anything else. The message has the name that was probably meant, or all there are.
    """
    tables = other_names(tables_of or where)
    if feature := tables["later"].get(name):
        raise NotImplementedError(f"{where}: {name}: {feature} is not built yet; leave it out")
    if reason := tables["needless"].get(name):
        raise TypeError(f"{where}: {name}: {reason}; leave it out")
    meant = tables["ours"].get(name)
    if meant is None or (tables_of is not None and meant.split()[0] not in known):
        meant = nearest(name, known)
    hint = f"did you mean {meant}?" if meant else f"it has {', '.join(sorted(known))}"
    raise TypeError(f"{where}: unknown {what} {name!r}; {hint}")


def refuses_other_options(tables_of: str) -> Callable[[F], F]:
    """Lets a function refuse unknown keywords with `refuse_name`. Its signature stays what it was.

    Args:
        tables_of: as in `refuse_name`.
    """

    def refusing(function: F) -> F:
        known = set(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in known:
                    refuse_name(function.__name__, name, known, what="option", tables_of=tables_of)
            return function(*args, **given)

        return checked  # type: ignore[return-value]

    return refusing


def refuses_other_names(cls: T) -> T:
    """Lets a dataclass refuse unknown keywords with `refuse_name`. Its signature stays what it was."""
    plain: Any = cls.__init__  # type: ignore[misc]
    known = {field.name for field in fields(cls)}

    @functools.wraps(plain)
    def __init__(self: object, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                refuse_name(cls.__name__, name, known)
        plain(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls

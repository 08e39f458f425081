"""Refuses names of other libraries with a word of help. `other_names.toml` lists them.

The error for one says what is meant instead, or that the feature is not built yet.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T", bound=type)
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


def refuse_name(where: str, name: str, known: Collection[str], *, what: str = "field") -> NoReturn:
    """Raises for a name that is not among the known ones.

    Args:
        where: the place, as messages and the tables call it.
        name: the one that was given.
        known: names that exist there.
        what: what a name stands for there.

    Raises:
        NotImplementedError: it belongs to a feature that does not exist yet.
        TypeError: anything else. The message has the name that was probably meant, or all there are.
    """
    tables = other_names(where)
    if feature := tables["later"].get(name):
        raise NotImplementedError(f"{where}: {name}: {feature} is not built yet; leave it out")
    if reason := tables["needless"].get(name):
        raise TypeError(f"{where}: {name}: {reason}; leave it out")
    meant = tables["ours"].get(name) or nearest(name, known)
    hint = f"did you mean {meant}?" if meant else f"it has {', '.join(sorted(known))}"
    raise TypeError(f"{where}: unknown {what} {name!r}; {hint}")


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

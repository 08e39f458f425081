"""Names that load on first use, so that a package's files without jax load without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_in(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        homes: which names each of its modules has.
    """

    def load(name: str) -> Any:
        home = next((home for home, names in homes.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home}"), name)

    return load

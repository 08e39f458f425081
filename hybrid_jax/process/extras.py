"""What parts of the package need beyond its own requirements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtra(ModuleNotFoundError):
    """A package of an extra is not installed; the message says how to install it."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports of what an extra installs.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{error.name} is not installed; pip install 'hybrid_jax[{extra}]'", name=error.name
        ) from error

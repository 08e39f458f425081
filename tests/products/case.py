"""A format of matrices as the tests see it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from hybrid_jax.products.formats import FORMATS, Format
from hybrid_jax.products.operations import OPERATIONS, Operations


@dataclass(frozen=True, kw_only=True)
class FormatCase:
    """A format, and bounds of its own.

    Attributes:
        format, operations: its entries in the two tables.
        share: bytes of the weights of a tiny model, of those of float32 numbers, at most.
        error: how far a number may be from the one that was encoded, as a share of the largest in the matrix.
    """

    format: Format
    operations: Operations
    share: float
    error: float

    @property
    def name(self) -> str:
        return self.format.name

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """The package knows the format: these two entries are all that it takes."""
        with (
            mock.patch.dict(FORMATS, {self.name: self.format}),
            mock.patch.dict(OPERATIONS, {self.name: self.operations}),
        ):
            yield

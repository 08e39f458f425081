"""What a step asks of a drafter on the device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax

from hybrid_jax.engine.pack import Layout
from hybrid_jax.state import Model, State


class Drafts(NamedTuple):
    """Draft tokens for B rows.

    Attributes:
        tokens: int32[B, k] what may follow the token that each row feeds.
        count: int32[B] how many of these to judge; 0 for none.
    """

    tokens: jax.Array
    count: jax.Array


class Drafter(Protocol):
    """A way to draft the next tokens. What it remembers may be wrong: that costs time and never changes a token."""

    fields: tuple[tuple[str, int], ...]  # columns that it reads of a step's packed rows

    def draft(self, state: State, batch: jax.Array, layout: Layout, model: Model) -> Drafts:
        """Drafts what follows the tokens that the first B rows feed next.

        Args:
            batch, layout: the packed rows int32[B, columns], and their columns.
        """

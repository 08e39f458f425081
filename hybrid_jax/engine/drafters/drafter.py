"""What a step asks of a drafter on the device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax

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

    def draft(self, state: State, num_rows: int, model: Model) -> Drafts:
        """Drafts what follows the tokens that the first `num_rows` rows feed next."""

"""What a step asks of a drafter on the device."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.walk import Cursor
from hybrid_jax.state import Model, State


class DraftRows(NamedTuple):
    """B rows whose next tokens are to be drafted: the first ring rows of the state.

    Attributes:
        at: where they stand. token: int32[B] what they feed next. alive: bool[B] rows that go on.
        room: int32[B] for how many tokens of the window there are pages, the row's own among them.
        most: int32[B] how many of these may stay.
        table: int32[B, frames_per_page, pages].
        batch, layout: the packed rows int32[B, columns] of the step, and their columns.
        shared: as `walk.prepare` makes it.
        aligned: as in `WindowPlan`.
    """

    at: Cursor
    token: jax.Array
    alive: jax.Array
    room: jax.Array
    most: jax.Array
    table: jax.Array
    batch: jax.Array
    layout: Layout
    shared: tuple[Any, ...]
    aligned: bool = False


class Drafts(NamedTuple):
    """Draft tokens for B rows.

    Attributes:
        tokens: int32[B, k] what may follow the token that each row feeds.
        count: int32[B] how many of these to judge; 0 for none.
        sure: bool[B, k] those that are to be kept unjudged, which changes the output; None for none.
    """

    tokens: jax.Array
    count: jax.Array
    sure: jax.Array | None = None


class Drafter(Protocol):
    """A way to draft the next tokens. What it remembers may be wrong: that costs time.

    A token changes only if a draft is kept unjudged.
    """

    @property
    def fields(self) -> tuple[tuple[str, int], ...]:
        """Columns that it reads of a step's packed rows."""

    def draft(
        self, params: dict, state: State, rows: DraftRows, model: Model
    ) -> tuple[Drafts, State]:
        """Drafts what follows the tokens that some rows feed next; it may write what only drafters read."""

"""Drafts that the host sends with a plan."""

from __future__ import annotations

import jax.numpy as jnp

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.engine.drafters.drafter import DraftRows, Drafts
from hybrid_jax.state import Model, State


class Given:
    """See `hybrid_jax.engine.drafters.drafter.Drafter`.

    The host sends what it expects from a position on. It may not know yet where the row stands. What it sent counts
    only if the row's own token is as expected.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config
        self.fields = (("drafts", 2 * config.window), ("num_drafts", 1), ("drafts_from", 1))

    def draft(
        self, params: dict, state: State, rows: DraftRows, model: Model
    ) -> tuple[Drafts, State]:
        """What the host expects behind the row's own token."""
        batch, layout, num_rows = rows.batch, rows.layout, len(rows.alive)
        most = self.config.num_tokens
        sent, count = layout.get(batch, "drafts"), layout.get(batch, "num_drafts")
        here = state.lengths[:num_rows] - layout.get(batch, "drafts_from")
        places = here[:, None] + jnp.arange(most + 1)
        found = jnp.take_along_axis(sent, jnp.clip(places, 0, sent.shape[1] - 1), axis=1)
        right = (here >= 0) & (here < count) & (found[:, 0] == rows.token)
        left = jnp.where(right, jnp.minimum(count - 1 - here, most), 0)
        return Drafts(found[:, 1:], left), state

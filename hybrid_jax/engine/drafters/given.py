"""Drafts that the host sends with a plan."""

from __future__ import annotations

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.engine.drafters.drafter import DraftRows, Drafts
from hybrid_jax.state import Model, State


class Given:
    """See `hybrid_jax.engine.drafters.drafter.Drafter`.

    The host waits for results before it drafts, so it knows where the rows stand.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self.fields = (("drafts", config.num_tokens), ("num_drafts", 1))

    def draft(
        self, params: dict, state: State, rows: DraftRows, model: Model
    ) -> tuple[Drafts, State]:
        """What the host expects after the row's own token."""
        tokens, count = (rows.layout.get(rows.batch, name) for name, _ in self.fields)
        return Drafts(tokens.reshape(len(rows.alive), -1), count), state

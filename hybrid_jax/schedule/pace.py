"""How many tokens of a row one decode step feeds: its own alone, or drafts behind it too.

This goes by how many drafts were accepted lately, and by what a step costs for its shapes. No clock decides, so runs
repeat.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.costs import StepCosts
from hybrid_jax.schedule.sequence import Sequence

# How much a row's latest window counts, and how much it counts for rows that have had none.
OWN_WEIGHT, COMMON_WEIGHT = 0.2, 0.02
FIRST_WINDOWS = (
    8  # until so many windows were judged, an engine knows nothing, and tries one window at a time
)
# While drafts do not pay, one window is tried now and then: its extra cost is one such part of the steps before it.
TRIAL_PART = 50


class Pace:
    """Chooses the window of each plan.

    Args:
        speculation: the settings; None for plain decoding.
        costs: of decode steps; None to judge drafts whatever that costs.
        plain_steps: decode steps of a plan without drafts, at most.
    """

    def __init__(
        self, speculation: SpeculationConfig | None, costs: StepCosts | None, plain_steps: int
    ) -> None:
        self._speculation, self._costs, self._plain_steps = speculation, costs, plain_steps
        self._common = 0.0  # accepted drafts of a window, over all rows
        self._windows = 0
        self._since_trial = 0.0  # plain steps

    def window(self, rows: Rows[Sequence]) -> tuple[int, int | None]:
        """Tokens of a row in each step of the next plan, and the most steps of that plan, or None.

        Args:
            rows: sequences that may decode.
        """
        speculation, costs = self._speculation, self._costs
        drafting = [row for row in rows if row.request.constraint is None]
        if speculation is None or (rows and not drafting):
            return 1, None
        if costs is None or not speculation.adaptive:
            return speculation.window, None
        count = max(len(rows), 1)
        context = sum(row.position for row in rows) / count
        price = costs.ratio(rows=count, tokens=speculation.window, context=context)
        accepted = sum(map(self._expected, drafting)) if rows else self._common
        expected = 1 + accepted / count
        if self._windows >= FIRST_WINDOWS and expected >= price:
            return speculation.window, None
        if price >= speculation.window:
            return 1, None  # it would not pay even if every draft were accepted
        self._since_trial += self._plain_steps
        due = self._since_trial >= TRIAL_PART * (price - 1)
        if self._windows < FIRST_WINDOWS or due:
            self._since_trial = 0.0
            return speculation.window, 1
        return 1, None

    def learn(self, row: Sequence, verified: Rows[tuple[int, int]]) -> None:
        """Takes in how many drafts of a row's windows were accepted."""
        for _, accepted in verified:
            if row.accepted_drafts is None:
                row.accepted_drafts = self._common if self._windows else float(accepted)
            row.accepted_drafts += OWN_WEIGHT * (accepted - row.accepted_drafts)
            weight = max(COMMON_WEIGHT, 1 / (self._windows + 1))
            self._common += weight * (accepted - self._common)
            self._windows += 1

    def _expected(self, row: Sequence) -> float:
        """Drafts of the row's next window that will be accepted, as far as is known."""
        return self._common if row.accepted_drafts is None else row.accepted_drafts

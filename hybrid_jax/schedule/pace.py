"""How many tokens of a row one decode step feeds: its own alone, or drafts after it too.

This goes by how many drafts were accepted lately, and by what a step costs for its shapes. No clock decides, so runs
repeat.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.costs import StepCosts
from hybrid_jax.schedule.host_drafter import HostDrafter, host_drafter_of
from hybrid_jax.schedule.plan import DecodeRow, Plan
from hybrid_jax.schedule.sequence import Phase, Sequence

# How much a row's latest window counts, and how much it counts for rows that have had none.
OWN_WEIGHT, COMMON_WEIGHT = 0.2, 0.02
# Until so many windows were judged, an engine knows nothing, and tries one window at a time.
FIRST_WINDOWS = 8
# While drafts do not pay, one window is tried now and then: its extra cost is one such part of the steps before it.
TRIAL_PART = 50
# Plain plans between trials at least, because a trial is a plan of its own.
TRIAL_PLANS = 10


@dataclass(frozen=True, kw_only=True)
class Stride:
    """How the rows of a plan decode.

    Attributes:
        window: tokens of a row in each step at most.
        max_steps: steps of the plan at most; None for no limit.
        drafts: what may follow, by sequence, as the host drafts it.
    """

    window: int = 1
    max_steps: int | None = None
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)


ONE_TOKEN = Stride()


class Pace:
    """Chooses the stride of each plan.

    Args:
        speculation: the settings; None for plain decoding.
        costs: of decode steps; None to judge drafts whatever that costs.
        plain_steps: decode steps of a plan without drafts, at most.

    Attributes:
        drafter: drafts on the host; None if the device drafts or nobody.
    """

    def __init__(
        self, speculation: SpeculationConfig | None, costs: StepCosts | None, plain_steps: int
    ) -> None:
        self._speculation, self._costs, self._plain_steps = speculation, costs, plain_steps
        self._common = 0.0  # accepted drafts of a window, over all rows
        self._windows = 0
        self._since_trial = 0.0  # plain steps
        self._draft_s = 0.0
        self._drafting = self._decoding = 0.0  # costs of all steps
        self.start_over()

    @property
    def times(self) -> dict[str, float]:
        """What `stats()` says of the time that drafting takes: by a clock on the host, by costs on the device."""
        found = {"host_drafting_s": self._draft_s}
        if self._costs is not None:
            share = self._drafting / self._decoding if self._decoding else 0.0
            found["drafting_share"] = share
        return found

    def start_over(self) -> None:
        """Forgets what sequences had, because they begin again."""
        self.drafter: HostDrafter | None = host_drafter_of(self._speculation)

    def stride(self, rows: Rows[Sequence]) -> Stride:
        """The stride of the next plan.

        Args:
            rows: sequences that may decode.
        """
        speculation = self._speculation
        drafting = [row for row in rows if not row.request.one_by_one]
        if speculation is None or (rows and not drafting):
            return ONE_TOKEN
        if self.drafter is not None:
            return self._drafted(rows, drafting)
        every = Stride(window=speculation.window)
        price = self._price(rows, speculation)
        if price is None:
            return every
        accepted = sum(map(self._expected, drafting)) if rows else self._common
        expected = 1 + accepted / max(len(rows), 1)
        if self._windows >= FIRST_WINDOWS and expected >= price:
            return every
        if price >= speculation.most_tokens:
            return ONE_TOKEN  # it would not pay even if every draft were accepted
        due = self._since_trial >= TRIAL_PART * (price - 1) + TRIAL_PLANS * self._plain_steps
        if self._windows < FIRST_WINDOWS or due:
            self._since_trial = 0.0
            return replace(every, max_steps=1)
        self._since_trial += self._plain_steps
        return ONE_TOKEN

    def _price(self, rows: Rows[Sequence], speculation: SpeculationConfig) -> float | None:
        """What a step with drafts costs, as a multiple of one without; None if it does not matter."""
        if self._costs is None or not speculation.adaptive:
            return None
        count, context = max(len(rows), 1), _context(rows)
        return self._costs.ratio(rows=count, tokens=speculation.window, context=context)

    def _drafted(self, rows: Rows[Sequence], drafting: Rows[Sequence]) -> Stride:
        """A stride by what the host drafts now."""
        speculation = self._speculation
        assert speculation is not None and self.drafter is not None
        begun, drafts, expected = time.perf_counter(), {}, 0.0
        for row in drafting:
            if row.phase is Phase.DECODE:
                draft = self.drafter.draft(row.owner, row.tokens, speculation.num_tokens)
                if draft.tokens:
                    drafts[row] = draft.tokens
                    expected += draft.expected
        self._draft_s += time.perf_counter() - begun
        if not drafts:
            return ONE_TOKEN
        price = self._price(rows, speculation)
        if price is not None and 1 + expected / len(rows) < price:
            return ONE_TOKEN
        return Stride(window=speculation.window, max_steps=1, drafts=drafts)

    def learn(self, row: Sequence, verified: Rows[tuple[int, int]]) -> None:
        """Takes in how many drafts of a row's windows were accepted."""
        for _, accepted in verified:
            if row.accepted_drafts is None:
                row.accepted_drafts = self._common if self._windows else float(accepted)
            row.accepted_drafts += OWN_WEIGHT * (accepted - row.accepted_drafts)
            weight = max(COMMON_WEIGHT, 1 / (self._windows + 1))
            self._common += weight * (accepted - self._common)
            self._windows += 1

    def ran(self, plan: Plan) -> None:
        """Takes in what a plan's steps cost whose results are there."""
        if self._costs is None or self._speculation is None or not plan.decode:
            return
        count, context, drafts = len(plan.decode), _context(plan.decode), plan.window > 1
        steps = max(len(row.verified if drafts else row.new_tokens) for row in plan.decode)
        drafting = self._costs.drafting_cost(rows=count, context=context) if drafts else 0.0
        verifying = self._costs.cost(rows=count, tokens=plan.window, context=context)
        self._drafting += steps * drafting
        self._decoding += steps * (drafting + verifying)

    def _expected(self, row: Sequence) -> float:
        """Drafts of the row's next window that will be accepted, as far as is known."""
        return self._common if row.accepted_drafts is None else row.accepted_drafts


def _context(rows: Rows[Sequence | DecodeRow]) -> float:
    """Tokens of context of a row, on average."""
    return sum(row.position for row in rows) / max(len(rows), 1)

"""Results of a dispatched plan: first pending, then as plain tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.engine.steps.kind import Row, StepKind
from hybrid_jax.schedule.plan import Plan, Tokens


@dataclass
class Pending:
    """Results of one plan that may still be computing; `read` waits for them.

    Attributes:
        plan: the plan.
        dispatches: for each dispatch its kind, its rows, what was sampled, and log-probabilities of prompts or None.
    """

    plan: Plan
    dispatches: list[tuple[StepKind, list[Row], Sampled, Sampled | None]] = field(
        default_factory=list
    )

    def read(self) -> Tokens:
        """Blocks until the device is done and copies the tokens to the host."""
        results = jax.device_get([results for _, _, *results in self.dispatches])
        plan = self.plan
        into = Tokens.blank(plan)
        lists = (plan.prefill, plan.forks, plan.decode)
        places = {id(row): place for rows in lists for place, row in enumerate(rows)}
        for (kind, rows, *_), (sampled, prompt) in zip(self.dispatches, results, strict=True):
            kind.unpack(rows, sampled, prompt, places, into)
        return into

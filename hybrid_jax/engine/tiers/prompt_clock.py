"""How long prompts take to compute, by the engine's clock."""

from __future__ import annotations

import time
from collections import deque

from hybrid_jax.costs import Costs
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.tiers.speeds import Rate, Speeds

CLEAR = 0.2  # a plan with decode steps tells something if at least such a part of its time went into prompts


class PromptClock:
    """Times plans, from their dispatch, or from the results before them if these came later, to their own results.

    What a plan's decode steps take, as plans of nothing else have shown, is taken off. What it copies counts as well:
    that is little beside what it computes, and a full cache has hardly a plan that copies nothing.

    Args:
        speeds: are told; None to time nothing. costs: of the model.
    """

    def __init__(self, speeds: Speeds | None, costs: Costs) -> None:
        self._speeds, self._costs = speeds, costs
        self._steps = Rate()  # decode steps a second
        # Of plans in flight; None of those that tell nothing.
        self._begun: deque[float | None] = deque()
        self._received = 0.0

    def dispatches(self, plan: Plan, *, compiles: bool) -> None:
        """A plan is about to be dispatched, and perhaps compiled first."""
        drafts = bool(plan.decode) and plan.window > 1
        tells = self._speeds is not None and not (compiles or plan.forks or drafts)
        self._begun.append(time.perf_counter() if tells else None)

    def received(self, plan: Plan) -> None:
        """The results of the oldest plan in flight are in."""
        begun, now = self._begun.popleft(), time.perf_counter()
        if begun is not None:
            self._take_in(plan, now - max(begun, self._received))
        self._received = now

    def _take_in(self, plan: Plan, seconds: float) -> None:
        num_steps = max((len(row.new_tokens) for row in plan.decode), default=0)
        if not plan.prefill:
            if num_steps:
                self._steps.add(num_steps, seconds)
            return
        of_steps = self._steps.seconds_of(num_steps) if num_steps else 0.0
        if (
            self._speeds is not None
            and of_steps is not None
            and seconds - of_steps > CLEAR * seconds
        ):
            chunks = ((row.start, row.start + row.length) for row in plan.prefill)
            flops = sum(self._costs.flops(end, start) for start, end in chunks)
            self._speeds.computed(flops, seconds - of_steps)

    def forget(self) -> None:
        """No plan is in flight any more."""
        self._begun.clear()

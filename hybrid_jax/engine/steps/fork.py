"""Fork: rows that go on after another row's prompt."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.engine import frames, kept, pack, rings
from hybrid_jax.engine.adjust import Adjust
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.steps.prefill import first_tokens
from hybrid_jax.engine.steps.step import Made, StepKind, Work
from hybrid_jax.schedule.plan import ForkRow, Plan
from hybrid_jax.schedule.request import Request
from hybrid_jax.state import Model, State


@dataclass(frozen=True, order=True)
class ForkBucket:
    """How many lines the logits of the prefill before it have. One dispatch takes all forks of a plan."""

    rows: int


def fork(
    state: State,
    adjust: Adjust | None,
    batch: jax.Array,
    logits: jax.Array,
    count: jax.Array,
    *,
    model: Model,
    layout: Layout,
    num_logprobs: int,
) -> tuple[State, Adjust | None, Made]:
    """Starts rows after another row's prompt: they get a copy of its ring, of its last page, and of what drafters keep
    of it, and draw their first token.

    Args:
        batch: int32[F, layout.size], real rows first; a padding row names the sink's ring row.
        logits: float32[R, V] logits of the prefill in which the prompts ended.
        count: int32[] real rows.

    Returns:
        State, adjust, and tokens int32[F].
    """
    get = lambda name: layout.get(batch, name)  # noqa: E731
    state = frames.copy_pages(state, get("sources"), get("targets"), model)
    source, target = get("source"), get("row")
    if model.geometry.has_state or state.drafting:

        def copy(i, held):
            of_rings, drafting = held
            copied = functools.partial(rings.copy_row, source=source[i], target=target[i])
            drafting = kept.copy_row(drafting, source[i], target[i])
            return jax.tree.map(copied, of_rings), drafting

        held = jax.lax.fori_loop(0, count, copy, (state.rings, state.drafting))
        state = state.replace(rings=held[0], drafting=held[1])
    with jax.named_scope("sample"):
        own = logits[get("line")]  # [F, V]
        samples = jnp.ones(target.shape, bool)
        state, adjust, sampled = first_tokens(
            state, adjust, own, batch, get("position"), samples, layout, num_logprobs, model
        )
    return state, adjust, Made(sampled)


class Fork(StepKind):
    """See `fork`. It follows the prefill of its plan."""

    name = "fork"
    numbers = ("row", "source", "line", "position")
    takes_weights = False
    run = staticmethod(fork)

    def buckets(self) -> list[ForkBucket]:
        if self.engine.max_rows == 1:
            return []
        return [ForkBucket(self.shapes.logits_rows)]

    def bucket(self, rows: Sequence[ForkRow], before: object) -> ForkBucket:
        return ForkBucket(self.shapes.logits_rows)

    def expected(self, requests: Iterable[Request]) -> set[ForkBucket]:
        several = any(request.sample_index for request in requests)
        return set(self.buckets()) if several else set()

    def cost(self, bucket: ForkBucket) -> tuple[int, int]:
        return 0, bucket.rows

    def work(self, bucket: ForkBucket, rows: Sequence[ForkRow]) -> Work:
        return Work(0, 0)  # the prefill before has made the logits

    def dispatches(self, plan: Plan) -> list[list[ForkRow]]:
        return [plan.forks]

    def layout(self, bucket: ForkBucket) -> Layout:
        return pack.row_layout(self.numbers, *pack.copy_fields(self.model.geometry.frames_per_page))

    def num_lines(self, bucket: ForkBucket) -> int:
        return self.engine.max_rows

    def rest(self, rows: Sequence[ForkRow], before: Made | None) -> tuple:
        assert before is not None, "a fork follows the prefill that its rows' prompt ends in"
        return before.logits, np.int32(len(rows))

    def inert(self, bucket: ForkBucket) -> tuple:
        logits: np.ndarray = np.zeros((bucket.rows, self.model.config.vocab_size), np.float32)
        return logits, np.int32(0)

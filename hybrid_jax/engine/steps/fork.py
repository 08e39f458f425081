"""Fork: rows that go on behind another row's prompt."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine import frames, pack, rings
from hybrid_jax.engine.adjust import Adjust
from hybrid_jax.engine.model import Model
from hybrid_jax.engine.pack import SAMPLING, Layout
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.engine.steps.kind import Made, StepKind
from hybrid_jax.engine.steps.sample import first_tokens
from hybrid_jax.engine.steps.unpack import logprobs_at
from hybrid_jax.schedule import bucket as sizes
from hybrid_jax.schedule.bucket import PrefillBucket
from hybrid_jax.schedule.plan import ForkRow, Plan, Tokens
from hybrid_jax.state import State


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
    """Starts rows behind another row's prompt: they get a copy of its ring and last page, and draw their first token.

    Args:
        batch: int32[F, layout.size], real rows first; a padding row names the sink's ring row.
        logits: float32[R, V] logits of the prefill in which the prompts ended.
        count: int32[] real rows.

    Returns:
        State, adjust, and tokens int32[F].
    """
    get = lambda name: layout.get(batch, name)  # noqa: E731
    if model.geometry.has_pages:
        arena = frames.copy_pages(state.arena, get("sources"), get("targets"), model)
        state = state.replace(arena=arena)
    source, target = get("source"), get("row")
    if model.geometry.has_state:

        def copy(i, held):
            return jax.tree.map(lambda ring: rings.copy_row(ring, source[i], target[i]), held)

        state = state.replace(rings=jax.lax.fori_loop(0, count, copy, state.rings))
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
    takes_weights = False
    run = staticmethod(fork)

    def buckets(self, engine: EngineConfig, *, max_pages: int) -> list[ForkBucket]:
        if engine.max_rows == 1:
            return []
        counts = {sizes.logits_rows(engine, rows) for rows in sizes.prefill_rows(engine)}
        return [ForkBucket(count) for count in sorted(counts)]

    def bucket(
        self,
        engine: EngineConfig,
        rows: Sequence[ForkRow],
        plan: Plan,
        *,
        max_pages: int,
        before: PrefillBucket,
    ) -> ForkBucket:
        return ForkBucket(sizes.logits_rows(engine, before.rows))

    def cost(self, bucket: ForkBucket) -> tuple[int, int]:
        return 0, bucket.rows

    def dispatches(self, plan: Plan) -> list[list[ForkRow]]:
        return [plan.forks] if plan.forks else []

    def drawing(self, rows: Sequence[ForkRow]) -> Sequence[ForkRow]:
        return rows

    def layout(self, model: Model, bucket: ForkBucket) -> Layout:
        per_page = model.geometry.frames_per_page
        return Layout(
            (
                ("row", 1),
                ("source", 1),
                ("line", 1),
                ("position", 1),
                *SAMPLING,
                *pack.copy_fields(per_page),
            )
        )

    def pack(
        self, rows: Sequence[ForkRow], layout: Layout, bucket: ForkBucket, engine: EngineConfig
    ) -> np.ndarray:
        """Packs as many lines as there are ring rows; padding names the sink's row."""
        batch = np.zeros((engine.max_rows, layout.size), np.int32)
        batch[:, layout.span("row")] = engine.max_rows
        for line, row in enumerate(rows):
            put = functools.partial(layout.set, batch, line)
            put("row", row.row)
            put("source", row.source)
            put("line", row.line)
            put("position", row.position)
            pack.set_copies(layout, batch, line, row.copies)
            pack.set_sampling(layout, batch, line, row.request)
        return batch

    def rest(self, plan: Plan, rows: Sequence[ForkRow], before: Made | None) -> tuple:
        assert before is not None, "a fork follows the prefill that its rows' prompt ends in"
        return before.logits, np.int32(len(rows))

    def inert(self, model: Model, bucket: ForkBucket) -> tuple:
        logits = np.zeros((bucket.rows, model.config.vocab_size), np.float32)
        return logits, np.int32(0)

    def unpack(
        self,
        rows: Sequence[ForkRow],
        sampled: Sampled,
        prompt: Sampled | None,
        places: Mapping[int, int],
        into: Tokens,
    ) -> None:
        for line, row in enumerate(rows):
            place = places[id(row)]
            into.forks[place] = int(sampled.tokens[line])
            count = row.request.params.logprobs
            into.fork_logprobs[place] = logprobs_at(sampled, (line,), count)

"""Exact mode's step: prompts and decode through one executable, so their logits agree bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from hybrid_jax.config.sampling_params import MAX_LOGPROBS
from hybrid_jax.engine import frames, pack, rings, walk
from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.kinds.kind import FoldRows, WindowRows
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.steps.kind import Made, StepKind, Variant
from hybrid_jax.models import decoder
from hybrid_jax.schedule.bucket import PrefillBucket
from hybrid_jax.schedule.plan import DecodeRow, Plan, PrefillRow
from hybrid_jax.state import Model, State

WHOLE = Variant(num_logprobs=MAX_LOGPROBS, adjusts=True)


@dataclass(frozen=True, order=True)
class ExactBucket(PrefillBucket):
    """The one shape of exact mode: a window of `tokens` = grain for every ring row."""


def exact_step(
    params: dict,
    state: State,
    adjust: Adjust | None,
    batch: jax.Array,
    *,
    model: Model,
    layout: Layout,
    num_logprobs: int,
) -> tuple[State, Adjust | None, Made]:
    """Exact mode's only step: windows of [max_rows, grain] that are aligned to the grain, for prompts and for decode.

    Args:
        batch: int32[max_rows, layout.size]. A row `feeds` the token that it drew last, or computes `length` tokens of a
            prompt from its checkpoint on. Other rows are inert. A full ring folds before a token is fed. After a chunk
            it folds if the row has a slot for that.

    Returns:
        State, adjust, and tokens int32[max_rows] with the hidden states [max_rows, grain, D].
    """
    num_rows = batch.shape[0]
    geometry, config = model.geometry, model.config
    get = lambda name: layout.get(batch, name)  # noqa: E731
    table = pack.get_pages(layout, batch, geometry.frames_per_page)
    state = frames.copy_pages(state, get("sources"), get("targets"), model)
    feeds, length = get("feeds") > 0, get("length")
    alive = jnp.where(feeds, state.tokens[:num_rows] >= 0, length > 0)
    known, read_slot, fold_slot = get("checkpoint"), get("read_slot"), get("fold_slot")
    decoding = walk.cursor(state.lengths[:num_rows], known, read_slot, fold_slot, model)
    # A prompt's chunk begins at a checkpoint, while a row that decodes stands up to a grain behind one.
    chunk = walk.Cursor(known, known, read_slot)
    at = jax.tree.map(functools.partial(jnp.where, feeds), decoding, chunk)
    shared = walk.prepare(params, model)
    state, (begin, base, slot) = walk.fold_full(state, at, alive, fold_slot, shared, model)
    starts = alive & ~feeds
    if geometry.has_state:
        state, read = walk.load_columns(state, starts, base, slot, model)
        # An attention layer in front writes to the arena that this has read, but depends on nothing of it.
        table = table + frames.zero_after(state, *read)
    end = jnp.where(alive, begin + jnp.where(feeds, 1, length), 0)
    begin = jnp.where(alive, begin, 0)
    positions = base[:, None] + jnp.arange(geometry.grain)
    fed = feeds[:, None] & (positions == begin[:, None])
    tokens = jnp.where(fed, state.tokens[:num_rows, None], get("tokens"))
    rows = WindowRows(tokens, base, begin, end, base, slot, table)
    h, state = walk.window(params, state, rows, shared=shared, model=model)
    folds = FoldRows(starts & (fold_slot > 0), base, slot, fold_slot)
    state = walk.fold_rows(state, folds, shared, model)
    last = rings.slice_tokens(h, jnp.maximum(end - base - 1, 0), 1)[:, 0]
    logits = decoder.logits(params, last, config)
    samples = alive & (get("samples") > 0)
    ring_rows = jnp.arange(num_rows)
    sampled, fed, adjust = choose(
        logits, batch, layout, end, samples, num_logprobs, adjust, ring_rows, model.sampler
    )
    fed = jnp.where(alive, fed, state.tokens[:num_rows])
    ends = jnp.where(alive, end, state.lengths[:num_rows])
    state = state.replace(
        tokens=state.tokens.at[:num_rows].set(fed), lengths=state.lengths.at[:num_rows].set(ends)
    )
    sampled = sampled._replace(tokens=jnp.where(samples, sampled.tokens, -1))
    return state, adjust, Made(sampled, hidden=h)


class Exact(StepKind):
    """See `exact_step`. The line of each row is its ring row."""

    name = "exact"
    numbers = ("checkpoint", "read_slot", "fold_slot", "length", "feeds", "samples")
    run = staticmethod(exact_step)

    def buckets(self) -> list[ExactBucket]:
        (width,) = self.shapes.widths(self.max_pages)
        return [ExactBucket(self.engine.max_rows, self.engine.grain, width)]

    def bucket(self, rows: Sequence[PrefillRow | DecodeRow], before: object) -> ExactBucket:
        return self.buckets()[0]

    def variant(self, rows: Sequence[PrefillRow | DecodeRow]) -> Variant:
        """Always everything, because two executables would round differently."""
        return WHOLE

    def variants(self, *, logprobs: bool, adjusts: bool) -> list[Variant]:
        return [WHOLE]

    def dispatches(self, plan: Plan) -> list[list[PrefillRow | DecodeRow]]:
        """A row whose prompt ends in this plan decodes in a second dispatch; all else is in the first."""
        begun = {row.row for row in plan.prefill}
        joined = [row for row in plan.decode if row.row not in begun]
        later: list[PrefillRow | DecodeRow] = [row for row in plan.decode if row.row in begun]
        return [[*plan.prefill, *joined], later]

    def foreseen(self, plan: Plan) -> list[list[PrefillRow | DecodeRow]]:
        return [[*plan.prefill, *plan.decode]]

    def layout(self, bucket: ExactBucket) -> Layout:
        per_page = self.model.geometry.frames_per_page
        return pack.row_layout(
            self.numbers,
            *pack.copy_fields(per_page),
            *pack.page_fields(bucket.width, per_page),
            ("tokens", bucket.tokens),
        )

    def values(self, row: PrefillRow | DecodeRow) -> list[int]:
        if isinstance(row, DecodeRow):
            return [row.checkpoint, row.read_slot, row.fold_slot, 0, 1, row.samples]
        return [row.start, row.read_slot, row.write_slot, row.length, 0, row.samples]

    def line(self, row: PrefillRow | DecodeRow, index: int) -> int:
        return row.row

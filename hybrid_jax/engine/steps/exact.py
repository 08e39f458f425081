"""Exact mode's step: prompts and decode through one executable, so their logits agree bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import EngineConfig
from hybrid_jax.config.sampling_params import MAX_LOGPROBS
from hybrid_jax.engine import frames, pack, rings
from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.kinds.kind import FoldRows, WindowRows
from hybrid_jax.engine.model import Model
from hybrid_jax.engine.pack import SAMPLING, Layout
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.engine.steps.kind import Made, StepKind, Variant
from hybrid_jax.engine.steps.unpack import put_decode, put_prefill
from hybrid_jax.engine.walk import fold_rows, share, window
from hybrid_jax.models import decoder
from hybrid_jax.schedule.plan import DecodeRow, Plan, PrefillRow, Tokens
from hybrid_jax.state import State

WHOLE = Variant(num_logprobs=MAX_LOGPROBS, adjusts=True)


@dataclass(frozen=True, order=True)
class ExactBucket:
    """The one shape of exact mode: a window of `tokens` = grain for every ring row."""

    rows: int
    tokens: int
    width: int


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
    """Exact mode's only step: grain-aligned windows of [max_rows, grain], for prompts and for decode alike.

    Args:
        batch: int32[max_rows, layout.size]; a row with begin = end is inert. fold_before and fold_after are
            slots or -1: a full ring folded before, or after, the window.

    Returns:
        State, adjust, and tokens int32[max_rows] with the hidden states [max_rows, grain, D].
    """
    num_rows = batch.shape[0]
    geometry, config = model.geometry, model.config
    get = lambda name: layout.get(batch, name)  # noqa: E731
    table = get("table").reshape(num_rows, max(geometry.frames_per_page, 1), -1)
    if geometry.has_pages:
        arena = frames.copy_pages(state.arena, get("sources"), get("targets"), model)
        state = state.replace(arena=arena)
    feeds, base = get("feeds") > 0, get("base")
    alive = (get("end") > get("begin")) & (~feeds | (state.tokens[:num_rows] >= 0))
    checkpoint, slot = get("checkpoint"), get("read_slot")
    shared = share(params, model)
    if geometry.has_state:
        full = alive & (get("fold_before") >= 0)
        folds = FoldRows(full, checkpoint, slot, get("fold_before"))
        state = fold_rows(state, folds, shared, model)
        slot = jnp.where(full, get("fold_before"), slot)
        checkpoint = jnp.where(full, base, checkpoint)
        starts = alive & (get("load_conv") > 0)
        state, read = rings.load_columns(state, starts, checkpoint, slot, model)
        # An attention layer in front writes what this has read, and depends on nothing of it.
        table = table + frames.zero_after(state, *read)
    begin, end = jnp.where(alive, get("begin"), 0), jnp.where(alive, get("end"), 0)
    positions = base[:, None] + jnp.arange(geometry.grain)
    fed = feeds[:, None] & (positions == begin[:, None])
    tokens = jnp.where(fed, state.tokens[:num_rows, None], get("tokens"))
    rows = WindowRows(tokens, base, begin, end, checkpoint, slot, table)
    h, state = window(params, state, rows, shared=shared, model=model)
    if geometry.has_state:
        after = alive & (get("fold_after") >= 0)
        folds = FoldRows(after, checkpoint, slot, get("fold_after"))
        state = fold_rows(state, folds, shared, model)
    last = rings.slice_tokens(h, jnp.maximum(end - base - 1, 0), 1)[:, 0]
    logits = decoder.logits(params, last, config)
    samples = alive & (get("samples") > 0)
    lines = jnp.arange(num_rows)
    sampled, fed, adjust = choose(
        logits, batch, layout, end, samples, num_logprobs, adjust, lines, model.sampler
    )
    fed = jnp.where(alive, fed, state.tokens[:num_rows])
    state = state.replace(tokens=state.tokens.at[:num_rows].set(fed))
    sampled = sampled._replace(tokens=jnp.where(samples, sampled.tokens, -1))
    return state, adjust, Made(sampled, hidden=h)


class Exact(StepKind):
    """See `exact_step`; each row is at its ring row."""

    name = "exact"
    run = staticmethod(exact_step)

    def buckets(self, engine: EngineConfig, *, max_pages: int) -> list[ExactBucket]:
        return [ExactBucket(engine.max_rows, engine.grain, max(max_pages, 1))]

    def bucket(
        self,
        engine: EngineConfig,
        rows: Sequence[PrefillRow | DecodeRow],
        plan: Plan,
        *,
        max_pages: int,
        before: object,
    ) -> ExactBucket:
        return self.buckets(engine, max_pages=max_pages)[0]

    def variant(self, rows: Sequence[PrefillRow | DecodeRow]) -> Variant:
        """Always the whole: two executables would round differently."""
        return WHOLE

    def variants(self, *, logprobs: bool, adjusts: bool) -> list[Variant]:
        return [WHOLE]

    def dispatches(self, plan: Plan) -> list[list[PrefillRow | DecodeRow]]:
        """A row whose prompt ends here decodes in a second dispatch, all others in the first."""
        begun = {row.row for row in plan.prefill}
        joined = [row for row in plan.decode if row.row not in begun]
        later = [row for row in plan.decode if row.row in begun]
        return [rows for rows in ([*plan.prefill, *joined], later) if rows]

    def foreseen(self, plan: Plan) -> list[list[PrefillRow | DecodeRow]]:
        return [[*plan.prefill, *plan.decode]]

    def layout(self, model: Model, bucket: ExactBucket) -> Layout:
        per_page = model.geometry.frames_per_page
        return Layout(
            (
                ("base", 1),
                ("begin", 1),
                ("end", 1),
                ("checkpoint", 1),
                ("read_slot", 1),
                ("fold_before", 1),  # slot for the full ring's fold; -1 for none
                ("fold_after", 1),
                ("load_conv", 1),
                ("feeds", 1),
                ("samples", 1),
                *SAMPLING,
                *pack.copy_fields(per_page),
                *pack.page_fields(bucket.width, per_page),
                ("tokens", bucket.tokens),
            )
        )

    def pack(
        self,
        rows: Sequence[PrefillRow | DecodeRow],
        layout: Layout,
        bucket: ExactBucket,
        engine: EngineConfig,
    ) -> np.ndarray:
        """Chunks and decode steps alike; ring rows without a row have no token."""
        batch = np.zeros((bucket.rows, layout.size), np.int32)
        batch[:, layout.span("fold_before")] = batch[:, layout.span("fold_after")] = -1
        for row in rows:
            put = functools.partial(layout.set, batch, row.row)
            if isinstance(row, PrefillRow):
                put("base", row.start)
                put("begin", row.start)
                put("end", row.start + len(row.tokens))
                put("checkpoint", row.start)
                put("fold_after", row.write_slot if row.state_len else -1)
                put("load_conv", 1)
                put("samples", row.samples)
                put("tokens", row.tokens)
                pack.set_copies(layout, batch, row.row, row.copies)
            else:
                full = row.position - row.checkpoint_position == bucket.tokens
                put("base", row.position if full else row.checkpoint_position)
                put("begin", row.position)
                put("end", row.position + 1)
                put("checkpoint", row.checkpoint_position)
                put("fold_before", row.fold_slot if full else -1)
                put("feeds", 1)
                put("samples", 1)
            put("read_slot", row.read_slot)
            pack.set_pages(layout, batch, row.row, row.pages)
            if not isinstance(row, PrefillRow) or row.samples:
                pack.set_sampling(layout, batch, row.row, row.request)
        return batch

    def line(self, row: PrefillRow | DecodeRow, place: int) -> int:
        return row.row

    def unpack(
        self,
        rows: Sequence[PrefillRow | DecodeRow],
        sampled: Sampled,
        prompt: Sampled | None,
        places: Mapping[int, int],
        into: Tokens,
    ) -> None:
        for row in rows:
            if isinstance(row, PrefillRow):
                put_prefill(row, places[id(row)], row.row, sampled, prompt, into)
            else:
                put_decode(row, places[id(row)], [(row.row,)], sampled, into)

"""Exact mode's step: prompts and decode through one executable, so their logits agree bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.engine import frames, kept, pack, rings, walk
from hybrid_jax.engine.adjust import Adjust
from hybrid_jax.engine.drafters.drafter import DraftRows
from hybrid_jax.engine.drafters.table import drafter_of
from hybrid_jax.engine.mixers.mixer import FoldRows, WindowRows
from hybrid_jax.engine.on_matrices import on_matrices
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.steps.step import WHOLE, Made, Results, StepKind, Variant, Work
from hybrid_jax.engine.steps.verify import (
    Window,
    judge,
    note,
    set_drafts,
    unpack_verified,
    with_drafts,
)
from hybrid_jax.models import decoder
from hybrid_jax.schedule.bucket import PrefillBucket
from hybrid_jax.schedule.plan import DecodeRow, Plan, PrefillRow, Row
from hybrid_jax.state import Model, State


@dataclass(frozen=True, order=True)
class ExactBucket(PrefillBucket):
    """The one shape of exact mode: a window of `tokens` = grain for every ring row."""


@on_matrices
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

    With speculation, logits exist of T = 1 + k tokens of each row, and drafts are judged as in `verify`.

    Args:
        batch: int32[max_rows, layout.size]. A row `feeds` the token that it drew last and drafts after it, or
            computes `length` tokens of a prompt from its checkpoint on. Other rows are inert. A full ring folds before
            a token is fed. After a chunk it folds if the row has a slot for that.

    Returns:
        State, adjust, tokens int32[T, max_rows], -1 where none was drawn, the hidden states [max_rows, grain, D], and
        how many draft tokens each row had, int32[1, max_rows].
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
    # A prompt's chunk begins at a checkpoint, while a row that decodes stands up to a grain after one.
    chunk = walk.Cursor(known, known, read_slot)
    at = jax.tree.map(functools.partial(jnp.where, feeds), decoding, chunk)
    shared = walk.prepare(params, model)
    state, (begin, base, slot) = walk.fold_full(state, at, alive, fold_slot, shared, model)
    starts = alive & ~feeds
    own = token = state.tokens[:num_rows]
    if geometry.has_state:
        state, read = walk.load_columns(state, starts, base, slot, model)
        # An attention layer in front writes to the arena that this has read, but depends on nothing of it. What layers
        # draft must depend on it, and nothing else: XLA would add it again where it is used, when they have written.
        if model.config.drafting is not None:
            token = token + frames.zero_after(state, *read)
        else:
            table = table + frames.zero_after(state, *read)
    own = own[:, None]
    count = jnp.ones_like(begin)  # of tokens that are fed
    if model.speculation is not None:
        room = most = get("num_tokens")
        if geometry.has_state:
            most = jnp.minimum(most, geometry.grain - (begin - base))
        here = walk.Cursor(begin, base, slot)
        drafting = DraftRows(
            here, token, alive & feeds, room, most, table, batch, layout, shared, aligned=True
        )
        drafts, state = drafter_of(model.speculation).draft(params, state, drafting, model)
        own = jnp.concatenate([own, drafts.tokens], axis=1)
        count = jnp.minimum(1 + drafts.count, most)
    width, count = own.shape[1], jnp.where(feeds, count, length)
    end = jnp.where(alive, begin + count, 0)
    begin = jnp.where(alive, begin, 0)
    # A row that feeds has its own tokens from `begin` on.
    places = base[:, None] + jnp.arange(geometry.grain) - begin[:, None]
    shifted = jnp.take_along_axis(own, jnp.clip(places, 0, width - 1), axis=1)
    tokens = jnp.where(feeds[:, None], shifted, get("tokens"))
    rows = WindowRows(tokens, base, begin, end, base, slot, table)
    state = kept.forget_hidden(state, starts)
    commits = model.speculation is None
    h, state = walk.window(
        params, state, rows, shared=shared, model=model, commits=commits, aligned=True
    )
    first = jnp.where(feeds, begin, end - 1) - base
    last = rings.slice_tokens(h, jnp.maximum(first, 0), width)  # [B, T, D]
    logits = decoder.logits(params, last.swapaxes(0, 1), config)
    samples = alive & (get("samples") > 0)
    position = jnp.where(feeds, begin, end - 1)
    fed = jnp.where(samples, jnp.where(feeds, count, 1), 0)
    window = Window(own, fed, fed, position)
    judged = judge(logits, window, batch, layout, num_logprobs, adjust, model)
    drawn = jnp.arange(width)[:, None] < judged.count
    sampled = judged.sampled._replace(tokens=jnp.where(drawn, judged.sampled.tokens, -1))
    reached = jnp.where(feeds, begin + judged.count, end)
    if not commits:
        full = alive & (reached == base + geometry.grain)
        state = walk.end_aligned(state, full, model)
    # Attention after a state that is carried may still have to read pages. Columns are written when all has been read.
    columns = [ring["conv"] for ring in state.rings if "conv" in ring]
    after = frames.zero_after(state, h, *columns)
    folds = FoldRows(starts & (fold_slot > 0), base, slot, fold_slot + after)
    state = walk.fold_rows(state, folds, shared, model)
    state = note(params, state, last, position, judged, alive, model)
    last_drawn = jnp.where(samples, judged.last, -1)
    next_tokens = jnp.where(alive, last_drawn, state.tokens[:num_rows])
    lengths = jnp.where(alive, reached, state.lengths[:num_rows])
    state = state.replace(
        tokens=state.tokens.at[:num_rows].set(next_tokens),
        lengths=state.lengths.at[:num_rows].set(lengths),
    )
    drafted = jnp.where(feeds & alive, count - 1, 0)[None]
    return state, judged.adjust, Made(sampled, hidden=h, drafted=drafted)


class Exact(StepKind):
    """See `exact_step`. The line of each row is its ring row."""

    name = "exact"
    numbers = ("checkpoint", "read_slot", "fold_slot", "length", "feeds", "samples", "num_tokens")
    run = staticmethod(exact_step)

    def buckets(self) -> list[ExactBucket]:
        (width,) = self.shapes.widths(self.max_pages)
        return [ExactBucket(self.engine.max_rows, self.engine.grain, width)]

    def bucket(self, rows: Sequence[PrefillRow | DecodeRow], before: object) -> ExactBucket:
        return self.buckets()[0]

    def work(self, bucket: ExactBucket, rows: Sequence[PrefillRow | DecodeRow]) -> Work:
        return Work(num_tokens := bucket.rows * bucket.tokens, num_tokens)

    def variant(self, rows: Sequence[Row]) -> Variant:
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
        own = pack.row_layout(
            self.numbers,
            *pack.copy_fields(per_page),
            *pack.page_fields(bucket.width, per_page),
            ("tokens", bucket.tokens),
        )
        return with_drafts(own, self.model)

    def pack(self, rows: Sequence[Row], layout: Layout, bucket: ExactBucket) -> np.ndarray:
        batch = super().pack(rows, layout, bucket)
        set_drafts(layout, batch, [row for row in rows if isinstance(row, DecodeRow)])
        return batch

    def values(self, row: PrefillRow | DecodeRow) -> list[int]:
        if isinstance(row, DecodeRow):
            read, fold = row.read_slot, row.fold_slot
            return [row.checkpoint, read, fold, 0, 1, row.samples, row.num_tokens]
        return [row.start, row.read_slot, row.write_slot, row.length, 0, row.samples, 0]

    def line(self, row: PrefillRow | DecodeRow, index: int) -> int:
        return row.row

    def drawn_at(self, row: PrefillRow | DecodeRow, line: int) -> list[tuple[int, ...]]:
        return [(place, line) for place in range(self.engine.decode_tokens) if row.samples]

    def unpack(self, rows: Sequence[PrefillRow | DecodeRow], results: Results) -> None:
        super().unpack(rows, results)
        judged = [row for row in rows if isinstance(row, DecodeRow)]
        unpack_verified(judged, results, self.engine.decode_tokens)

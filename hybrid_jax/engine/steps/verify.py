"""Verify: one token of each row and drafts behind it, in one pass over the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.engine import pack
from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.drafters import history
from hybrid_jax.engine.drafters.table import drafter_of
from hybrid_jax.engine.kinds.kind import WindowRows
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.engine.steps.decode import Decode, room_for, store
from hybrid_jax.engine.steps.kind import Made, Results
from hybrid_jax.engine.walk import commit, cursor, fold_full, prepare, window
from hybrid_jax.models import decoder
from hybrid_jax.schedule.bucket import DecodeBucket
from hybrid_jax.schedule.plan import DecodeRow, Plan, Row
from hybrid_jax.state import Model, State


def verify(
    params: dict,
    state: State,
    adjust: Adjust | None,
    batch: jax.Array,
    num_steps: jax.Array,
    *,
    model: Model,
    layout: Layout,
    max_steps: int,
    num_logprobs: int,
) -> tuple[State, Adjust | None, Made]:
    """Up to `num_steps` steps of the first B ring rows, each of up to T = 1 + k tokens a row.

    A step first folds the rows whose ring is full. It then drafts up to k tokens for each row, and feeds these behind
    the row's own token. The token behind each of them is drawn as in plain decoding. As long as it is what was drafted,
    that draft is accepted, and the next one is judged. Nothing stays past a grain boundary, since the ring would have
    to fold there.

    Args:
        adjust, batch: as for `decode`; a row's tokens end after its `num_tokens`.
        num_steps: int32[] steps of the loop, at most max_steps.

    Returns:
        State, adjust, and tokens int32[max_steps * T, B]: for each step those that were drawn, in order, and -1 where
        there are no more; and how many draft tokens each row had, int32[max_steps, B].
    """
    num_rows, grain = batch.shape[0], model.geometry.grain
    assert model.speculation is not None, "verify: there is no drafter"
    width, drafter = model.speculation.window, drafter_of(model.speculation)
    get = lambda name: layout.get(batch, name)  # noqa: E731
    table = pack.get_pages(layout, batch, model.geometry.frames_per_page)
    fold_slot = get("fold_slot")
    known, read_slot = get("checkpoint"), get("read_slot")
    last = state.lengths[:num_rows] + get("num_tokens")  # where each row stands at most in the end
    shared, ring_rows = prepare(params, model), jnp.arange(num_rows)
    out = room_for(max_steps * width, num_rows, num_logprobs, model)
    drafted = jnp.zeros((max_steps, num_rows), jnp.int32)

    def going(state):
        return (state.tokens[:num_rows] >= 0) & (state.lengths[:num_rows] < last)

    def keep_on(carry):
        step, state, *_ = carry
        return (step < num_steps) & going(state).any()

    def advance(carry):
        step, state, out, drafted, adjust = carry
        # A gather for kernels, because XLA would launch a copy for a slice.
        rows = ring_rows if model.kernels == "pallas" else slice(num_rows)
        alive = going(state)
        at = cursor(state.lengths[rows], known, read_slot, fold_slot, model)
        room = last - at.position
        if model.geometry.has_state:
            with jax.named_scope("fold"):
                state, at = fold_full(state, at, alive, fold_slot, shared, model)
            room = jnp.minimum(room, grain - (at.position - at.checkpoint))
        with jax.named_scope("draft"):
            drafts = drafter.draft(state, batch, layout, model)
        fed = jnp.minimum(1 + drafts.count, room)
        tokens = jnp.concatenate([state.tokens[:num_rows, None], drafts.tokens], axis=1)
        rows = WindowRows(
            tokens=tokens,
            base=at.position,
            begin=jnp.where(alive, at.position, 0),
            end=jnp.where(alive, at.position + fed, 0),
            checkpoint=at.checkpoint,
            slot=at.slot,
            table=table,
        )
        h, state = window(params, state, rows, shared=shared, model=model, commits=False)
        with jax.named_scope("sample"):
            logits = decoder.logits(params, h.swapaxes(0, 1), model.config, model.kernels)
            judged = judge(
                logits, tokens, jnp.where(alive, fed, 0), at.position, batch, layout, num_logprobs,
                adjust, model,
            )  # fmt: skip
        state = commit(state, judged.count, model)
        state = history.note(
            state, ring_rows, at.position + 1, judged.sampled.tokens.T, judged.count
        )
        fed_next = jnp.where(alive, judged.last, state.tokens[:num_rows])
        state = state.replace(tokens=state.tokens.at[:num_rows].set(fed_next))
        out = store(out, step * width, judged.sampled, jnp.arange(width)[:, None] < judged.count)
        drafted = jax.lax.dynamic_update_index_in_dim(drafted, jnp.maximum(fed - 1, 0), step, 0)
        return step + 1, state, out, drafted, judged.adjust

    carry = (jnp.int32(0), state, out, drafted, adjust)
    _, state, out, drafted, adjust = jax.lax.while_loop(keep_on, advance, carry)
    return state, adjust, Made(out, drafted=drafted)


class Judged(NamedTuple):
    """What became of a window.

    Attributes:
        sampled: tokens int32[T, B] that were drawn, and their log-probabilities or None.
        count: int32[B] how many of them count, from the first on, and so how many of the window's tokens stay.
        last: int32[B] the token to feed next; -1 after a stop token.
        adjust: as `choose` returns it.
    """

    sampled: Sampled
    count: jax.Array
    last: jax.Array
    adjust: Adjust | None


def judge(
    logits: jax.Array,
    tokens: jax.Array,
    fed: jax.Array,
    base: jax.Array,
    batch: jax.Array,
    layout: Layout,
    num_logprobs: int,
    adjust: Adjust | None,
    model: Model,
) -> Judged:
    """Draws the token behind each token of a window, one after the other, until one is not what was drafted.

    Args:
        logits: float32[T, B, V] behind each token.
        tokens: int32[B, T] the window. fed: int32[B] how many of its tokens were fed; 0 for rows that are done.
        base: int32[B] where the window begins.
        batch, layout, num_logprobs, adjust: as in `choose`.
    """
    width, num_rows, _ = logits.shape
    ring_rows = jnp.arange(num_rows)
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-2).T  # [T, B]

    def position(t, carry: Judged, going: jax.Array) -> tuple[Judged, jax.Array]:
        of_one = jax.lax.dynamic_index_in_dim(logits, t, keepdims=False)
        new, feed, adjust = choose(
            of_one, batch, layout, base + t + 1, going, num_logprobs, carry.adjust, ring_rows,
            model.sampler,
        )  # fmt: skip
        put = lambda old, value: jax.lax.dynamic_update_index_in_dim(old, value, t, 0)  # noqa: E731
        judged = Judged(
            jax.tree.map(put, carry.sampled, new),
            carry.count + going.astype(jnp.int32),
            jnp.where(going, feed, carry.last),
            adjust,
        )
        drafted_next = jax.lax.dynamic_index_in_dim(following, t, keepdims=False)
        return judged, going & (feed == drafted_next) & (t + 1 < fed)

    blank = room_for(width, num_rows, num_logprobs, model)
    judged = Judged(blank, jnp.zeros_like(base), jnp.full_like(base, -1), adjust)
    going = fed > 0
    if model.kernels == "pallas":  # a loop would make the device wait for the host
        for t in range(width):
            judged, going = position(t, judged, going)
        return judged

    def on(carry):
        t, _, going = carry
        return (t < width) & going.any()

    def one(carry):
        t, judged, going = carry
        return t + 1, *position(t, judged, going)

    return jax.lax.while_loop(on, one, (jnp.int32(0), judged, going))[1]


class Verify(Decode):
    """See `verify`. The line of each row is its ring row."""

    name = "verify"
    run = staticmethod(verify)

    @property
    def tokens(self) -> int:
        return self.engine.decode_tokens

    def layout(self, bucket: DecodeBucket) -> Layout:
        return with_drafts(super().layout(bucket), self.model)

    def pack(self, rows: Sequence[Row], layout: Layout, bucket: DecodeBucket) -> np.ndarray:
        batch = super().pack(rows, layout, bucket)
        set_drafts(layout, batch, [row for row in rows if isinstance(row, DecodeRow)])
        return batch

    def dispatches(self, plan: Plan) -> list[list[DecodeRow]]:
        return [plan.decode] if plan.window > 1 else []

    def drawn_at(self, row: DecodeRow, line: int) -> list[tuple[int, ...]]:
        return [(place, line) for place in range(row.num_steps * self.tokens)]

    def unpack(self, rows: Sequence[DecodeRow], results: Results) -> None:
        super().unpack(rows, results)
        unpack_verified(rows, results, self.tokens)


def with_drafts(layout: Layout, model: Model) -> Layout:
    """A layout with the columns that the drafter reads."""
    if model.speculation is None:
        return layout
    return Layout(layout.fields + drafter_of(model.speculation).fields)


def set_drafts(layout: Layout, batch: np.ndarray, rows: Sequence[DecodeRow]) -> None:
    """Writes what the host drafts, if it does."""
    if not layout.has("drafts"):
        return
    span = layout.spans["drafts"]
    for row in rows:
        tokens = row.drafts[: span.stop - span.start]
        layout.set(batch, row.row, "drafts", tokens)
        layout.set(batch, row.row, "num_drafts", len(tokens))
        layout.set(batch, row.row, "drafts_from", row.drafts_from)


def unpack_verified(rows: Sequence[DecodeRow], results: Results, width: int) -> None:
    """Tells rows how many draft tokens each window of `width` tokens had, and how many were accepted."""
    if width == 1:
        return
    tokens, drafted = results.sampled.tokens, results.drafted
    counts = (tokens >= 0).reshape(-1, width, tokens.shape[1]).sum(1)  # [steps, B]
    for row in rows:
        windows = zip(drafted[:, row.row].tolist(), counts[:, row.row].tolist(), strict=True)
        row.verified = [(given, count - 1) for given, count in windows if count]

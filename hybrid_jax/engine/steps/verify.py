"""Verify: one token of each row and drafts after it, in one pass over the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine import kept, pack
from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.drafters.drafter import DraftRows
from hybrid_jax.engine.drafters.table import drafter_of
from hybrid_jax.engine.mixers.mixer import WindowRows
from hybrid_jax.engine.on_matrices import on_matrices
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.engine.steps.decode import Decode, room_for, store
from hybrid_jax.engine.steps.step import Made, Results
from hybrid_jax.engine.walk import commit, cursor, fold_full, prepare, window
from hybrid_jax.models import decoder
from hybrid_jax.schedule.bucket import DecodeBucket
from hybrid_jax.schedule.plan import DecodeRow, Plan, Row
from hybrid_jax.state import Model, State


@on_matrices
def verify(
    params: dict,
    state: State,
    adjust: Adjust | None,
    batch: jax.Array,
    num_steps: jax.Array,
    ends: jax.Array | None = None,
    *,
    model: Model,
    layout: Layout,
    max_steps: int,
    num_logprobs: int,
    loops: bool = True,
) -> tuple[State, Adjust | None, Made]:
    """Up to `num_steps` steps of the first B ring rows, each of up to T = 1 + k tokens a row.

    A step first folds the rows whose ring is full. It then drafts up to k tokens for each row, and feeds these after
    the row's own token. The token after each of them is drawn as in plain decoding. As long as it is what was drafted,
    that draft is accepted, and the next one is judged. Nothing stays past a grain boundary, since the ring would have
    to fold there.

    Args:
        adjust, batch: as for `decode`; a row's tokens end after its `num_tokens`.
        num_steps, loops: as for `decode`.
        ends: without a loop, int32[B] where each row stands at most when the dispatch ends, as the step before has
            returned it. The first step does not read it.

    Returns:
        State, adjust, and tokens int32[max_steps * D, B]: for each step the up to D tokens that were drawn, in order,
        and -1 where there are no more. D is T, or the depth of a tree. Also how many draft tokens each row had,
        int32[max_steps, B].
    """
    num_rows, grain = batch.shape[0], model.geometry.grain
    assert model.speculation is not None, "verify: there is no drafter"
    speculation, drafter = model.speculation, drafter_of(model.speculation)
    width, ancestors = speculation.window, None
    if speculation.tree is not None:
        ancestors = jnp.broadcast_to(jnp.array(speculation.ancestors, jnp.int32), (num_rows, width))
    get = lambda name: layout.get(batch, name)  # noqa: E731
    table = pack.get_pages(layout, batch, model.geometry.frames_per_page)
    fold_slot = get("fold_slot")
    known, read_slot = get("checkpoint"), get("read_slot")
    last = state.lengths[:num_rows] + get("num_tokens")  # where each row stands at most in the end
    if ends is not None:
        last = jnp.where(num_steps == 0, last, ends)
    shared, ring_rows = prepare(params, model), jnp.arange(num_rows)
    depth = speculation.most_tokens
    out = room_for(max_steps * depth, num_rows, num_logprobs, model)
    drafted = jnp.zeros((max_steps, num_rows), jnp.int32)

    def going(state):
        return (state.tokens[:num_rows] >= 0) & (state.lengths[:num_rows] < last)

    def keep_on(carry):
        step, state, *_ = carry
        return (step < num_steps) & going(state).any()

    def advance(carry):
        step, state, out, drafted, adjust = carry
        # A gather for kernels, because XLA would launch a copy for a slice.
        own = ring_rows if model.backend.launches else slice(num_rows)
        alive = going(state)
        at = cursor(state.lengths[own], known, read_slot, fold_slot, model)
        room = most = last - at.position
        if model.geometry.has_state:
            with jax.named_scope("fold"):
                state, at = fold_full(state, at, alive, fold_slot, shared, model)
            most = jnp.minimum(room, grain - (at.position - at.checkpoint))
        with jax.named_scope("draft"):
            own_token = state.tokens[:num_rows]
            asked = DraftRows(at, own_token, alive, room, most, table, batch, layout, shared)
            drafts, state = drafter.draft(params, state, asked, model)
        # What branches may be fed past the boundary, but does not stay there.
        fed = jnp.minimum(1 + drafts.count, most if ancestors is None else room)
        tokens = jnp.concatenate([state.tokens[:num_rows, None], drafts.tokens], axis=1)
        rows = WindowRows(
            tokens=tokens,
            base=at.position,
            begin=jnp.where(alive, at.position, 0),
            end=jnp.where(alive, at.position + fed, 0),
            checkpoint=at.checkpoint,
            slot=at.slot,
            table=table,
            ancestors=ancestors,
        )
        h, state = window(params, state, rows, shared=shared, model=model, commits=False)
        with jax.named_scope("sample"):
            logits = decoder.logits(params, h.swapaxes(0, 1), model.config)
            given = Window(tokens, jnp.where(alive, fed, 0), most, at.position, drafts.sure)
            judged = judge(logits, given, batch, layout, num_logprobs, adjust, model)
        state = commit(state, rows, judged.count, model, judged.path)
        state = note(params, state, h, at.position, judged, judged.count > 0, model)
        fed_next = jnp.where(alive, judged.last, state.tokens[:num_rows])
        state = state.replace(tokens=state.tokens.at[:num_rows].set(fed_next))
        drawn = jnp.arange(depth)[:, None] < judged.count
        out = store(out, step * depth, judged.sampled, drawn)
        drafted = jax.lax.dynamic_update_index_in_dim(drafted, jnp.maximum(fed - 1, 0), step, 0)
        return step + 1, state, out, drafted, judged.adjust

    carry = (jnp.int32(0), state, out, drafted, adjust)
    if loops:
        _, state, out, drafted, adjust = jax.lax.while_loop(keep_on, advance, carry)
        return state, adjust, Made(out, drafted=drafted)
    _, state, out, drafted, adjust = advance(carry)
    return state, adjust, Made(out, drafted=drafted, ends=last)


class Window(NamedTuple):
    """The windows of B rows, whose tokens follow one another or branch like `SpeculationConfig.tree`.

    Attributes:
        tokens: int32[B, T]. fed: int32[B] how many of them were fed; 0 for rows that are done.
        most: int32[B] how many may stay.
        base: int32[B] where the windows begin.
        sure: bool[B, T - 1] drafts that are kept unjudged; None for none.
    """

    tokens: jax.Array
    fed: jax.Array
    most: jax.Array
    base: jax.Array
    sure: jax.Array | None = None


class Judged(NamedTuple):
    """What became of a window.

    Attributes:
        sampled: tokens int32[D, B] that were drawn, and their log-probabilities or None. D is the most that can be.
        count: int32[B] how many of them count, from the first on, and so how many of the window's tokens stay.
        last: int32[B] the token to feed next; -1 after a stop token.
        adjust: as `choose` returns it.
        path: int32[B, D] the numbers of the tokens that stay, where they branch; else None.
    """

    sampled: Sampled
    count: jax.Array
    last: jax.Array
    adjust: Adjust | None
    path: jax.Array | None


def last_of(judged: Judged) -> jax.Array:
    """The numbers int32[B] of the last tokens that stay; 0 where none does."""
    last = jnp.maximum(judged.count - 1, 0)
    if judged.path is None:
        return last
    return jnp.take_along_axis(judged.path, last[:, None], axis=1)[:, 0]


def note(
    params: dict,
    state: State,
    h: jax.Array,
    position: jax.Array,
    judged: Judged,
    which: jax.Array,
    model: Model,
) -> State:
    """Writes down for drafters what was drawn, and the hidden state of the last token that stays.

    Args:
        h: [B, T, D] of the window's tokens, before the last norm.
        position: int32[B] of the first one. which: bool[B] rows that have a new last token.
    """
    rows = jnp.arange(h.shape[0])
    if "hidden" in state.drafting:
        last = jnp.take_along_axis(h, last_of(judged)[:, None, None], axis=1)[:, 0]
        state = kept.note_hidden(params, state, rows, last, which, model)
    return kept.note_tokens(state, rows, position + 1, judged.sampled.tokens.T, judged.count)


def judge(
    logits: jax.Array,
    window: Window,
    batch: jax.Array,
    layout: Layout,
    num_logprobs: int,
    adjust: Adjust | None,
    model: Model,
) -> Judged:
    """Draws the token after each token of a window, one after the other, as long as it is what was drafted.

    A draft that is kept unjudged counts as drawn. Rows whose logits are adjusted have all of theirs judged.

    Args:
        logits: float32[T, B, V] after each token.
        batch, layout, num_logprobs, adjust: as in `choose`.
    """
    tokens, fed, most, base, sure = window
    width, num_rows, _ = logits.shape
    ring_rows = jnp.arange(num_rows)
    speculation = model.speculation
    tree = None if speculation is None else speculation.tree
    depth = 1 if speculation is None else speculation.most_tokens
    parents = jnp.array((-1, *(tree or ())), jnp.int32)

    def draft_behind(t) -> jax.Array:
        """The draft after token t of each row, int32[B]."""
        place = jnp.minimum(t + 1, width - 1)
        return jax.lax.dynamic_index_in_dim(tokens, place, axis=1, keepdims=False)

    def level(t, judged: Judged, going: jax.Array) -> tuple[Judged, jax.Array]:
        """One token more of each row that goes on."""
        if judged.path is None:
            of_one = jax.lax.dynamic_index_in_dim(logits, t, keepdims=False)
        else:
            node = jax.lax.dynamic_index_in_dim(judged.path, t, axis=1, keepdims=False)
            of_one = _logits_of(logits, node)
        unjudged = None
        if sure is not None:
            own = jax.lax.dynamic_index_in_dim(sure, jnp.minimum(t, width - 2), 1, keepdims=False)
            unjudged = draft_behind(t), own & (t + 1 < fed)
        new, feed, adjust = choose(
            of_one,
            batch,
            layout,
            base + t + 1,
            going,
            num_logprobs,
            judged.adjust,
            ring_rows,
            model.backend.sampling,
            unjudged,
        )
        put = lambda old, value: jax.lax.dynamic_update_index_in_dim(old, value, t, 0)  # noqa: E731
        path, more = judged.path, t + 1 < most
        if path is None:
            more &= (t + 1 < fed) & (feed == draft_behind(t))
        else:
            follows = (parents == node[:, None]) & (tokens == feed[:, None])
            follows &= jnp.arange(width) < fed[:, None]
            more &= follows.any(1) & (t + 1 < depth)
            child = jnp.argmax(follows, axis=1).astype(jnp.int32)
            here = (jnp.arange(depth) == t + 1) & (going & more)[:, None]
            path = jnp.where(here, child[:, None], path)
        judged = Judged(
            jax.tree.map(put, judged.sampled, new),
            judged.count + going.astype(jnp.int32),
            jnp.where(going, feed, judged.last),
            adjust,
            path,
        )
        return judged, going & more

    judged = Judged(
        room_for(depth, num_rows, num_logprobs, model),
        jnp.zeros_like(base),
        jnp.full_like(base, -1),
        adjust,
        None if tree is None else jnp.zeros((num_rows, depth), jnp.int32),
    )
    going = fed > 0
    if not model.backend.branches:  # a loop would make the device wait for the host
        for t in range(depth):
            judged, going = level(t, judged, going)
        return judged

    def on(carry):
        t, _, going = carry
        return (t < depth) & going.any()

    def one(carry):
        t, judged, going = carry
        return t + 1, *level(t, judged, going)

    return jax.lax.while_loop(on, one, (jnp.int32(0), judged, going))[1]


def _logits_of(logits: jax.Array, node: jax.Array) -> jax.Array:
    """From logits float32[T, B, V], those of one token of each row, float32[B, V]."""
    _, num_rows, vocab = logits.shape
    parts = [jax.lax.dynamic_slice(logits, (node[b], b, 0), (1, 1, vocab)) for b in range(num_rows)]
    return jnp.concatenate(parts, axis=1)[0]


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

    def rest_of_step(self, bucket: DecodeBucket, number: int, before: Made | None) -> tuple:
        none: np.ndarray = np.zeros(bucket.rows, np.int32)
        return np.int32(number), none if before is None else before.ends

    def drawn_at(self, row: DecodeRow, line: int) -> list[tuple[int, ...]]:
        return [(place, line) for place in range(row.num_steps * deepest(self.engine))]

    def unpack(self, rows: Sequence[DecodeRow], results: Results) -> None:
        super().unpack(rows, results)
        unpack_verified(rows, results, deepest(self.engine))


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


def deepest(engine: EngineConfig) -> int:
    """The most tokens that a window may bring."""
    return 1 if engine.speculation is None else engine.speculation.most_tokens


def unpack_verified(rows: Sequence[DecodeRow], results: Results, width: int) -> None:
    """Tells rows how many draft tokens each window had that may bring `width` tokens, and how many were accepted."""
    if width == 1:
        return
    tokens, drafted = results.sampled.tokens, results.drafted
    counts = (tokens >= 0).reshape(-1, width, tokens.shape[1]).sum(1)  # [steps, B]
    for row in rows:
        windows = zip(drafted[:, row.row].tolist(), counts[:, row.row].tolist(), strict=True)
        row.verified = [(given, count - 1) for given, count in windows if count]

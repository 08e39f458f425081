"""Decode: several tokens for each row, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.engine import frames, kept, pack
from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.mixers.mixer import WindowRows
from hybrid_jax.engine.on_matrices import on_matrices
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import Sampled, logprobs
from hybrid_jax.engine.steps.step import Made, StepKind, Work
from hybrid_jax.engine.walk import Cursor, cursor, fold_full, prepare, window
from hybrid_jax.models import decoder
from hybrid_jax.schedule.bucket import DecodeBucket
from hybrid_jax.schedule.plan import DecodeRow, Plan, PrefillRow
from hybrid_jax.state import Model, State


@on_matrices
def decode(
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
    loops: bool = True,
) -> tuple[State, Adjust | None, Made]:
    """Up to `num_steps` decode steps of the first B ring rows.

    A step first folds the rows whose ring is full, then feeds each row's token, and samples the next one. A row goes on
    until its own `num_tokens` or a stop token. A stop token marks it as stopped for later dispatches too.

    Args:
        adjust: None if no row's logits are adjusted.
        batch: int32[B, layout.size]; a row with num_tokens 0 is inert.
        num_steps: int32[] steps of the loop, at most max_steps. Without a loop, how many steps of the dispatch came
            before this one.
        loops: the program has the loop over steps. Without, it is one step of a dispatch, and max_steps is 1.

    Returns:
        State, adjust, and tokens int32[max_steps, B], which are -1 where a row took no step.
    """
    num_rows = batch.shape[0]
    get = lambda name: layout.get(batch, name)  # noqa: E731
    table = pack.get_pages(layout, batch, model.geometry.frames_per_page)
    limits, fold_slot = get("num_tokens"), get("fold_slot")
    if not loops:
        limits = limits - num_steps
    lengths = state.lengths[:num_rows]
    start = cursor(lengths, get("checkpoint"), get("read_slot"), fold_slot, model)
    shared = prepare(params, model)
    out = room_for(max_steps, num_rows, num_logprobs, model)

    def going(step, state):
        return (state.tokens[:num_rows] >= 0) & (step < limits)

    def keep_on(carry):
        step, state, *_ = carry
        return (step < num_steps) & going(step, state).any()

    def advance(carry):
        step, state, at, out, adjust = carry
        alive = going(step, state)
        if model.geometry.has_state:
            with jax.named_scope("fold"):
                state, at = fold_full(state, at, alive, fold_slot, shared, model)
        position = at.position
        rows = WindowRows(
            tokens=state.tokens[:num_rows, None],
            base=position,
            begin=jnp.where(alive, position, 0),
            end=jnp.where(alive, position + 1, 0),
            checkpoint=at.checkpoint,
            slot=at.slot,
            table=table,
        )
        h, state = window(params, state, rows, shared=shared, model=model)
        with jax.named_scope("sample"):
            logits = decoder.logits(params, h[:, 0], model.config)
            ring_rows = jnp.arange(num_rows)
            state = kept.note_hidden(params, state, ring_rows, h[:, 0], alive, model)
            new, fed, adjust = choose(
                logits,
                batch,
                layout,
                position + 1,
                alive,
                num_logprobs,
                adjust,
                ring_rows,
                model.backend.sampling,
            )
            out = store(out, step, jax.tree.map(lambda one: one[None], new), alive)
            count = alive.astype(jnp.int32)
            state = kept.note_tokens(state, ring_rows, position + 1, fed[:, None], count)
            fed = jnp.where(alive, fed, state.tokens[:num_rows])
            state = state.replace(tokens=state.tokens.at[:num_rows].set(fed))
        at = at._replace(position=position + alive.astype(jnp.int32))
        if model.backend.launches:
            # These change only once the whole step has read the old ones. Otherwise XLA would launch a copy of each.
            zero = frames.zero_after(state, new.tokens)
            at = Cursor(*(number + zero for number in at))
        # As a sum and not as a slice, which XLA would copy outside the step's command buffer.
        longer = jnp.pad(alive.astype(jnp.int32), (0, state.lengths.shape[0] - num_rows))
        state = state.replace(lengths=state.lengths + longer)
        return step + 1, state, at, out, adjust

    carry = (jnp.int32(0), state, start, out, adjust)
    if loops:
        _, state, _, out, adjust = jax.lax.while_loop(keep_on, advance, carry)
    else:
        _, state, _, out, adjust = advance(carry)
    return state, adjust, Made(out)


def room_for(lines: int, num_rows: int, num_logprobs: int, model: Model) -> Sampled:
    """Room for so many tokens of each row, none of which is drawn yet, and for what is reported of them."""

    def blank(of_line: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((lines, *of_line.shape), of_line.dtype)

    drawn = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    out = Sampled(blank(drawn) - 1, None)
    if num_logprobs:
        logits = jax.ShapeDtypeStruct((num_rows, model.config.vocab_size), jnp.float32)
        found = jax.eval_shape(functools.partial(logprobs, count=num_logprobs), logits, drawn)
        out = out._replace(logprobs=jax.tree.map(blank, found))
    return out


def store(out: Sampled, line: jax.Array, new: Sampled, drawn: jax.Array) -> Sampled:
    """Writes one step's results [T, B] from one line of the output on; `drawn` bool[T, B] or [B] says which count."""
    new = new._replace(tokens=jnp.where(drawn, new.tokens, -1))
    put = lambda old, value: jax.lax.dynamic_update_slice_in_dim(old, value, line, 0)  # noqa: E731
    return jax.tree.map(put, out, new)


class Decode(StepKind):
    """See `decode`. The line of each row is its ring row."""

    name = "decode"
    steps = True
    numbers = ("checkpoint", "read_slot", "fold_slot", "num_tokens")
    run = staticmethod(decode)

    def buckets(self) -> list[DecodeBucket]:
        return sorted(
            DecodeBucket(rows, self.shapes.steps_of(self.tokens), width, self.tokens)
            for rows in self.shapes.decode_rows
            for width in self.shapes.widths(self.max_pages)
        )

    def bucket(self, rows: Sequence[DecodeRow | PrefillRow], before: object) -> DecodeBucket:
        return self.shapes.decode_bucket(
            num_rows=max(row.row for row in rows) + 1,
            num_pages=max(len(row.pages) for row in rows),
            max_pages=self.max_pages,
            tokens=self.tokens,
        )

    def cost(self, bucket: DecodeBucket) -> tuple[int, int]:
        return 1, 64 * bucket.rows

    def work(self, bucket: DecodeBucket, rows: Sequence[DecodeRow | PrefillRow]) -> Work:
        steps = max((row.num_steps for row in rows if isinstance(row, DecodeRow)), default=1)
        return Work(num_tokens := steps * bucket.rows * bucket.tokens, num_tokens)

    def static(self, bucket: DecodeBucket) -> Mapping[str, int]:
        return {"max_steps": bucket.steps}

    def dispatches(self, plan: Plan) -> list[list[DecodeRow]]:
        return [plan.decode] if plan.window == 1 else []

    def foreseen(self, plan: Plan) -> list[list[DecodeRow | PrefillRow]]:
        """Adds the rows whose prompt ends in this plan, because they decode next."""
        begun = [row for row in plan.prefill if row.samples and row.request.max_tokens > 1]
        return [[*rows, *begun] for rows in self.dispatches(plan)]

    def layout(self, bucket: DecodeBucket) -> Layout:
        per_page = self.model.geometry.frames_per_page
        return pack.row_layout(self.numbers, *pack.page_fields(bucket.width, per_page))

    def num_steps(self, rows: Sequence[DecodeRow]) -> int:
        return max(row.num_steps for row in rows)

    def rest(self, rows: Sequence[DecodeRow], before: Made | None) -> tuple:
        return (np.int32(self.num_steps(rows)),)

    def rest_of_step(self, bucket: DecodeBucket, number: int, before: Made | None) -> tuple:
        return (np.int32(number),)

    def inert(self, bucket: DecodeBucket) -> tuple:
        return (np.int32(0),)

    def line(self, row: DecodeRow, index: int) -> int:
        return row.row

    def drawn_at(self, row: DecodeRow, line: int) -> list[tuple[int, ...]]:
        return [(step, line) for step in range(row.num_steps)]

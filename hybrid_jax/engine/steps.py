"""The jitted steps: prefill a chunk, decode several tokens, and the small programs around them.

Every step takes the weights, the donated state and one int32 array of rows, and returns the state with
what it sampled. Shapes come from the bucket alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.engine import blocks
from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.blocks import Model
from hybrid_jax.engine.chunk import ChunkRows, chunk
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import Logprobs, Sampled, logprobs
from hybrid_jax.engine.window import FOLDS, WindowRows, window
from hybrid_jax.geometry import PROMPT_POSITIONS
from hybrid_jax.models import decoder
from hybrid_jax.state import State


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
) -> tuple[State, Adjust | None, Sampled]:
    """Up to `num_steps` decode steps of the first B ring rows.

    A step folds first the rows whose ring is full, then feeds each row's token, and samples the next. A row
    goes on until its own `num_steps` or a stop token, which marks it stopped for later dispatches too.

    Args:
        adjust: None where no row's logits are adjusted.
        batch: int32[B, layout.size]; a row with num_steps 0 is inert.
        num_steps: int32[] steps of the loop, at most max_steps.

    Returns:
        State, adjust, and tokens int32[max_steps, B], -1 where a row took no step.
    """
    num_rows = batch.shape[0]
    get = lambda name: layout.get(batch, name)  # noqa: E731
    table = get("table").reshape(num_rows, max(model.geometry.frames_per_page, 1), -1)
    limits, fold_slot = get("num_steps"), get("fold_slot")
    has_state = model.geometry.has_state
    rates = blocks.all_rates(params, model) if has_state else None
    vocab = model.config.vocab_size

    def blank(*shape, dtype):
        return jnp.zeros((max_steps, num_rows, *shape), dtype)

    out = Sampled(blank(dtype=jnp.int32) - 1, None)
    if num_logprobs:
        count = min(num_logprobs, vocab)
        out = out._replace(
            logprobs=Logprobs(
                blank(dtype=jnp.float32),
                blank(dtype=jnp.int32),
                blank(count, dtype=jnp.int32),
                blank(count, dtype=jnp.float32),
            )
        )

    def going(step, state):
        return (state.tokens[:num_rows] >= 0) & (step < limits)

    def keep_on(carry):
        step, state, *_ = carry
        return (step < num_steps) & going(step, state).any()

    def advance(carry):
        step, state, position, checkpoint, slot, out, adjust = carry
        alive = going(step, state)
        if has_state:
            with jax.named_scope("fold"):
                full = alive & (position - checkpoint == model.geometry.grain)
                fold_rows = FOLDS[model.kernels]
                state = fold_rows(state, full, checkpoint, slot, fold_slot, rates, model)
                checkpoint = jnp.where(full, position, checkpoint)
                slot = jnp.where(full, fold_slot, slot)
        rows = WindowRows(
            tokens=state.tokens[:num_rows, None],
            base=position,
            begin=jnp.where(alive, position, 0),
            end=jnp.where(alive, position + 1, 0),
            checkpoint=checkpoint if has_state else position,
            slot=slot,
            table=table,
        )
        h, state = window(params, state, rows, rates=rates, model=model)
        with jax.named_scope("sample"):
            logits = decoder.logits(params, h[:, 0], model.config, model.kernels)
            lines = jnp.arange(num_rows)
            new, fed, adjust = choose(
                logits,
                batch,
                layout,
                position + 1,
                alive,
                num_logprobs,
                adjust,
                lines,
                model.sampler,
            )
            out = _store(out, step, new, alive)
            fed = jnp.where(alive, fed, state.tokens[:num_rows])
            state = state.replace(tokens=state.tokens.at[:num_rows].set(fed))
        position = position + alive.astype(jnp.int32)
        if model.kernels == "pallas":
            # Once all of this step has read the old ones, or XLA would launch a copy of each.
            zero = blocks.zero_after(state, new.tokens)
            position, checkpoint, slot = position + zero, checkpoint + zero, slot + zero
        return step + 1, state, position, checkpoint, slot, out, adjust

    start = get("position"), get("checkpoint"), get("read_slot")
    carry = (jnp.int32(0), state, *start, out, adjust)
    _, state, _, _, _, out, adjust = jax.lax.while_loop(keep_on, advance, carry)
    return state, adjust, out


def _store(out: Sampled, step, new: Sampled, alive) -> Sampled:
    """Writes one step's results at its line of the output."""
    new = new._replace(tokens=jnp.where(alive, new.tokens, -1))
    put = lambda old, value: jax.lax.dynamic_update_index_in_dim(old, value, step, 0)  # noqa: E731
    return jax.tree.map(put, out, new)


def prefill(
    params: dict,
    state: State,
    adjust: Adjust | None,
    batch: jax.Array,
    *,
    model: Model,
    layout: Layout,
    num_logprobs: int,
    logits_rows: int = 0,
) -> tuple[State, Adjust | None, Sampled, jax.Array, jax.Array]:
    """One prompt chunk per row, from a checkpoint at its start to a checkpoint and a ring tail at its end.

    Args:
        batch: int32[R, layout.size]; a padding row names the sink's ring row and has length 0.
        logits_rows: lines that the logits are padded to, for forks.

    Returns:
        State, adjust, tokens int32[R] (meaningless where a row does not sample), their logits
        float32[max(R, logits_rows), V], and the hidden states [R, T, D].
    """
    geometry, num_rows = model.geometry, batch.shape[0]
    get = lambda name: layout.get(batch, name)  # noqa: E731
    tokens, start, length, state_len = get("tokens"), get("start"), get("length"), get("state_len")
    end = start + length
    if geometry.has_pages:
        arena = blocks.copy_pages(state.arena, get("sources"), get("targets"), model)
        state = state.replace(arena=arena)
    rows = ChunkRows(
        tokens=tokens,
        start=start,
        length=length,
        state_len=state_len,
        row=get("row"),
        read=blocks.slot_frames(state, get("read_slot")),
        write=blocks.slot_frames(state, get("write_slot")),
        table=get("table").reshape(num_rows, max(geometry.frames_per_page, 1), -1),
    )
    h, state = chunk(params, state, rows, model=model)
    with jax.named_scope("sample"):
        last = blocks.slice_tokens(h, jnp.maximum(length - 1, 0), 1)[:, 0]
        logits = decoder.logits(params, last, model.config, model.kernels)
        state, adjust, sampled = _first_tokens(
            state, adjust, logits, batch, end, get("samples") > 0, layout, num_logprobs, model
        )
        logits = jnp.pad(logits, ((0, max(0, logits_rows - num_rows)), (0, 0)))
    return state, adjust, sampled, logits, h


def prompt_logprobs(
    params: dict, h: jax.Array, tokens: jax.Array, *, model: Model, num_logprobs: int
) -> Sampled:
    """Log-probabilities of given tokens, a few positions at a time.

    Args:
        h: [R, T, D] hidden states before the last norm.
        tokens: int32[R, T] the token that follows each position.

    Returns:
        tokens and logprobs, int32[R, T] and so on.
    """
    count = min(num_logprobs, model.config.vocab_size)

    def blocks_of(x):
        x = x.reshape(-1, *x.shape[2:])
        x = jnp.pad(x, ((0, -x.shape[0] % PROMPT_POSITIONS), *((0, 0) for _ in x.shape[1:])))
        return x.reshape(-1, PROMPT_POSITIONS, *x.shape[1:])

    def some(block):
        return logprobs(decoder.logits(params, block[0], model.config), block[1], count)

    found = jax.lax.map(some, (blocks_of(h), blocks_of(tokens)))

    def whole(x):
        return x.reshape(-1, *x.shape[2:])[: tokens.size].reshape(*tokens.shape, *x.shape[2:])

    found = jax.tree.map(whole, found)
    return Sampled(tokens, found)


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
) -> tuple[State, Adjust | None, Sampled]:
    """Rows that go on behind another row's prompt: its ring, its last page, a first token of their own.

    Args:
        batch: int32[F, layout.size], real rows first; a padding row names the sink's ring row.
        logits: float32[R, V] of the prefill that the prompts ended in.
        count: int32[] real rows.

    Returns:
        State, adjust, and tokens int32[F].
    """
    get = lambda name: layout.get(batch, name)  # noqa: E731
    if model.geometry.has_pages:
        arena = blocks.copy_pages(state.arena, get("sources"), get("targets"), model)
        state = state.replace(arena=arena)
    source, target = get("source"), get("row")
    if model.geometry.has_state:

        def copy(i, rings):
            return [_copy_row(ring, source[i], target[i]) for ring in rings]

        rings = jax.lax.fori_loop(0, count, copy, [state.conv, state.xB, state.dt])
        state = state.replace(conv=rings[0], xB=rings[1], dt=rings[2])
    with jax.named_scope("sample"):
        own = logits[get("line")]  # [F, V]
        samples = jnp.ones(target.shape, bool)
        return _first_tokens(
            state, adjust, own, batch, get("position"), samples, layout, num_logprobs, model
        )


def _first_tokens(
    state: State,
    adjust,
    logits,
    batch,
    positions,
    samples,
    layout: Layout,
    num_logprobs: int,
    model: Model,
) -> tuple[State, Adjust | None, Sampled]:
    """Samples rows' first tokens and leaves them, or the mark of a stop, where decode will find them."""
    row = layout.get(batch, "row")
    sampled, fed, adjust = choose(
        logits, batch, layout, positions, samples, num_logprobs, adjust, row, model.sampler
    )
    tokens = state.tokens
    for r in range(row.shape[0]):
        tokens = jax.lax.dynamic_update_slice(tokens, fed[r : r + 1], (row[r],))
    return state.replace(tokens=tokens), adjust, sampled


def write_slots(state: State, ids: jax.Array, frames: jax.Array) -> State:
    """Lines int32[n, F] of the slot table; padding repeats a real line."""
    return state.replace(slots=state.slots.at[ids].set(frames))


def move_row(state: State, source: jax.Array, target: jax.Array) -> State:
    """Moves one ring row to another place; the source is left stopped."""

    token = jax.lax.dynamic_slice(state.tokens, (source,), (1,))
    tokens = jax.lax.dynamic_update_slice(state.tokens, token, (target,))
    tokens = jax.lax.dynamic_update_slice(tokens, jnp.full(1, -1, jnp.int32), (source,))
    conv, xB, dt = (_copy_row(ring, source, target) for ring in (state.conv, state.xB, state.dt))
    return state.replace(conv=conv, xB=xB, dt=dt, tokens=tokens)


def _copy_row(ring: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    part = jax.lax.dynamic_slice(ring, (0, source, 0, 0), (ring.shape[0], 1, *ring.shape[2:]))
    return blocks.put_row(ring, part, target)

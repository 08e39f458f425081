"""The jitted steps: prefill a chunk, decode several tokens, and the small programs around them.

Every step takes the weights, the donated state and one int32 array of rows, and returns the state with
what it sampled. Shapes come from the bucket alone.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from hybrid_jax.config import Attention
from hybrid_jax.engine import blocks, fused
from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.blocks import Model
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import Logprobs, Sampled, logprobs
from hybrid_jax.engine.window import FOLDS, WindowRows, window
from hybrid_jax.geometry import PROMPT_POSITIONS
from hybrid_jax.layers import mamba2
from hybrid_jax.models import decoder
from hybrid_jax.state import State, from_bits


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
        h, state = window(params, state, rows, model=model)
        with jax.named_scope("sample"):
            logits = decoder.logits(params, h[:, 0], model.config)
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
                model.kernels,
            )
            out = _store(out, step, new, alive)
            fed = jnp.where(alive, fed, state.tokens[:num_rows])
            state = state.replace(tokens=state.tokens.at[:num_rows].set(fed))
        position = position + alive.astype(jnp.int32)
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
) -> tuple[State, Adjust | None, Sampled, jax.Array, jax.Array]:
    """One prompt chunk per row, from a checkpoint at its start to a checkpoint and a ring tail at its end.

    Args:
        batch: int32[R, layout.size]; a padding row names the sink's ring row and has length 0.

    Returns:
        State, adjust, tokens int32[R] (meaningless where a row does not sample), their logits
        float32[R, V], and the hidden states [R, T, D].
    """
    config, geometry = model.config, model.geometry
    num_rows = batch.shape[0]
    get = lambda name: layout.get(batch, name)  # noqa: E731
    tokens, start, length, state_len = get("tokens"), get("start"), get("length"), get("state_len")
    table = get("table").reshape(num_rows, max(geometry.frames_per_page, 1), -1)
    exists = start > 0
    end = start + length
    valid = jnp.arange(tokens.shape[1]) < length[:, None]
    arena = state.arena
    if geometry.has_pages:
        arena = blocks.copy_pages(arena, get("sources"), get("targets"), model)
    read, write = state.slots[get("read_slot")], state.slots[get("write_slot")]
    tails = ()
    attention_layers, recurrent_layers = itertools.count(), itertools.count()

    def mix(weights: dict, normed: jax.Array, spec: decoder.Mixer) -> jax.Array:
        nonlocal arena, tails
        if isinstance(spec, Attention):
            index = next(attention_layers)
            out, arena = blocks.attend_pages(
                weights, normed, arena, table, start, start, end, index, spec, model
            )
            return out
        number = next(recurrent_layers)
        if model.kernels == "pallas":
            history = blocks.read_layer_conv(arena, read, exists, number, model)
            started = exists.astype(jnp.int32)
            place = (arena, read, write, started, history, length, state_len, number)
            out, arena, tail = fused.mix_chunk(weights, normed, *place, spec, model)
            tails = _join(tails, tail, number, model)
            return out
        own = blocks.layer_frames(read, number, model)
        old = blocks.read_layer_state(arena, own, exists, model)
        # Read per layer: one read for all would be fused into places past the next write.
        history = from_bits(blocks.read_layer_conv(arena, read, exists, number, model))
        out, new, columns, records = mamba2.scan(
            weights, normed, old, history, length, state_len, spec
        )
        tail = _tail(columns, records, length, state_len, spec, model)
        tails = _join(tails, tail, number, model)
        # After the tails, or XLA keeps what they are cut from until the end: 271 in place of 86 MB for 512 tokens
        # of 173 M weights.
        own = blocks.layer_frames(write, number, model) + blocks.zero_after(state, *tails)
        arena = blocks.write_layer_state(arena, own, new, model)
        return out

    h = decoder.walk(params, tokens, valid, config, mix)
    state = state.replace(arena=arena)
    if tails:
        if model.kernels == "xla":
            # Attention layers may follow the last recurrent one: their reads come before this write too.
            write = write + blocks.zero_after(state, h)
        state = _write_tails(state, tails, get("row"), write, model)
    with jax.named_scope("sample"):
        last = blocks.slice_tokens(h, jnp.maximum(length - 1, 0), 1)[:, 0]
        logits = decoder.logits(params, last, config)
        state, adjust, sampled = _first_tokens(
            state, adjust, logits, batch, end, get("samples") > 0, layout, num_logprobs, model
        )
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


def _tail(columns, records, length, state_len, spec, model: Model):
    """One layer's share of the ring and of the checkpoint after a chunk, as bits."""
    history, grain = spec.conv_width - 1, model.geometry.grain
    return (
        blocks.ring_bits(blocks.slice_tokens(columns, length, history), model),
        blocks.ring_bits(blocks.slice_tokens(records.xB, state_len, grain), model),
        blocks.slice_tokens(records.dt, state_len, grain),
        blocks.ring_bits(blocks.slice_tokens(columns, state_len, history), model),
    )


def _join(tails: tuple, tail: tuple, layer: int, model: Model) -> tuple:
    """The layers' tails [L, R, ...] with one more layer's in its place; none yet in an empty tuple."""
    layers = model.geometry.num_mamba2
    tails = tails or tuple(jnp.zeros((layers, *part.shape), part.dtype) for part in tail)
    put = jax.lax.dynamic_update_index_in_dim
    return tuple(put(all_, part, layer, 0) for all_, part in zip(tails, tail, strict=True))


def _write_tails(state: State, tails: tuple, row, write_frames_, model: Model) -> State:
    conv, xB, dt, checkpoint_conv = tails
    arena = blocks.write_conv(state.arena, write_frames_, checkpoint_conv, model)
    rings = [state.conv, state.xB, state.dt]
    for r in range(row.shape[0]):
        rings = [
            blocks.put_row(ring, tail[:, r : r + 1], row[r])
            for ring, tail in zip(rings, (conv, xB, dt), strict=True)
        ]
    return state.replace(arena=arena, conv=rings[0], xB=rings[1], dt=rings[2])


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
        logits, batch, layout, positions, samples, num_logprobs, adjust, row, model.kernels
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

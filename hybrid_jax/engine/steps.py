"""The jitted steps: prefill a chunk, decode several tokens, and the small programs around them.

Every step takes the weights, the donated state and one int32 array of rows, and returns the state with
what it sampled. Shapes come from the bucket alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import Attention
from hybrid_jax.engine import blocks
from hybrid_jax.engine.blocks import Model
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import (
    Logprobs,
    Sampled,
    logprobs,
    sample,
    stopped,
    unpack_sampling,
)
from hybrid_jax.engine.window import WindowRows, window
from hybrid_jax.layers import mamba2
from hybrid_jax.models import decoder
from hybrid_jax.state import State, from_bits
from pallas_kernels.frame_io import copy_frames


def decode(
    params: dict,
    state: State,
    batch: jax.Array,
    num_steps: jax.Array,
    *,
    model: Model,
    layout: Layout,
    max_steps: int,
    num_logprobs: int,
) -> tuple[State, Sampled]:
    """Up to `num_steps` decode steps of the first B ring rows.

    A step folds first the rows whose ring is full, then feeds each row's token, and samples the next. A row
    goes on until its own `num_steps` or a stop token, which marks it stopped for later dispatches too.

    Args:
        batch: int32[B, layout.size]; a row with num_steps 0 is inert.
        num_steps: int32[] steps of the loop, at most max_steps.

    Returns:
        The state, and tokens int32[max_steps, B], -1 where a row took no step.
    """
    num_rows = batch.shape[0]
    get = lambda name: layout.get(batch, name)  # noqa: E731
    sampling = unpack_sampling(layout, batch)
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
        step, state, position, checkpoint, slot, out = carry
        alive = going(step, state)
        if has_state:
            with jax.named_scope("fold"):
                full = alive & (position - checkpoint == model.geometry.grain)
                state = blocks.fold_rows(state, full, checkpoint, slot, fold_slot, rates, model)
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
            tokens = sample(logits, sampling, position + 1)
            out = _store(out, step, tokens, alive, logits, num_logprobs)
            fed = jnp.where(stopped(tokens, sampling), -1, tokens)
            fed = jnp.where(alive, fed, state.tokens[:num_rows])
            state = state.replace(tokens=state.tokens.at[:num_rows].set(fed))
        return step + 1, state, position + alive.astype(jnp.int32), checkpoint, slot, out

    carry = (jnp.int32(0), state, get("position"), get("checkpoint"), get("read_slot"), out)
    _, state, _, _, _, out = jax.lax.while_loop(keep_on, advance, carry)
    return state, out


def _store(out: Sampled, step, tokens, alive, logits, num_logprobs) -> Sampled:
    """Writes one step's results at its line of the output."""
    line = jnp.where(alive, tokens, -1)[None]
    kept = jax.lax.dynamic_update_slice(out.tokens, line, (step, 0))
    if not num_logprobs:
        return Sampled(kept, None)
    new = logprobs(logits, tokens, out.logprobs.ids.shape[-1])
    put = lambda old, value: jax.lax.dynamic_update_index_in_dim(old, value, step, 0)  # noqa: E731
    return Sampled(kept, jax.tree.map(put, out.logprobs, new))


def prefill(
    params: dict,
    state: State,
    batch: jax.Array,
    *,
    model: Model,
    layout: Layout,
    num_logprobs: int,
) -> tuple[State, Sampled]:
    """One prompt chunk per row, from a checkpoint at its start to a checkpoint and a ring tail at its end.

    Args:
        batch: int32[R, layout.size]; a padding row names the sink's ring row and has length 0.

    Returns:
        The state, and tokens int32[R] (meaningless where a row does not sample).
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
        arena = copy_frames(arena, get("sources").reshape(-1), get("targets").reshape(-1))
    read, write = state.slots[get("read_slot")], state.slots[get("write_slot")]
    h = decoder.embed(params, jnp.where(valid, tokens, 0), config)
    num_attention, tails = 0, []
    for index, spec in enumerate(config.layers):
        weights = decoder.layer_params(params, index, config)
        updates = []
        normed = decoder.block_input(weights, "norm", h, config) if spec.mixers else h
        for part, mixer in zip(weights.get("mixers", ()), spec.mixers, strict=True):
            if isinstance(mixer, Attention):
                with jax.named_scope("attention"):
                    out, arena = blocks.attend_pages(
                        part, normed, arena, table, start, start, end, num_attention, mixer, model
                    )
                num_attention += 1
            else:
                with jax.named_scope("mamba2"):
                    number = len(tails)
                    old = blocks.read_layer_state(
                        arena, blocks.layer_frames(read, number, model), exists, model
                    )
                    # Read per layer: one read for all would be fused into places past the next write.
                    history = from_bits(blocks.read_layer_conv(arena, read, exists, number, model))
                    out, new, columns, records = mamba2.scan(
                        part, normed, old, history, length, state_len, mixer
                    )
                    arena = blocks.write_layer_state(
                        arena, blocks.layer_frames(write, number, model), new, model
                    )
                    tails.append(_tail(columns, records, length, state_len, mixer, model))
            updates.append(out)
        if updates:
            h = decoder.add(h, sum(updates[1:], updates[0]), config)
        with jax.named_scope("mlp"):
            h = decoder.feed_forward(weights, h, valid, spec, config)
    state = state.replace(arena=arena)
    if tails:
        # Attention layers may follow the last recurrent one: their reads come before this write too.
        write = write + blocks.zero_after(state, h)
        state = _write_tails(state, tails, get("row"), write, model)
    with jax.named_scope("sample"):
        last = blocks.slice_tokens(h, jnp.maximum(length - 1, 0), 1)[:, 0]
        sampled, state = _first_token(
            params,
            state,
            last,
            batch,
            end,
            get("samples") > 0,
            get("row"),
            layout,
            model,
            num_logprobs,
        )
    return state, sampled


def _tail(columns, records, length, state_len, spec, model: Model):
    """One layer's share of the ring and of the checkpoint after a chunk, as bits."""
    history, grain = spec.conv_width - 1, model.geometry.grain
    return (
        blocks.ring_bits(blocks.slice_tokens(columns, length, history), model),
        blocks.ring_bits(blocks.slice_tokens(records.xB, state_len, grain), model),
        blocks.slice_tokens(records.dt, state_len, grain),
        blocks.ring_bits(blocks.slice_tokens(columns, state_len, history), model),
    )


def _write_tails(state: State, tails: list, row, write_frames_, model: Model) -> State:
    conv, xB, dt, checkpoint_conv = (jnp.stack(parts) for parts in zip(*tails, strict=True))
    arena = blocks.write_conv(state.arena, write_frames_, checkpoint_conv, model)
    rings = [state.conv, state.xB, state.dt]
    for r in range(row.shape[0]):
        rings = [
            blocks.put_row(ring, tail[:, r : r + 1], row[r])
            for ring, tail in zip(rings, (conv, xB, dt), strict=True)
        ]
    return state.replace(arena=arena, conv=rings[0], xB=rings[1], dt=rings[2])


def _first_token(
    params, state: State, last, batch, position, samples, row, layout, model: Model, num_logprobs
):
    """Samples from each row's last hidden state and leaves the token where decode will find it."""
    sampling = unpack_sampling(layout, batch)
    logits = decoder.logits(params, last, model.config)
    tokens = sample(logits, sampling, position)
    fed = jnp.where(samples & ~stopped(tokens, sampling), tokens, -1)
    new_tokens = state.tokens
    for r in range(row.shape[0]):
        new_tokens = jax.lax.dynamic_update_slice(new_tokens, fed[r : r + 1], (row[r],))
    extra = None
    if num_logprobs:
        extra = logprobs(logits, tokens, min(num_logprobs, model.config.vocab_size))
    return Sampled(tokens, extra), state.replace(tokens=new_tokens)


def write_slots(state: State, ids: jax.Array, frames: jax.Array) -> State:
    """Lines int32[n, F] of the slot table; padding repeats a real line."""
    return state.replace(slots=state.slots.at[ids].set(frames))


def move_row(state: State, source: jax.Array, target: jax.Array) -> State:
    """Moves one ring row to another place; the source is left stopped."""

    def move(ring):
        part = jax.lax.dynamic_slice(ring, (0, source, 0, 0), (ring.shape[0], 1, *ring.shape[2:]))
        return jax.lax.dynamic_update_slice(ring, part, (0, target, 0, 0))

    token = jax.lax.dynamic_slice(state.tokens, (source,), (1,))
    tokens = jax.lax.dynamic_update_slice(state.tokens, token, (target,))
    tokens = jax.lax.dynamic_update_slice(tokens, jnp.full(1, -1, jnp.int32), (source,))
    return state.replace(conv=move(state.conv), xB=move(state.xB), dt=move(state.dt), tokens=tokens)

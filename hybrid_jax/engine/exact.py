"""Exact mode's step: prompts and decode through one executable, so their logits agree bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.engine import blocks
from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.blocks import Model
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.engine.window import FOLDS, WindowRows, window
from hybrid_jax.models import decoder
from hybrid_jax.state import State


def exact_step(
    params: dict,
    state: State,
    adjust: Adjust | None,
    batch: jax.Array,
    *,
    model: Model,
    layout: Layout,
    num_logprobs: int,
) -> tuple[State, Adjust | None, Sampled, jax.Array]:
    """Exact mode's only step: grain-aligned windows of [max_rows, grain], for prompts and for decode alike.

    Args:
        batch: int32[max_rows, layout.size]; a row with begin = end is inert. fold_before and fold_after are
            slots or -1: a full ring folded before, or after, the window.

    Returns:
        State, adjust, tokens int32[max_rows], and the hidden states [max_rows, grain, D].
    """
    num_rows = batch.shape[0]
    geometry, config = model.geometry, model.config
    get = lambda name: layout.get(batch, name)  # noqa: E731
    table = get("table").reshape(num_rows, max(geometry.frames_per_page, 1), -1)
    if geometry.has_pages:
        arena = blocks.copy_pages(state.arena, get("sources"), get("targets"), model)
        state = state.replace(arena=arena)
    feeds, base = get("feeds") > 0, get("base")
    alive = (get("end") > get("begin")) & (~feeds | (state.tokens[:num_rows] >= 0))
    checkpoint, slot = get("checkpoint"), get("read_slot")
    rates = blocks.all_rates(params, model) if geometry.has_state else None
    if geometry.has_state:
        full = alive & (get("fold_before") >= 0)
        state = FOLDS[model.kernels](
            state, full, checkpoint, slot, get("fold_before"), rates, model
        )
        slot = jnp.where(full, get("fold_before"), slot)
        checkpoint = jnp.where(full, base, checkpoint)
        state, read = _load_conv(state, alive & (get("load_conv") > 0), checkpoint, slot, model)
        # An attention layer in front writes what this has read, and depends on nothing of it.
        table = table + blocks.zero_after(state, read)
    begin, end = jnp.where(alive, get("begin"), 0), jnp.where(alive, get("end"), 0)
    positions = base[:, None] + jnp.arange(geometry.grain)
    fed = feeds[:, None] & (positions == begin[:, None])
    tokens = jnp.where(fed, state.tokens[:num_rows, None], get("tokens"))
    rows = WindowRows(tokens, base, begin, end, checkpoint, slot, table)
    h, state = window(params, state, rows, rates=rates, model=model)
    if geometry.has_state:
        after = alive & (get("fold_after") >= 0)
        state = FOLDS[model.kernels](
            state, after, checkpoint, slot, get("fold_after"), rates, model
        )
    last = blocks.slice_tokens(h, jnp.maximum(end - base - 1, 0), 1)[:, 0]
    logits = decoder.logits(params, last, config)
    samples = alive & (get("samples") > 0)
    lines = jnp.arange(num_rows)
    sampled, fed, adjust = choose(
        logits, batch, layout, end, samples, num_logprobs, adjust, lines, model.sampler
    )
    fed = jnp.where(alive, fed, state.tokens[:num_rows])
    state = state.replace(tokens=state.tokens.at[:num_rows].set(fed))
    sampled = sampled._replace(tokens=jnp.where(samples, sampled.tokens, -1))
    return state, adjust, sampled, h


def _load_conv(
    state: State, needed: jax.Array, checkpoint, slot, model: Model
) -> tuple[State, jax.Array]:
    """Puts the checkpoint's convolution columns in front of the window of rows that start a chunk.

    Returns:
        State, and what is there only once the arena has been read.
    """
    num_rows = needed.shape[0]
    frames = blocks.slot_frames(state, slot)
    bits = jnp.stack(
        [
            blocks.read_layer_conv(state.arena, frames, checkpoint > 0, layer, model)
            for layer in range(model.geometry.num_mamba2)
        ]
    )
    if model.kernels == "pallas":  # all rows at once; a layer's kernel then has the ring to itself
        history = bits.shape[2]
        old = state.conv[:, :num_rows, :history]
        bits = jnp.where(needed[:, None, None], bits, old)
        return state.replace(conv=state.conv.at[:, :num_rows, :history].set(bits)), bits
    conv, sink = state.conv, state.tokens.shape[0] - 1
    for b in range(num_rows):
        conv = blocks.put_row(conv, bits[:, b : b + 1], jnp.where(needed[b], b, sink))
    return state.replace(conv=conv), conv

"""The way over the layers that every step takes: a window of new tokens, a chunk of a prompt, folds of full rings."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from hybrid_jax.config import Attention
from hybrid_jax.engine import frames, rings
from hybrid_jax.engine.attend import attend_pages
from hybrid_jax.engine.kinds.kind import ChunkRows, Entry, FoldRows, Tail, WindowPlan, WindowRows
from hybrid_jax.engine.kinds.table import first_layers, recurrent_layers, steps_of
from hybrid_jax.engine.model import Model
from hybrid_jax.models import decoder
from hybrid_jax.state import State


def share(params: dict, model: Model) -> tuple[Any, ...]:
    """For each group, what windows and folds need of the weights of all its layers at once."""
    config, groups = model.config, [[] for _ in model.geometry.groups]
    weights = (
        decoder.layer_params(params, index, config)["mixers"][position]
        for index, spec in enumerate(config.layers)
        for position, mixer in enumerate(spec.mixers)
        if not isinstance(mixer, Attention)
    )
    for place, own in zip(model.geometry.states, weights, strict=True):
        groups[place.group].append(own)
    firsts = first_layers(config, model.geometry)
    return tuple(steps_of(at, model).share(groups[at.group]) for at in firsts)


def fold_rows(state: State, rows: FoldRows, shared: tuple[Any, ...], model: Model) -> State:
    """Folds the full rings of some rows into checkpoints."""
    for at in first_layers(model.config, model.geometry):
        state = steps_of(at, model).fold(state, at, rows, shared[at.group], model)
    return state


def window(
    params: dict,
    state: State,
    rows: WindowRows,
    *,
    shared: tuple[Any, ...],
    model: Model,
    commits: bool = True,
) -> tuple[jax.Array, State]:
    """Runs T new tokens per row from checkpoint, ring and pages.

    A row's window begins at its first new token. In exact mode it begins at the checkpoint and is as long as the ring.

    Args:
        shared: as `share` makes it.
        commits: all new tokens stay. With T > 1, either all T tokens are new or the next window begins where this one
            does. If `commits` is false, a call of `commit` must follow.

    Returns:
        h [B, T, D] before the last norm, and the state.
    """
    positions = rows.base[:, None] + jnp.arange(rows.tokens.shape[1])
    valid = (positions >= rows.begin[:, None]) & (positions < rows.end[:, None])  # [B, T]
    own = frames.slot_frames(state, rows.slot)  # [B, F]
    plan = WindowPlan(rows, valid, own, rows.checkpoint > 0, shared, commits)
    attention_layers = itertools.count()
    layers = iter(recurrent_layers(model.config, model.geometry))
    written: list[list[dict[str, Entry]]] = [[] for _ in model.geometry.groups]
    beside = frames.Beside()

    def mix(weights: dict, normed: jax.Array, spec: decoder.Mixer) -> jax.Array:
        nonlocal state
        if isinstance(spec, Attention):
            table, read = rows.table, beside.of(normed)
            if read:  # a recurrent mixer beside this one has read the arena
                table = table + frames.zero_after(state, *read)
            span = (rows.base, rows.begin, rows.end, next(attention_layers))
            out, arena = attend_pages(weights, normed, state.arena, table, *span, spec, model)
            state = state.replace(arena=arena)
            return out
        at = next(layers)
        out, state, entries = steps_of(at, model).window(weights, normed, state, at, plan, model)
        written[at.group].append(entries)
        beside.note(normed, out)
        return out

    h = decoder.walk(params, rows.tokens, valid, model.config, mix, model.kernels)
    for group, entries in enumerate(written):
        if entries[0]:
            state = rings.write_window(state, h, group, entries, plan)
    return h, state


def commit(state: State, count: jax.Array, model: Model) -> State:
    """Lets the first `count` int32[B] tokens of the last window stay: lengths and convolution columns move on by them.

    K, V and records behind them are overwritten by later windows and never read.
    """
    for at in first_layers(model.config, model.geometry):
        state = steps_of(at, model).commit(state, at, count, model)
    return state.replace(lengths=state.lengths.at[: count.shape[0]].add(count))


def chunk(params: dict, state: State, rows: ChunkRows, *, model: Model) -> tuple[jax.Array, State]:
    """Runs a chunk: h [R, T, D] before the last norm, and the state with its checkpoints, pages and rings written."""
    end = rows.start + rows.length
    attention_layers = itertools.count()
    layers = iter(recurrent_layers(model.config, model.geometry))
    tails: dict[int, Tail] = {}
    beside = frames.Beside()

    def mix(weights: dict, normed: jax.Array, spec: decoder.Mixer) -> jax.Array:
        nonlocal state
        if isinstance(spec, Attention):
            span = (rows.start, rows.start, end, next(attention_layers))
            out, arena = attend_pages(weights, normed, state.arena, rows.table, *span, spec, model)
            state = state.replace(arena=arena)
            beside.note(normed, out)
            return out
        at = next(layers)
        out, state, tail = steps_of(at, model).chunk(weights, normed, state, at, rows, model)
        if tail is None:
            return out
        group = at.of(model.geometry)
        joined = rings.join(tails.get(at.group), tail, at.layer, group.num_layers)
        tails[at.group] = joined
        # This write comes after the tails. Otherwise XLA keeps what they are cut from until the end: 271 in place of
        # 86 MB for 512 tokens of 173 M weights.
        # It also comes after the pages, if an attention layer beside this one has read them.
        parts = [part for part in jax.tree.leaves(joined) if part.size]
        own = frames.layer_frames(rows.write, at.layer, group)
        own = own + frames.zero_after(state, *parts, *beside.of(normed))
        state = state.replace(arena=frames.write_state(state.arena, own, tail.state, group))
        return out

    valid = jnp.arange(rows.tokens.shape[1]) < rows.length[:, None]
    h = decoder.walk(params, rows.tokens, valid, model.config, mix, model.kernels)
    if tails:
        # Attention layers may follow the last recurrent one. Their reads must come before this write too.
        write = rows.write + frames.zero_after(state, h)
        for group, joined in tails.items():
            state = rings.write_tails(state, joined, group, write, rows, model)
    return h, state

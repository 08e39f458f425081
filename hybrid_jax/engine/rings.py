"""Rings: reading and writing rows of them, and the writes that XLA does at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.mixer import ChunkRows, CommitRows, Entry, Tail, WindowPlan
from hybrid_jax.state import Model, State, to_bits


def put_row(
    array: jax.Array, value: jax.Array, row: jax.Array, start: jax.Array | int = 0, layer: int = 0
) -> jax.Array:
    """Writes value [l, 1, s, c] into array [L, B, S, C] at one row, from `layer` and `start` on."""
    return jax.lax.dynamic_update_slice(array, value, (layer, row, start, 0))


def copy_row(ring: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """A ring [L, B, S, C] whose row `target` is a copy of `source`."""
    part = jax.lax.dynamic_slice(ring, (0, source, 0, 0), (ring.shape[0], 1, *ring.shape[2:]))
    return put_row(ring, part, target)


def rows_of_tails(state: State, tails: dict[int, Tail], rows: int) -> State:
    """The state with rings of R rows and a sink in the groups of some tails, which hold what these tails have for them.

    XLA would copy whole rings if rows of them were read here and written later. The barrier keeps slices of a chunk out
    of what reads the rings, where XLA makes slices with names of its own (docs/explain/design.md).
    """
    found = state.replace(tokens=jnp.zeros(rows + 1, state.tokens.dtype))
    for group, tail in tails.items():
        own = {}
        for name, ring in state.rings[group].items():
            new = tail.rings[name].values
            room = ring.shape[2] - new.shape[2]
            own[name] = jnp.pad(new, ((0, 0), (0, 1), (0, room), (0, 0)))
        found = found.with_ring(group, **jax.lax.optimization_barrier(own))
    return found


def rows_of(state: State, rows: jax.Array, groups: Sequence[int]) -> State:
    """The state with copies of rows int32[R] of some groups' rings, and a sink, where a chunk has written the rings."""
    found = state.replace(tokens=jnp.zeros(len(rows) + 1, state.tokens.dtype))
    for group in groups:
        taken = jax.tree.map(lambda ring: ring[:, rows], state.rings[group])
        own = jax.tree.map(lambda ring: jnp.pad(ring, ((0, 0), (0, 1), (0, 0), (0, 0))), taken)
        found = found.with_ring(group, **jax.lax.optimization_barrier(own))
    return found


def put_rows(state: State, taken: State, rows: jax.Array, groups: Sequence[int]) -> State:
    """The state with what became of the arena, and of rows int32[R] that `rows_of_tails` or `rows_of` had made."""

    def put(ring: jax.Array, own: jax.Array) -> jax.Array:
        for r in range(rows.shape[0]):
            ring = put_row(ring, own[:, r : r + 1], rows[r])
        return ring

    state = state.replace(arena=taken.arena)
    for group in groups:
        own = jax.tree.map(put, state.rings[group], taken.rings[group])
        state = state.with_ring(group, **own)
    return state


def move_records(
    state: State, group: int, rows: CommitRows, *, after: Sequence[jax.Array] = ()
) -> State:
    """The state in which the records of a path lie together: all of them are read, then written.

    Args:
        after: arrays that exist before any record is read.
    """
    if rows.path is None or rows.start is None:
        return state
    start = rows.start + frames.zero_after(state, *after) if after else rows.start
    sources, targets, moves = rows.moves()
    own, rings = jnp.arange(len(sources))[:, None], dict(state.rings[group])
    sources, targets = start[:, None] + sources, start[:, None] + targets
    for name, ring in rings.items():
        if name != "conv":
            places = jnp.where(moves, targets, ring.shape[2])
            rings[name] = ring.at[:, own, places].set(ring[:, own, sources], mode="drop")
    return state.with_ring(group, **rings)


def slice_tokens(x: jax.Array, starts: jax.Array, count: int) -> jax.Array:
    """From each row of x [B, S, C], `count` consecutive entries from starts int32[B] on: [B, count, C]."""
    x = jnp.pad(x, ((0, 0), (0, count), (0, 0)))
    parts = [
        jax.lax.dynamic_slice(x, (b, starts[b], 0), (1, count, x.shape[2]))
        for b in range(x.shape[0])
    ]
    return jnp.concatenate(parts)


def ring_bits(x: jax.Array, model: Model) -> jax.Array:
    """Activations as the ring stores them."""
    return to_bits(x.astype(model.activation_dtype))


# --- written at the end of a step -----------------------------------------------------------------


def write_window(
    state: State,
    made: Sequence[jax.Array],
    group: int,
    layers: dict[int, dict[str, Entry]],
    plan: WindowPlan,
) -> State:
    """Stores the new ring entries of layers of a group.

    Args:
        made: exist only once every layer has read its ring.
        layers: by layer, consecutive ones, the entries by array. Of those that renew an array, each may be computed
            from the arrays that come after it.
    """
    first, entries = next(iter(layers.items()))
    values = {
        name: jnp.stack([layer[name].values for layer in layers.values()]) for name in entries
    }
    num_rows, live, rings = plan.valid.shape[0], plan.valid.any(1), dict(state.rings[group])
    # Every read of the rings must come before the first write.
    zero = frames.zero_after(state, *made)
    sink = state.tokens.shape[0] - 1
    # Aligned windows hand back old entries with the new ones; those of several layers are put side by side first.
    alone = plan.aligned and len(layers) == 1
    renewed = [name for name, entry in entries.items() if entry.renews or alone]
    added = [name for name in entries if name not in renewed]

    def start_of(name: str, b) -> jax.Array | int:
        starts = entries[name].start
        return 0 if starts is None else jnp.where(live[b], starts[b], 0)

    for b in range(num_rows):
        row = jnp.where(live[b], b, sink) + zero
        for name in added:
            value = values[name][:, b : b + 1]
            rings[name] = put_row(rings[name], value, row, start_of(name, b), first)

    # These are written in loops, because what enters a loop is an array of its own. Outside a loop, XLA would fuse the
    # read of the old values into the write of the new ones and keep a copy of the ring.
    after = added
    for name in renewed:
        if after:
            zero = frames.zero_after(state, *(rings[written] for written in after))

        def put(b, ring, name=name):
            value = jax.lax.dynamic_slice_in_dim(values[name], b, 1, axis=1)
            return put_row(ring, value, jnp.where(live[b], b, sink), start_of(name, b), first)

        rings[name] = jax.lax.fori_loop(zero, num_rows + zero, put, rings[name])
        after = [name]
    return state.with_ring(group, **rings)


def join(tails: Tail | None, tail: Tail, layer: int, count: int) -> Tail:
    """The tails [L, R, ...] of a group's layers, with one more layer's tail put in; its state is not kept.

    Args:
        tails: those of the layers before; None for the first layer. count: L.
    """
    tail = tail._replace(state=())
    if tails is None:
        tails = jax.tree.map(lambda part: jnp.zeros((count, *part.shape), part.dtype), tail)
    put = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda all_, part: put(all_, part, layer, 0), tails, tail)


def write_tails(
    state: State, tails: Tail, group: int, write: jax.Array, rows: ChunkRows, model: Model
) -> State:
    """Stores what `join` has gathered: columns of checkpoints in frames int32[R, F], and rings."""
    own, arena = model.geometry.groups[group], state.arena
    if own.layout.columns:
        arena = frames.write_columns(arena, write, tails.columns, own)
    new = dict(state.rings[group])
    for r in range(rows.row.shape[0]):
        for name, tail in tails.rings.items():
            start = 0 if tail.start is None else tail.start[0, r]
            new[name] = put_row(new[name], tail.values[:, r : r + 1], rows.row[r], start)
    return state.replace(arena=arena).with_ring(group, **new)

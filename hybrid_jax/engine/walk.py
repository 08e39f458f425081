"""The way over the layers that every step takes: a window of new tokens, a chunk of a prompt, folds of full rings.

A walk may go over the layers in parts. Everything that it must do once all layers are done waits for `finish`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import source_of
from hybrid_jax.engine import frames, kept, rings
from hybrid_jax.engine.mixers.mixer import (
    ChunkPlan,
    ChunkRows,
    CommitRows,
    Entry,
    FoldRows,
    LoadRows,
    Tail,
    WindowPlan,
    WindowRows,
)
from hybrid_jax.engine.mixers.table import group_steps, steps_of
from hybrid_jax.geometry import KVPlace, StatePlace
from hybrid_jax.layers.cut import MixerInput, own_input, with_own
from hybrid_jax.models import decoder
from hybrid_jax.models.decoder import Stream
from hybrid_jax.models.stacks import drafting_stack, stacks
from hybrid_jax.state import Model, State
from pallas_kernels.arguments import check_tree
from pallas_kernels.frame_io import move_words

# --- where rows stand, by what the device knows -----------------------------------------------------


class Cursor(NamedTuple):
    """Where B decoding rows stand.

    Attributes:
        position: int32[B] position of the next token. checkpoint, slot: int32[B] position and slot of the checkpoint.
    """

    position: jax.Array
    checkpoint: jax.Array
    slot: jax.Array


def cursor(
    position: jax.Array,
    known: jax.Array,
    read_slot: jax.Array,
    fold_slot: jax.Array,
    model: Model,
) -> Cursor:
    """Where B rows stand. Each has at least one token in its ring.

    The host may not know yet what plans in flight have brought. It knows what each row's checkpoint was before them,
    and the one slot of all later checkpoints.

    Args:
        position: int32[B] `State.lengths` of the rows.
        known: int32[B] positions of the checkpoints that the host knows. read_slot: int32[B] the slots of these.
        fold_slot: int32[B] slots of later checkpoints.
    """
    last = jnp.maximum(position - 1, 0)
    checkpoint = last - last % model.geometry.grain
    return Cursor(position, checkpoint, jnp.where(checkpoint > known, fold_slot, read_slot))


# --- what is done with all groups -------------------------------------------------------------------


def prepare(params: dict, model: Model) -> tuple[Any, ...]:
    """For each group, what windows and folds need of the weights of all its layers at once."""
    weights: list[list[dict]] = [[] for _ in model.geometry.groups]
    for stack in stacks(params, model.config):
        for index, layer in enumerate(stack.config.layers):
            mixers = decoder.mixer_params(stack.params, stack.config, index)
            for number, (mixer, own) in enumerate(zip(layer.mixers, mixers, strict=True)):
                place = model.places[stack.first + index, number]
                if not isinstance(place, KVPlace) and source_of(mixer) != "group":
                    weights[place.group].append(own)
    pairs = zip(model.geometry.groups, weights, strict=True)
    return tuple(group_steps(group, model.backend).prepare(own) for group, own in pairs)


def fold_rows(state: State, rows: FoldRows, shared: tuple[Any, ...], model: Model) -> State:
    """Folds the full rings of some rows into checkpoints."""
    for number, group in enumerate(model.geometry.groups):
        steps = group_steps(group, model.backend)
        state = steps.fold(state, number, rows, shared[number], model)
    return state


def fold_full(
    state: State,
    at: Cursor,
    alive: jax.Array,
    fold_slot: jax.Array,
    shared: tuple[Any, ...],
    model: Model,
) -> tuple[State, Cursor]:
    """Folds the rings that are full, so that a token fits. The checkpoints of these rows then stand where the rows do.

    Args:
        alive: bool[B] the rows that go on. fold_slot: int32[B] slots of the new checkpoints.
    """
    full = alive & (at.position - at.checkpoint == model.geometry.grain)
    rows = FoldRows(full, at.checkpoint, at.slot, fold_slot)
    state = fold_rows(state, rows, shared, model)
    checkpoint = jnp.where(full, at.position, at.checkpoint)
    return state, Cursor(at.position, checkpoint, jnp.where(full, fold_slot, at.slot))


def commit(
    state: State, rows: WindowRows, count: jax.Array, model: Model, path: jax.Array | None = None
) -> State:
    """Lets some tokens of the last window stay: lengths and convolution columns move on by them.

    K, V and records after them are overwritten by later windows and never read.

    Args:
        rows: of the window. count: int32[B] how many tokens of each row stay.
        path: as in `CommitRows`.
    """
    moved = CommitRows(count, path, rows.base, rows.starts)
    state = _commit_groups(state, moved, model)
    if path is not None:
        state = _move_pages(state, rows, moved, model)
    return state.replace(lengths=state.lengths.at[: count.shape[0]].add(count))


def end_aligned(state: State, ends: jax.Array, model: Model) -> State:
    """Moves the columns of rows bool[B] whose aligned window is full and stays. Lengths are the caller's."""
    return _commit_groups(state, CommitRows(jnp.where(ends, model.geometry.grain, 0)), model)


def _commit_groups(state: State, rows: CommitRows, model: Model) -> State:
    for number, group in enumerate(model.geometry.groups):
        state = group_steps(group, model.backend).commit(state, number, rows, model)
    return state


def _move_pages(state: State, rows: WindowRows, moved: CommitRows, model: Model) -> State:
    """Moves K and V of a path together, in all attention layers."""
    sources, targets, moves = moved.moves()
    page_tokens, arena = model.geometry.page_tokens, state.arena
    for place in model.geometry.kv:
        table = rows.table[:, place.frame]

        def of(numbers: jax.Array, offset: int, size: int, table: jax.Array = table) -> jax.Array:
            """Frame and first word of tokens, int32[B, D - 1, 2]; the sink's where nothing moves."""
            position = rows.base[:, None] + numbers
            page = jnp.where(moves, position // page_tokens, 0)
            frame = jnp.where(moves, jnp.take_along_axis(table, page, axis=1), 0)
            return jnp.stack([frame, offset + position % page_tokens * size], axis=-1)

        scales = place.offset + page_tokens * place.token_words
        for part in ((place.offset, place.token_words), (scales, place.scale_words)):
            if part[1]:
                ends = of(sources, *part), of(targets, *part)
                arena = move_words(
                    arena, *ends, words=part[1], implementation=model.backend.kernels
                )
    return state.replace(arena=arena)


def load_columns(
    state: State, needed: jax.Array, checkpoint: jax.Array, slot: jax.Array, model: Model
) -> tuple[State, list[jax.Array]]:
    """Puts the convolution columns of checkpoints into the rings of rows whose window begins at one.

    Args:
        needed: bool[B] which rows. checkpoint, slot: int32[B] position and slot of their checkpoints.

    Returns:
        State, and arrays that exist only once the arena has been read.
    """
    rows = LoadRows(needed, frames.slot_frames(state, slot), checkpoint > 0)
    read: list[jax.Array] = []
    for number, group in enumerate(model.geometry.groups):
        steps = group_steps(group, model.backend)
        state, parts = steps.load(state, number, rows, model)
        read += parts
    return state, read


# --- walks ------------------------------------------------------------------------------------------


def _made(h: jax.Array, mixed: jax.Array | None, model: Model) -> list[jax.Array]:
    """Arrays whose existence proves that every layer has done its reads; `mixed` stands for the drafting layers."""
    return [h] if model.config.drafting is None or mixed is None else [h, mixed]


class WindowWalk:
    """A walk of T new tokens per row, from checkpoint, ring and pages.

    A row's window begins at its first new token. In exact mode it begins at the checkpoint and is as long as the ring.

    Args:
        shared: as `prepare` makes it.
        commits: all new tokens stay. With T > 1, either all T tokens are new or the next window begins where this one
            does. If `commits` is false, a call of `commit` must follow. It must be false for a tree.
        aligned: as in `WindowPlan`.
    """

    def __init__(
        self,
        state: State,
        rows: WindowRows,
        *,
        shared: tuple[Any, ...],
        model: Model,
        commits: bool = True,
        aligned: bool = False,
    ) -> None:
        check_tree("window", rows.ancestors)
        if commits and rows.ancestors is not None:
            raise ValueError("window: a tree needs commits=False, and a call of commit later")
        positions = rows.base[:, None] + jnp.arange(rows.tokens.shape[1])
        valid = (positions >= rows.begin[:, None]) & (positions < rows.end[:, None])  # [B, T]
        own = frames.slot_frames(state, rows.slot)  # [B, F]
        self.plan = WindowPlan(
            rows, valid, own, rows.checkpoint > 0, shared, commits, aligned, model
        )
        self.state, self.model = state, model
        # What is to be written to the rings of each layer, by its place.
        self.written: dict[KVPlace | StatePlace, dict[str, Entry]] = {}
        self.beside = frames.Beside()
        # What the last mixer has made that reads what is written in the end.
        self.mixed: jax.Array | None = None

    def mix(
        self, weights: dict, given: MixerInput, spec: decoder.Mixer, where: tuple[int, int]
    ) -> jax.Array:
        """See `decoder.Mix`."""
        place, normed = self.model.places[where], own_input(given)
        assert normed is not None, "every mixer of a window reads"
        given = with_own(given, self.beside.apart(normed))
        table = self.beside.tie(self.plan.rows.table, normed, self.state)
        plan, steps = self.plan.with_table(table), steps_of(spec, self.model)
        if source_of(spec) == "group":
            entries = self.written[place]
            made = steps.reread(weights, given, self.state, place, plan, entries, spec)
        else:
            made = steps.window(weights, given, self.state, place, plan, spec)
            self.written[place] = made.entries
        self.state = made.state
        self.beside.note(normed, made.out)
        if made.awaited:
            self.mixed = made.out
        return made.out

    def finish(self, h: jax.Array) -> State:
        """The state with all rings written; h [B, T, D] is what the model's layers have made."""
        made = _made(h, self.mixed, self.model)
        groups: dict[int, dict[int, dict[str, Entry]]] = {}
        for place, entries in self.written.items():
            if entries and isinstance(place, StatePlace):
                groups.setdefault(place.group, {})[place.layer] = entries
        for group, layers in sorted(groups.items()):
            self.state = rings.write_window(self.state, made, group, layers, self.plan)
        return self.state


def window(
    params: dict,
    state: State,
    rows: WindowRows,
    *,
    shared: tuple[Any, ...],
    model: Model,
    commits: bool = True,
    aligned: bool = False,
) -> tuple[jax.Array, State]:
    """Runs T new tokens per row through all layers; the arguments are those of `WindowWalk`.

    Returns:
        h [B, T, D] before the last norm, and the state.
    """
    walk = WindowWalk(state, rows, shared=shared, model=model, commits=commits, aligned=aligned)
    before = lambda hidden: kept.hidden_before(hidden, state, rows)  # noqa: E731
    h = _through(params, rows.tokens, walk.plan.valid, before, walk)
    state = walk.finish(h)
    if rows.ancestors is not None and model.config.drafting is not None:
        # What follows from h moves pages, which the layers that draft must have read by then.
        made = frames.zero_after(state, *_made(h, walk.mixed, model))
        h = jnp.where(made == 0, h, jnp.zeros_like(h))
    return h, state


class ChunkWalk:
    """A walk of a chunk of each row's prompt, from checkpoint and pages."""

    def __init__(self, state: State, rows: ChunkRows, *, model: Model) -> None:
        self.valid = jnp.arange(rows.tokens.shape[1]) < rows.length[:, None]
        self.state, self.model, self.plan = state, model, ChunkPlan(rows, model)
        self.tails: dict[int, Tail] = {}  # by group
        self.streams: dict[KVPlace | StatePlace, Any] = {}  # what further layers of a group read
        self.beside = frames.Beside()
        self.mixed: jax.Array | None = None  # what the last mixer has made
        self.writes_of = jnp.zeros(())  # stands for the input of layers that only write

    def mix(
        self, weights: dict, given: MixerInput, spec: decoder.Mixer, where: tuple[int, int]
    ) -> jax.Array:
        """See `decoder.Mix`."""
        rows, model = self.plan
        place, normed = model.places[where], own_input(given)
        if normed is None:
            if source_of(spec) == "group":
                return self.writes_of
            # Layers that only write have one input, and none depends on another: they are like mixers side by side.
            normed = self.writes_of
        else:
            given = with_own(given, self.beside.apart(normed))
        plan = self.plan.with_table(self.beside.tie(rows.table, normed, self.state))
        steps = steps_of(spec, model)
        if source_of(spec) == "group":
            stream = self.streams[place]
            self.mixed = out = steps.rescan(weights, given, self.state, place, plan, stream, spec)
            self.beside.note(normed, out)
            return out
        made = steps.chunk(weights, given, self.state, place, plan, spec)
        out, tail = made.out, made.tail
        self.mixed, self.state, self.streams[place] = out, made.state, made.stream
        if tail is None:
            self.beside.note(normed, *((out,) if made.awaited else ()))
            return out
        assert isinstance(place, StatePlace), "only a state has a tail"
        group = place.of(model.geometry)
        joined = rings.join(self.tails.get(place.group), tail, place.layer, group.num_layers)
        self.tails[place.group] = joined
        # This write comes after the tails. Otherwise XLA keeps what they are cut from until the end: 271 in place of
        # 86 MB for 512 tokens of 173 M weights.
        # It also comes after what mixers beside this one have read.
        parts = [part for part in jax.tree.leaves(joined) if part.size]
        if tail.state is None:
            self.beside.note(normed, out)
            return out
        own = frames.layer_frames(rows.write, place.layer, group)
        own = self.beside.tie(own, normed, self.state, *parts)
        arena = frames.write_state(self.state.arena, own, tail.state, group)
        self.state = self.state.replace(arena=arena)
        return out

    def finish(self, h: jax.Array) -> State:
        """The state with its checkpoints and rings written; h [R, T, D] is what the model's layers have made."""
        if self.tails:
            # Attention layers may follow the last recurrent one. Their reads must come before this write too.
            rows, model = self.plan
            made = _made(h, self.mixed, model)
            write = rows.write + frames.zero_after(self.state, *made)
            for group, joined in self.tails.items():
                self.state = rings.write_tails(self.state, joined, group, write, rows, model)
        return self.state


def chunk(params: dict, state: State, rows: ChunkRows, *, model: Model) -> tuple[jax.Array, State]:
    """Runs a chunk: h [R, T, D] before the last norm, and the state with its checkpoints, pages and rings written."""
    walk = ChunkWalk(state, rows, model=model)
    # What comes before a chunk is not known.
    before = lambda hidden: jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))  # noqa: E731
    h = _through(params, rows.tokens, walk.valid, before, walk)
    return h, walk.finish(h)


class Ends(NamedTuple):
    """Rows of a chunk whose prompts end there.

    Attributes:
        samples: int32[R] 1 for such a row, else 0.
        checkpoint, slot: int32[R] position and slot of each row's checkpoint after the chunk.
    """

    samples: jax.Array
    checkpoint: jax.Array
    slot: jax.Array


def short_chunk(
    params: dict, state: State, rows: ChunkRows, ends: Ends | None, *, model: Model
) -> tuple[jax.Array, State]:
    """Runs a chunk through the layers before the cut; those after it only write what they keep of its tokens.

    If a row's prompt ends here, its last token goes through the layers after the cut too, as a window of one token.

    Args:
        ends: of the rows whose prompts end here; None if there are none.

    Returns:
        h [R, D] of the last token of each such row, before the last norm, and the state as `chunk` returns it.
    """
    config, backend, last = model.config, model.backend, jnp.maximum(rows.length - 1, 0)
    assert config.cut is not None, "the model has a cut"
    walk = ChunkWalk(state, rows, model=model)
    stream = decoder.enter(params, rows.tokens, walk.valid, config)
    before = range(config.cut)
    stream = decoder.through(params, stream, walk.valid, before, config, walk.mix, backend)
    h, normed = decoder.at_cut(params, stream, walk.valid, config, backend)
    _draft(params, rows.tokens, walk.valid, h, walk)
    state = walk.finish(h)
    h = rings.slice_tokens(h, last, 1)
    if ends is not None:
        rows = rows._replace(length=rows.length - ends.samples)
    later = ChunkWalk(state, rows, model=model)
    kept_at = rows.length, rows.state_len
    decoder.write_after_cut(params, normed, kept_at, config, later.mix, backend)
    state = later.finish(h)
    if ends is None:
        return h[:, 0], state
    # The window works on copies of the rows' rings: it takes the first rows of a ring.
    groups = _groups_after_cut(model)
    if later.tails:
        own = rings.rows_of_tails(state, later.tails, len(rows.row))
    else:  # kernels have written the rings
        own = rings.rows_of(state, rows.row, groups)
    base = jnp.where(ends.samples > 0, rows.start + rows.length, 0)
    tokens = rings.slice_tokens(rows.tokens[..., None], last, 1)[..., 0]
    one = WindowRows(
        tokens=tokens,
        base=base,
        begin=base,
        end=base + ends.samples,
        checkpoint=ends.checkpoint,
        slot=ends.slot,
        table=rows.table,
    )
    window = WindowWalk(own, one, shared=prepare(params, model), model=model)
    stream, valid = Stream(h, None), window.plan.valid
    stream = decoder.through(params, stream, valid, config.later, config, window.mix, backend)
    h = decoder.leave(params, stream, valid, config)
    return h[:, 0], rings.put_rows(state, window.finish(h), rows.row, groups)


def _groups_after_cut(model: Model) -> list[int]:
    """Numbers of the groups of recurrent layers after the cut; none of these has a layer before it."""
    later = model.config.later
    places = (place for (index, _), place in model.places.items() if index in later)
    return sorted({place.group for place in places if isinstance(place, StatePlace)})


def _through(
    params: dict,
    tokens: jax.Array,
    valid: jax.Array,
    before: Callable[[jax.Array], jax.Array],
    walk: WindowWalk | ChunkWalk,
) -> jax.Array:
    """Takes tokens int32[B, T] through the model's own layers, then through those that draft: [B, T, D] of its own.

    Args:
        before: from hidden states [B, T, D] of the tokens, after the last norm, those before each token.
    """
    model = walk.model
    h = decoder.walk(params, tokens, valid, model.config, walk.mix, model.backend)
    _draft(params, tokens, valid, h, walk, before)
    return h


def _draft(
    params: dict,
    tokens: jax.Array,
    valid: jax.Array,
    h: jax.Array,
    walk: WindowWalk | ChunkWalk,
    before: Callable[[jax.Array], jax.Array] | None = None,
) -> None:
    """Takes tokens through the layers that draft, if there are any; the other arguments as for `_through`."""
    model, given = walk.model, None
    if (drafting := drafting_stack(params, model.config)) is None:
        return
    if drafting.takes_hidden:
        assert before is not None, "a head takes hidden states"
        given = before(decoder.normed_hidden(params, h, model.config))
    # Layers that draft must not write before the model's own have read.
    tokens = tokens + frames.zero_after(walk.state, h)
    drafting.through(tokens, given, valid, walk.mix, model.backend)

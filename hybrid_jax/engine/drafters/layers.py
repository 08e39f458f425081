"""Drafts that layers predict: those of a head for multi-token prediction, or of a second model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.engine import frames, rings
from hybrid_jax.engine.drafters.drafter import DraftRows, Drafts
from hybrid_jax.engine.mixers.mixer import WindowRows
from hybrid_jax.engine.sampling import sample, unpack_sampling
from hybrid_jax.engine.walk import WindowWalk
from hybrid_jax.geometry import StatePlace
from hybrid_jax.models.stacks import Drafting, ExitStack, drafting_stack
from hybrid_jax.state import Model, State
from pallas_kernels.token_sampling.groups import largest
from pallas_kernels.token_sampling.numbers import noise_keys, token_noise


class Layers:
    """See `hybrid_jax.engine.drafters.drafter.Drafter`.

    Drafts are drawn with the noise that the model's own tokens are drawn with, so that equal logits bring equal tokens.
    """

    fields = ()

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config

    def draft(
        self, params: dict, state: State, rows: DraftRows, model: Model
    ) -> tuple[Drafts, State]:
        """What the layers predict, one token after the other or level by level of a tree."""
        layers = self.stack(params, model)
        along = self._chain if self.config.tree is None else self._tree
        tokens, sure, state = along(layers, state, rows, model)
        return Drafts(tokens, jnp.full_like(rows.most, self.config.num_tokens), sure), state

    def stack(self, params: dict, model: Model) -> Drafting:
        """The layers that draft."""
        layers = drafting_stack(params, model.config)
        assert layers is not None, "there are layers that draft"
        return layers

    def places(self, model: Model) -> list[StatePlace]:
        """Of the recurrent layers that draft, which are the last ones of their groups."""
        first = len(model.config.layers)
        return _recurrent_places(model, range(first, len(model.config.all_layers)))

    def _chain(
        self, layers: Drafting, state: State, rows: DraftRows, model: Model
    ) -> tuple[jax.Array, jax.Array | None, State]:
        """Feeds one token after the other. The windows move the columns on, so these are put back in the end."""
        num_rows, count = len(rows.alive), self.config.num_tokens
        columns = {} if rows.aligned else _columns(state, num_rows, self.places(model), model)
        given, start = unpack_sampling(rows.layout, rows.batch), state
        groups = sorted({place.group for place in self.places(model)})
        limit = self.config.unjudged_above

        def one(t, carry):
            arena, rings, token, before, drafted, sure = carry
            state = _with_rings(start.replace(arena=arena), groups, rings)
            position = rows.at.position + t
            goes_on = rows.alive & (t + 1 < rows.most)
            out, state = self._feed(layers, state, rows, token, before, position, goes_on, model)
            logits = layers.logits(out)
            token = sample(logits, given, position + 1, model.backend.sampling)
            drafted = jax.lax.dynamic_update_index_in_dim(drafted, token, t, 1)
            if sure is not None:
                above = probability(logits, token) > limit
                sure = jax.lax.dynamic_update_index_in_dim(sure, above, t, 1)
            rings = [state.rings[group] for group in groups]
            return state.arena, rings, token, None if before is None else out, drafted, sure

        token = jnp.maximum(rows.token, 0)
        # Drafting writes where these were read.
        token += frames.zero_after(state, *columns.values())
        before = _kept_hidden(state, num_rows)
        # Only what changes, because XLA would keep a copy of what a loop carries along.
        rings = [state.rings[group] for group in groups]
        drafted = jnp.zeros((num_rows, count), jnp.int32)
        sure = None if limit is None else jnp.zeros((num_rows, count), bool)
        carry = (state.arena, rings, token, before, drafted, sure)
        if not model.backend.branches:  # a loop would make the device wait for the host
            for t in range(count):
                carry = one(t, carry)
        else:
            # Near their ends and boundaries, rows need no more.
            needed = jnp.max(jnp.where(rows.alive, rows.most, 0)) - 1
            carry = jax.lax.fori_loop(0, jnp.clip(needed, 0, count), one, carry)
        arena, rings, _, _, drafted, sure = carry
        state = _with_rings(state.replace(arena=arena), groups, rings)
        for (group, first), conv in columns.items():
            now = state.rings[group]["conv"]
            where = (first, *[0] * (now.ndim - 1))
            state = state.with_ring(group, conv=jax.lax.dynamic_update_slice(now, conv, where))
        return drafted, sure, state

    def _feed(
        self,
        layers: Drafting,
        state: State,
        rows: DraftRows,
        token: jax.Array,
        before: jax.Array | None,
        position: jax.Array,
        goes_on: jax.Array,
        model: Model,
    ) -> tuple[jax.Array, State]:
        """One token int32[B] of each row through the layers, with the hidden state [B, D] before it: [B, D] after it.

        In exact mode a window is as long as the ring. It never reaches the end of that, so its columns stay.
        """
        base = rows.at.checkpoint if rows.aligned else position
        width = model.geometry.grain if rows.aligned else 1
        window = WindowRows(
            tokens=jnp.broadcast_to(token[:, None], (len(token), width)),
            base=base,
            begin=jnp.where(goes_on, position, 0),
            end=jnp.where(goes_on, position + 1, 0),
            checkpoint=rows.at.checkpoint,
            slot=rows.at.slot,
            table=rows.table,
        )
        if before is not None:
            before = jnp.broadcast_to(before[:, None], (len(token), width, before.shape[-1]))
        out, state = _window(layers, state, window, before, rows, model, commits=True)
        if width == 1:
            return out[:, 0], state
        return rings.slice_tokens(out, jnp.clip(position - base, 0, width - 1), 1)[:, 0], state

    def _tree(
        self, layers: Drafting, state: State, rows: DraftRows, model: Model
    ) -> tuple[jax.Array, None, State]:
        """Feeds the whole window once for each level, and so fills in the next one."""
        config, num_rows = self.config, len(rows.alive)
        parents, depths = config.tree or (), config.depths
        own = jnp.maximum(rows.token, 0)
        tokens = jnp.zeros((num_rows, config.window), jnp.int32).at[:, 0].set(own)
        given, position = unpack_sampling(rows.layout, rows.batch), rows.at.position
        ancestors = jnp.broadcast_to(jnp.array(config.ancestors, jnp.int32), tokens.shape)
        kept, before = _kept_hidden(state, num_rows), None
        if kept is not None:
            before = jnp.broadcast_to(kept[:, None], (*tokens.shape, kept.shape[-1]))
        for level in range(max(depths)):
            window = WindowRows(
                tokens=tokens,
                base=position,
                begin=jnp.where(rows.alive, position, 0),
                end=jnp.where(rows.alive, position + jnp.minimum(config.window, rows.room), 0),
                checkpoint=rows.at.checkpoint,
                slot=rows.at.slot,
                table=rows.table,
                ancestors=ancestors,
            )
            out, state = _window(layers, state, window, before, rows, model, commits=False)
            branches: dict[int, list[int]] = {
                node: [] for node in range(config.window) if depths[node] == level
            }
            for child, parent in enumerate(parents, start=1):
                if parent in branches:
                    branches[parent].append(child)
            branches = {node: children for node, children in branches.items() if children}
            # The weights for logits are read once for all of a level.
            logits = layers.logits(out[:, jnp.array(list(branches))])
            for place, children in enumerate(branches.values()):
                best = best_tokens(logits[:, place], given, position + level + 1, len(children))
                tokens = tokens.at[:, jnp.array(children)].set(best)
            if kept is not None:
                before = jnp.concatenate([kept[:, None], out[:, jnp.array(parents)]], axis=1)
        return tokens[:, 1:], None, state


class Exit(Layers):
    """The layers before a cut, and a head on its output.

    What they write of the drafts is what the verification writes there again. Layers after the cut write nothing.
    """

    def stack(self, params: dict, model: Model) -> ExitStack:
        return ExitStack(params, model.config)

    def places(self, model: Model) -> list[StatePlace]:
        return _recurrent_places(model, range(model.config.later.start))


def _window(
    layers: Drafting,
    state: State,
    window: WindowRows,
    before: jax.Array | None,
    rows: DraftRows,
    model: Model,
    *,
    commits: bool,
) -> tuple[jax.Array, State]:
    """Takes a window through the layers that draft, and no others: what they make of it [B, T, D], and the state."""
    walk = WindowWalk(
        state, window, shared=rows.shared, model=model, commits=commits, aligned=rows.aligned
    )
    valid = walk.plan.valid
    out = layers.through(window.tokens, before, valid, walk.mix, model.backend)
    return out, walk.finish(out)


def probability(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """That of a token int32[B] of each row, by logits float32[B, V]: float32[B]."""
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return jnp.exp(own - jax.nn.logsumexp(logits, axis=1))


def best_tokens(logits: jax.Array, rows, positions: jax.Array, count: int) -> jax.Array:
    """The tokens int32[B, count] that are most likely to be drawn, by logits float32[B, V] and the noise there."""
    keys = noise_keys(rows.seed, rows.sample_index, positions)
    noise = token_noise(keys, jnp.arange(logits.shape[1])[None])
    temperature = rows.temperature[:, None]
    noisy = logits / jnp.where(temperature > 0, temperature, 1.0) + noise
    return largest(jnp.where(temperature > 0, noisy, logits), count)[1]


def _recurrent_places(model: Model, layers: range) -> list[StatePlace]:
    """Of the recurrent layers among some."""
    return [
        place
        for (index, _), place in model.places.items()
        if index in layers and isinstance(place, StatePlace)
    ]


def _with_rings(state: State, groups: list[int], rings: list[dict[str, jax.Array]]) -> State:
    for group, own in zip(groups, rings, strict=True):
        state = state.with_ring(group, **own)
    return state


def _columns(
    state: State, num_rows: int, drafting: list[StatePlace], model: Model
) -> dict[tuple[int, int], jax.Array]:
    """What the first rows' rings hold for convolutions of layers that draft, by group and the first of its layers."""
    found: dict[tuple[int, int], jax.Array] = {}
    for group in {place.group for place in drafting}:
        conv = state.rings[group].get("conv")
        if conv is not None:  # the layers that draft are the last ones of their group
            first = min(place.layer for place in drafting if place.group == group)
            found[group, first] = _copied(conv[first:, :num_rows], state, model)
    return found


def _copied(columns: jax.Array, state: State, model: Model) -> jax.Array:
    """The same columns [L, B, ...], which stay as they are when the ring changes.

    On a CPU they are copied in a loop, because XLA would read them from the ring again later, and keep a copy of all
    of it.
    """
    if model.backend.launches:
        return jax.lax.optimization_barrier(columns)
    zero = state.slots[0, 0]

    def put(b: jax.Array, copied: jax.Array) -> jax.Array:
        line = jax.lax.dynamic_slice_in_dim(columns, b, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(copied, line, b, axis=1)

    count = columns.shape[1]
    return jax.lax.fori_loop(zero, count + zero, put, jnp.zeros_like(columns))


def _kept_hidden(state: State, num_rows: int) -> jax.Array | None:
    hidden = state.drafting.get("hidden")
    return None if hidden is None else hidden[jnp.arange(num_rows)]

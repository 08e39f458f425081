"""Prompt look-up: the last tokens of a row are searched in its history, and what followed them there is the draft."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.engine.drafters.drafter import DraftRows, Drafts
from hybrid_jax.state import Model, State

TILE = 1024  # places that are compared at once where the search is a loop


class NGram:
    """See `hybrid_jax.engine.drafters.drafter.Drafter`."""

    fields = ()

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config

    def draft(
        self, params: dict, state: State, rows: DraftRows, model: Model
    ) -> tuple[Drafts, State]:
        """What followed the longest match."""
        config, num_rows = self.config, len(rows.alive)
        history = state.drafting["history"][:num_rows]
        last = state.lengths[:num_rows]  # where the token stands that is fed next
        branches, depths = _branches(config), config.depths[1:]
        found, taken = [], jnp.full((num_rows, 1 + max(branches)), -1, jnp.int32)
        for number in range(1 + max(branches)):
            place, length = longest_match(
                history,
                last,
                most=config.ngram_max,
                taken=taken[:, :number],
                loops=model.backend.branches,
            )
            # What repeats itself goes on so: after the last token known comes the first of the period.
            offsets = jnp.arange(max(depths)) % jnp.maximum(last - place, 1)[:, None]
            places = jnp.clip(place[:, None] + 1 + offsets, 0, history.shape[1] - 1)
            tokens = jnp.take_along_axis(history, places, axis=1)
            found.append((tokens, length))
            taken = taken.at[:, number].set(tokens[:, 0])
        tokens = jnp.stack(
            [found[branch][0][:, d - 1] for branch, d in zip(branches, depths, strict=True)], 1
        )
        count = jnp.where(found[0][1] >= config.ngram_min, config.num_tokens, 0)
        return Drafts(tokens, count), state


def _branches(config: SpeculationConfig) -> list[int]:
    """For each draft, which of the branches after the row's own token it belongs to."""
    tree, first = config.tree or tuple(range(config.num_tokens)), 0
    found: list[int] = []
    for parent in tree:
        found.append(first if parent == 0 else found[parent - 1])
        first += parent == 0
    return found


def longest_match(
    history: jax.Array, last: jax.Array, *, most: int, taken: jax.Array, loops: bool
) -> tuple[jax.Array, jax.Array]:
    """Where the tokens that end at `last` stood before.

    Args:
        history: int32[B, H]. last: int32[B] index of each row's last token.
        most: how many tokens are compared.
        taken: int32[B, n] tokens that must not follow there.
        loops: go over `history` in tiles, only as far as the longest row reaches. Otherwise over all of it at once.

    Returns:
        int32[B] the latest index in front of `last` at which the longest match ends, and int32[B] how many tokens match
        there, at most `most`. The length is 0 where nothing matches.
    """
    columns = history.shape[1]
    back = last[:, None] - jnp.arange(most)
    tail = jnp.take_along_axis(history, jnp.maximum(back, 0), axis=1)
    tail = jnp.where(back >= 0, tail, -1)  # no token equals this
    history = jnp.pad(history, ((0, 0), (most - 1, TILE)), constant_values=-2)

    def best_of(start: jax.Array | int, width: int) -> jax.Array:
        """The best of places start .. start + width: the length, and of equal ones the latest, in one number."""
        seen = jax.lax.dynamic_slice_in_dim(history, start, width + most - 1, axis=1)
        length = jnp.zeros((len(last), width), jnp.int32)
        equal = jnp.ones_like(length, bool)
        for i in range(most):
            here = jax.lax.slice_in_dim(seen, most - 1 - i, most - 1 - i + width, axis=1)
            equal &= here == tail[:, i : i + 1]
            length += equal.astype(jnp.int32)
        place = start + jnp.arange(width)
        fits = place < last[:, None]
        if taken.shape[1]:
            following = jax.lax.dynamic_slice_in_dim(history, start + most, width, axis=1)
            fits &= (following[:, :, None] != taken[:, None]).all(-1)
        rank = jnp.where(fits, length * columns + place, 0)
        return rank.max(1)

    if loops:
        num_tiles = last.max() // TILE + 1
        found = jax.lax.fori_loop(
            0,
            num_tiles,
            lambda tile, best: jnp.maximum(best, best_of(tile * TILE, TILE)),
            jnp.zeros_like(last),
        )
    else:
        found = best_of(0, columns)
    return found % columns, found // columns

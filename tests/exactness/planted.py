"""Drafts that a test plants: right ones, wrong ones, and as many as it likes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.engine.drafters.drafter import Drafts
from hybrid_jax.engine.drafters.table import DRAFTERS
from hybrid_jax.engine.runner import Runner
from hybrid_jax.state import State


class Ahead:
    """Drafts what stands after the row's tokens in its history. Now and then it drafts fewer, or nothing."""

    fields = ()

    def __init__(self, config: SpeculationConfig) -> None:
        self.most = config.num_tokens

    def draft(self, params, state, rows, model) -> tuple[Drafts, State]:
        num_rows = len(rows.alive)
        last = state.lengths[:num_rows]
        places = last[:, None] + 1 + jnp.arange(self.most)
        history = state.drafting["history"][:num_rows]
        places = jnp.minimum(places, history.shape[1] - 1)
        tokens = jnp.take_along_axis(history, places, axis=1)
        count = (last * 5 + jnp.arange(num_rows)) % 7
        count = jnp.where(count > 2, self.most, jnp.minimum(count, self.most))
        return Drafts(tokens, count), state


class AheadTree(Ahead):
    """The same in a tree: at each branch another child has what stands after the row's tokens, the others do not."""

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self.tree, self.depths = config.tree, config.depths[1:]

    def draft(self, params, state, rows, model) -> tuple[Drafts, State]:
        (chain, count, _), state = super().draft(params, state, rows, model)
        last = state.lengths[: len(rows.alive)]
        lucky, tokens = [jnp.ones_like(last, bool)], []
        for node, (parent, depth) in enumerate(zip(self.tree, self.depths, strict=True)):
            siblings = [i for i, other in enumerate(self.tree) if other == parent]
            chosen = (last + depth) % len(siblings) == siblings.index(node)
            lucky.append(lucky[parent] & chosen)
            right = chain[:, depth - 1]
            tokens.append(jnp.where(lucky[-1], right, (right + 1 + node) % 61))
        return Drafts(jnp.stack(tokens, axis=1), count), state


@dataclass
class Planted:
    """Outputs by prompt that are drafted, whatever request has the prompt."""

    outputs: dict[tuple[int, ...], Sequence[int]] = field(default_factory=dict)

    def behind(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of a row, and what is drafted to follow."""
        tokens = list(map(int, tokens))
        known = [p for p in self.outputs if tuple(tokens[: len(p)]) == p]
        if not known:
            return tokens
        prompt = max(known, key=len)
        whole = [*prompt, *self.outputs[prompt]]
        return [*tokens, *whole[len(tokens) :]]


@contextlib.contextmanager
def planting(planted: Planted) -> Iterator[None]:
    """Engines that are made and run now draft what is planted."""
    load = Runner._load_history

    def loaded(runner: Runner, row: int, tokens: Sequence[int]) -> None:
        load(runner, row, planted.behind(tokens)[: runner.specs.drafting["history"].shape[1]])

    with (
        mock.patch.dict(DRAFTERS, {"ngram": lambda c: AheadTree(c) if c.tree else Ahead(c)}),
        mock.patch.object(Runner, "_load_history", loaded),
    ):
        yield


def with_mistakes(tokens: Sequence[int], rng: np.random.Generator, share: float) -> list[int]:
    """Tokens of which a share is wrong."""
    wrong = rng.random(len(tokens)) < share
    return [int(t) if not w else (int(t) + 1) % 61 for t, w in zip(tokens, wrong, strict=True)]

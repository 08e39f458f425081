"""A kind of step that is nowhere but in this file: windows of four tokens, of which one to four stay.

The first token of a window is the row's own; the host guesses the others. How many stay is decided on the device: those
that were guessed right, and by chance fewer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine import pack, walk
from hybrid_jax.engine.adjust import choose
from hybrid_jax.engine.kinds.kind import WindowRows
from hybrid_jax.engine.steps import table
from hybrid_jax.engine.steps.decode import Decode
from hybrid_jax.engine.steps.kind import Made
from hybrid_jax.engine.walk import cursor
from hybrid_jax.models import decoder

TOKENS = 4
LONGEST = 256  # tokens that guesses are kept of


def forced_step(params, state, adjust, batch, guesses, *, model, layout, num_logprobs):
    """One window of each row; `guesses` int32[at least B, LONGEST] what may stand at each position."""
    num_rows, grain = batch.shape[0], model.geometry.grain
    guesses = guesses[:num_rows]
    get = lambda name: layout.get(batch, name)  # noqa: E731
    fold_slot, limits = get("fold_slot"), get("num_steps")
    at = cursor(state, get("checkpoint"), get("read_slot"), fold_slot, model)
    alive = (state.tokens[:num_rows] >= 0) & (limits > 0)
    shared = walk.prepare(params, model)
    state, at = walk.fold_full(state, at, alive, fold_slot, shared, model)
    base, checkpoint, slot = at
    if model.geometry.has_state:
        limits = jnp.minimum(limits, grain - (base - checkpoint))  # nothing past a boundary stays
    offsets = jnp.arange(TOKENS)
    behind = jnp.minimum(base[:, None] + offsets, guesses.shape[1] - 1)
    tokens = jnp.take_along_axis(guesses, behind, axis=1).at[:, 0].set(state.tokens[:num_rows])
    rows = WindowRows(
        tokens=tokens,
        base=base,
        begin=jnp.where(alive, base, 0),
        end=jnp.where(alive, base + jnp.minimum(limits, TOKENS), 0),
        checkpoint=checkpoint,
        slot=slot,
        table=pack.get_pages(layout, batch, model.geometry.frames_per_page),
    )
    h, state = walk.window(params, state, rows, shared=shared, model=model, commits=False)
    most = jnp.minimum(1 + (base * 7 + jnp.arange(num_rows)) % 5, limits)  # by chance fewer
    going, count, made, last = alive, jnp.zeros_like(base), [], state.tokens[:num_rows]
    for t in range(TOKENS):
        going &= t < most
        logits = decoder.logits(params, h[:, t], model.config, model.kernels)
        place = (base + t + 1, going, num_logprobs, adjust, jnp.arange(num_rows), model.sampler)
        new, fed, adjust = choose(logits, batch, layout, *place)
        made.append(new._replace(tokens=jnp.where(going, new.tokens, -1)))
        last, count = jnp.where(going, fed, last), count + going.astype(jnp.int32)
        if t + 1 < TOKENS:
            going &= fed == tokens[:, t + 1]
    state = walk.commit(state, count, model)
    state = state.replace(tokens=state.tokens.at[:num_rows].set(last))
    return state, adjust, Made(jax.tree.map(lambda *steps: jnp.stack(steps), *made))


@dataclass
class Told:
    """What a test tells the step, and what the step tells the test.

    Attributes:
        num_rows: of the largest bucket.
        guesses: outputs by prompt.
        came: how many tokens stayed, of each row of each plan.
    """

    num_rows: int
    guesses: dict[tuple[int, ...], Sequence[int]] = field(default_factory=dict)
    came: list[int] = field(default_factory=list)


class Forced(Decode):
    """Decode rows, each one window."""

    name = "forced"
    run = staticmethod(forced_step)

    def __init__(self, *given, told: Told) -> None:
        super().__init__(*given)
        self.told = told

    def static(self, bucket) -> Mapping[str, int]:
        return {}

    def rest(self, rows, before) -> tuple:
        guesses = np.zeros((self.told.num_rows, LONGEST), np.int32)
        for row in rows:
            prompt = tuple(row.request.prompt)
            known = [*prompt, *self.told.guesses[prompt]][:LONGEST]
            guesses[row.row, : len(known)] = known
        return (guesses,)

    def inert(self, bucket) -> tuple:
        return (np.zeros((self.told.num_rows, LONGEST), np.int32),)

    def unpack(self, rows, sampled, prompt) -> None:
        super().unpack(rows, sampled, prompt)
        self.told.came += [len(row.new_tokens) for row in rows]


@contextlib.contextmanager
def decoding_by(told: Told) -> Iterator[None]:
    """Engines that are made now decode by such windows."""
    kinds = (table.Prefill, table.Fork, functools.partial(Forced, told=told))
    with (
        mock.patch.object(table, "ORDINARY", kinds),
        mock.patch.object(EngineConfig, "window_tokens", TOKENS),
    ):
        yield

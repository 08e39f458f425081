"""A walk in two parts gives the numbers of the whole walk, and a token of a tree those of its path."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import BACKENDS
from hybrid_jax.engine.mixers.mixer import ChunkRows, WindowRows
from hybrid_jax.engine.walk import (
    ChunkWalk,
    Cursor,
    WindowWalk,
    chunk,
    commit,
    fold_full,
    prepare,
    window,
)
from hybrid_jax.models import decoder
from hybrid_jax.state import Model
from tests.drawing import EVERYTHING, left_to_all
from tests.engine.walks import ROWS, TOKENS, prompt_chunk, setting
from tests.tiny_models import VOCAB


def next_token(model: Model, rows: ChunkRows) -> WindowRows:
    return WindowRows(
        tokens=jnp.array([[3], [5]]),
        base=rows.length,
        begin=rows.length,
        end=rows.length + 1,
        checkpoint=rows.state_len,
        slot=1 + jnp.arange(ROWS),
        table=rows.table,
    )


def alike(one: tuple, other: tuple) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("name", ["with_unknown_kind", pytest.param("parallel", marks=left_to_all)])
def test_a_walk_in_two_parts_gives_the_numbers_of_the_whole(name):
    model, params, state = setting(name)
    config = model.config
    rows = prompt_chunk(model, state)

    @jax.jit(static_argnames="cut")
    def chunk_in_parts(params, state, cut: int):
        walk = ChunkWalk(state, rows, model=model)
        stream = decoder.enter(params, rows.tokens, walk.valid, config)
        for layers in (range(cut), range(cut, len(config.layers))):
            stream = decoder.through(params, stream, walk.valid, layers, config, walk.mix)
        h = decoder.leave(params, stream, walk.valid, config)
        return h, walk.finish(h)

    h, begun = jax.jit(lambda params, state: chunk(params, state, rows, model=model))(params, state)
    cuts = range(1, len(config.layers), 1 if EVERYTHING else 2)
    for cut in cuts:
        alike(chunk_in_parts(params, state, cut), (h, begun))

    following = next_token(model, rows)

    @jax.jit(static_argnames="cut")
    def window_in_parts(params, state, cut: int):
        """Two walks, each of which writes the rings of its own layers."""
        stream, shared = None, prepare(params, model)
        for layers in (range(cut), range(cut, len(config.layers))):
            walk = WindowWalk(state, following, shared=shared, model=model)
            if stream is None:
                stream = decoder.enter(params, following.tokens, walk.plan.valid, config)
            stream = decoder.through(params, stream, walk.plan.valid, layers, config, walk.mix)
            state = walk.finish(stream.update)
        return decoder.leave(params, stream, walk.plan.valid, config), state

    @jax.jit
    def whole(params, state):
        return window(params, state, following, shared=prepare(params, model), model=model)

    expected = whole(params, begun)
    assert not np.array_equal(expected[1].arena, begun.arena)
    for cut in cuts:
        alike(window_in_parts(params, begun, cut), expected)


# Each token's parent among the new tokens of a row, -1 for one that follows the context.
PARENTS = np.array([[-1, 0, 0, 1, 2, 2, 3], [-1, -1, 1, 0, 2, 3, 2]])
NUM_NEW = (7, 6)


def paths(row: int) -> list[list[int]]:
    """The numbers of the tokens on the way to each token of a row, itself last."""
    found: list[list[int]] = []
    for token, parent in enumerate(PARENTS[row]):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "xla") for name in ("with_unknown_kind", "windowed", "jamba", "with_fixed_decay")),
        *(
            pytest.param(name, "xla", marks=left_to_all)
            for name in ("parallel", "llama", "qwen3_next")
        ),
        *(pytest.param(name, "pallas", marks=pytest.mark.slow) for name in ("bamba", "jamba")),
        pytest.param("windowed", "pallas", marks=left_to_all),
    ],
)
@left_to_all("bamba-pallas", "jamba-pallas", "jamba-xla")
def test_a_token_of_a_tree_gives_the_numbers_of_its_path(name, kernels):
    width = PARENTS.shape[1]
    model, params, state = setting(name, window=width)
    model = replace(model, backend=BACKENDS[kernels])
    rows = prompt_chunk(model, state)
    _, state = jax.jit(lambda params, state: chunk(params, state, rows, model=model))(params, state)
    drawn = np.random.default_rng(0).permutation(VOCAB)[: ROWS * width].reshape(ROWS, width)
    first = next_token(model, rows)
    kept = jnp.array([2, 1])  # as many of the first tokens as are a chain in either tree

    @jax.jit
    def outputs(tokens, num_new, ancestors):
        """Of the window, and of one more token after the first ones of it are kept."""
        given = first._replace(tokens=tokens, end=first.base + num_new, ancestors=ancestors)
        shared = prepare(params, model)
        h, after = window(params, state, given, shared=shared, model=model, commits=False)
        after = commit(after, given, kept, model)
        base = first.base + kept
        given = first._replace(base=base, begin=base, end=base + 1)
        return h, window(params, after, given, shared=shared, model=model, commits=False)[0]

    ways = [paths(row) for row in range(ROWS)]
    bits = [[sum(1 << other for other in path) for path in own] for own in ways]
    of_tree, following = outputs(jnp.asarray(drawn), jnp.array(NUM_NEW), jnp.array(bits, jnp.int32))
    expected = outputs(jnp.asarray(drawn), jnp.array(NUM_NEW), None)[1]
    np.testing.assert_allclose(following, expected, rtol=2e-5, atol=2e-5)
    for token in range(width):
        chains = np.zeros_like(drawn)
        for row in range(ROWS):
            chains[row, : len(ways[row][token])] = drawn[row, ways[row][token]]
        lengths = [len(own[token]) for own in ways]
        of_chains = outputs(jnp.asarray(chains), jnp.array(lengths), None)[0]
        for row in range(ROWS):
            if token < NUM_NEW[row]:
                got, expected = of_tree[row, token], of_chains[row, lengths[row] - 1]
                np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["with_unknown_kind", pytest.param("jamba", marks=left_to_all)])
def test_what_windows_leave_is_what_a_prefill_leaves(name):
    """Windows of four tokens, of which the wrong ones do not stay, up to a full ring and its fold."""
    model, params, start = setting(name, window=4)
    grain, rows = model.geometry.grain, prompt_chunk(model, start)
    last = 2 * grain
    tokens = np.random.default_rng(1).integers(0, VOCAB, (ROWS, last + 4), np.int32)
    tokens[:, :TOKENS] = np.asarray(rows.tokens)
    shared, slots = prepare(params, model), jnp.array([1, 2])
    _, state = jax.jit(lambda params, state: chunk(params, state, rows, model=model))(params, start)

    @jax.jit
    def judged(state, drafts, right):
        base = state.lengths[:ROWS]
        fed = jnp.minimum(4, last - base)
        given = WindowRows(drafts, base, base, base + fed, rows.state_len, slots, rows.table)
        _, state = window(params, state, given, shared=shared, model=model, commits=False)
        return commit(state, given, jnp.minimum(right, fed), model)

    state = state.replace(lengths=state.lengths.at[:ROWS].set(rows.length))
    rng, wrong = np.random.default_rng(2), 0
    while (at := np.asarray(state.lengths[:ROWS])).min() < last:
        right = rng.integers(1, 5, ROWS)
        drafts = np.stack([row[place : place + 4] for row, place in zip(tokens, at, strict=True)])
        drafts = np.where(np.arange(4) < right[:, None], drafts, (drafts + 1) % VOCAB)
        state, wrong = judged(state, drafts, right), wrong + (right < 4).sum()
    assert wrong > 5
    full = jnp.ones(ROWS, bool)
    at = Cursor(state.lengths[:ROWS], rows.state_len, slots)
    fold = jax.jit(lambda state: fold_full(state, at, full, slots, shared, model)[0])
    state = fold(state)

    ends = jnp.full(ROWS, last)
    whole = rows._replace(tokens=tokens[:, :last], length=ends, state_len=ends)
    prefill = jax.jit(lambda params, state: chunk(params, state, whole, model=model))
    _, expected = prefill(params, start)
    arenas = [np.asarray(one.arena[1:]).view(np.float32) for one in (state, expected)]
    np.testing.assert_allclose(*arenas, rtol=2e-4, atol=2e-5)
    for group, *rings in zip(model.geometry.groups, state.rings, expected.rings, strict=True):
        if "conv" in rings[0]:
            conv = [ring["conv"][:, :ROWS, : group.layout.columns] for ring in rings]
            conv = [np.asarray(one).view(np.float32) for one in conv]
            np.testing.assert_allclose(*conv, rtol=2e-4, atol=2e-5)

    following = next_token(model, whole)
    one = jax.jit(lambda state: window(params, state, following, shared=shared, model=model)[0])
    np.testing.assert_allclose(one(state), one(expected), rtol=2e-4, atol=2e-5)


def test_a_tree_that_is_too_large_or_commits_is_refused():
    model, _, state = setting("llama")
    first = next_token(model, prompt_chunk(model, state))
    for tokens, commits, words in ((32, False, "at most 31"), (1, True, "commits=False")):
        rows = first._replace(ancestors=jnp.ones((ROWS, tokens), jnp.int32))
        with pytest.raises(ValueError, match=words):
            WindowWalk(state, rows, shared=(), model=model, commits=commits)

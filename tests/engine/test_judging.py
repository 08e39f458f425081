"""Tokens that a verification draws follow the model's distribution, whatever is drafted."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from hybrid_jax.config import XLA, SpeculationConfig
from hybrid_jax.engine import pack
from hybrid_jax.engine.steps.verify import Window, judge
from tests.drawing import left_to_all
from tests.kernels.sampling_rows import softmax

VOCABULARY, ROWS, DRAWS = 16, 2048, 100_000
UNLIKELY = 1e-4  # what chance alone would rarely exceed
LAYOUT = pack.row_layout(())


def batch(seed: int) -> np.ndarray:
    """Rows at temperature 1, each with a seed of its own."""
    rows = np.zeros((ROWS, LAYOUT.size), np.int32)
    rows[:, LAYOUT.spans["seed"]] = np.random.default_rng(seed).integers(0, 2**31, (ROWS, 2))
    for name in ("temperature", "top_p"):
        rows[:, LAYOUT.spans[name]] = pack.float_bits(1.0)
    rows[:, LAYOUT.spans["stop_ids"]] = -1
    return rows


@pytest.mark.parametrize("tree", [None, (0, 0, 1, 1, 2, 4)], ids=["chain", "tree"])
@left_to_all("tree")
def test_100_000_draws_follow_the_softmax(tree):
    """At each depth, over all rows that got there. Nine in ten drafts are likely tokens, so many are accepted."""
    speculation = SpeculationConfig(num_tokens=4, tree=tree)
    model = SimpleNamespace(
        speculation=speculation,
        backend=XLA,
        config=SimpleNamespace(vocab_size=VOCABULARY),
    )
    width, depths = speculation.window, speculation.depths
    rng = np.random.default_rng(0)
    by_depth = 2.5 * rng.normal(size=(1 + max(depths), VOCABULARY)).astype(np.float32)
    logits = jnp.asarray(np.repeat(by_depth[list(depths)][:, None], ROWS, axis=1))

    @jax.jit
    def judged(rows, tokens):
        full = jnp.full(ROWS, width)
        window = Window(tokens, full, full, jnp.arange(ROWS) % 100)
        made = judge(logits, window, rows, LAYOUT, 0, None, model)
        return made.sampled.tokens, made.count

    seen, biased, draws = np.zeros((1 + max(depths), VOCABULARY)), np.zeros(VOCABULARY), 0
    for seed in range(200):
        drafts = rng.integers(0, VOCABULARY, (ROWS, width))
        before = [
            max(depth - 1, 0) for depth in depths
        ]  # a draft should be what is drawn after its parent
        likely = np.argsort(-by_depth[before], axis=1)
        often = rng.random((ROWS, width)) < 0.9
        drafts = np.where(
            often, likely[np.arange(width), rng.integers(0, 2, (ROWS, width)) * bool(tree)], drafts
        )
        tokens, count = map(np.asarray, judged(batch(seed), jnp.asarray(drafts, jnp.int32)))
        for depth in range(1 + max(depths)):
            drawn = tokens[depth][count > depth]
            seen[depth] += np.bincount(drawn, minlength=VOCABULARY)
        biased += np.bincount(drafts[:, 1], minlength=VOCABULARY)
        draws = int(seen.sum())
        if draws >= DRAWS:
            break
    assert draws >= DRAWS and seen[-1].sum() > 300
    for depth, found in enumerate(seen):
        assert likelihood(found, by_depth[depth]) > UNLIKELY, depth
    assert likelihood(biased, by_depth[0]) < UNLIKELY


def likelihood(found: np.ndarray, logits: np.ndarray) -> float:
    """How likely counts are that are at least so far from the softmax. Rare tokens are counted together."""
    expected = softmax(logits) * found.sum()
    rare = expected < 10
    counts, wanted = ([*x[~rare], x[rare].sum()] for x in (found, expected))
    if not rare.any():
        counts, wanted = counts[:-1], wanted[:-1]
    return float(chisquare(counts, wanted).pvalue)

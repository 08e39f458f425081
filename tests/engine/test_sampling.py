"""Which tokens may be drawn, are reported and stopped at, beside definitions in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.engine.sampling import logprobs, stopped
from tests.kernels.sampling_rows import choose, rows, softmax

report = jax.jit(logprobs, static_argnames="count")


@pytest.mark.parametrize("vocab", [200, 3000])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"min_p": [0.0, 0.0, 0.9, 0.0]},
        {"top_p": 0.9},
        {"min_p": 0.1, "top_p": 0.5},
        {"top_k": 10**6},
    ],
)
def test_stop_ids_are_not_drawn_before_the_first_position_that_may_end(settings, vocab):
    """As if they were not there: what is likely beside them is judged by what else there is."""
    logits = np.random.default_rng(12).standard_normal((16, vocab)).astype(np.float32)
    logits[:, [3, vocab - 9]] = 50
    without = logits.copy()
    without[1:3, [3, vocab - 9]] = without[4:, [3, vocab - 9]] = -np.inf
    early = {
        "stop_ids": [[3, vocab - 9, 3, vocab + 5]] * 16,
        "min_end": [8, 9, 10, 0] + [20] * 12,
    }
    settings = {n: v * 4 if isinstance(v, list) else v for n, v in settings.items()}
    got = choose(jnp.asarray(logits), rows(16, **settings, **early), jnp.full(16, 8))
    want = choose(jnp.asarray(without), rows(16, **settings), jnp.full(16, 8))
    assert got.tolist() == want.tolist()
    stopped_at = [token in (3, vocab - 9) for token in got.tolist()]
    assert stopped_at == [True, False, False, True] + [False] * 12


@pytest.mark.parametrize("vocab", [7, 5003])
def test_logprobs_and_ranks_are_numpys(vocab):
    rng, count = np.random.default_rng(5), min(6, vocab)
    logits = rng.standard_normal((5, vocab)).astype(np.float32) * 4
    logits[0, :3] = logits[0].max() + 1  # a tie for the first place
    tokens = rng.integers(0, vocab, 5).astype(np.int32)
    tokens[0] = 2
    got = report(jnp.asarray(logits), jnp.asarray(tokens), count=count)
    for b in range(5):
        values = np.log(softmax(logits[b]))
        np.testing.assert_allclose(got.chosen[b], values[tokens[b]], rtol=1e-5)
        order = np.argsort(-logits[b], kind="stable")
        assert got.rank[b] == list(order).index(tokens[b]) + 1
        best = order[:count]
        np.testing.assert_array_equal(got.ids[b], best)
        np.testing.assert_allclose(got.values[b], values[best], rtol=1e-5)
    assert got.rank[0] == 3  # two tokens with lower ids are as likely


def test_stop_ids_stop_and_unused_ones_do_not():
    settings = rows(
        5, stop_ids=[[3, 9, -1, -1], [3, 9, -1, -1], [-1] * 4, [0, -1, -1, -1], [7] * 4]
    )
    got = stopped(jnp.array([9, 4, 0, 0, 7], jnp.int32), settings)
    assert got.tolist() == [True, False, False, True, True]

"""Which tokens are kept and chosen by XLA's form, beside definitions in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sampling_rows import choose, keep, kept_by_sorting, rows

# The device adds float32 probabilities in its own order: a set is right if p is reached within this.
SLACK = 1e-6


def cases() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    dead = rng.standard_normal((1, 40)).astype(np.float32)
    dead[0, ::2] = -np.inf
    return {
        "random": rng.standard_normal((4, 61)).astype(np.float32) * 3,
        "negative": -100 - rng.standard_normal((2, 30)).astype(np.float32) ** 2,
        "ties": rng.integers(-2, 3, (4, 50)).astype(np.float32),
        "all_equal": np.zeros((1, 16), np.float32),
        "signed_zeros": np.array([[0.0, -0.0, 1.0, -1.0, -0.0, 0.0]], np.float32),
        "dead_tokens": dead,
        "one_token": np.ones((1, 1), np.float32),
        "one_alive": np.where(np.arange(8) == 5, 0, -np.inf)[None].astype(np.float32),
        "large_vocabulary": rng.standard_normal((2, 5003)).astype(np.float32) * 2,
        "large_values": rng.standard_normal((2, 33)).astype(np.float32) * 1e30,
    }


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(1, 1.0), (5, 1.0), (10**6, 1.0), (0, 0.5), (0, 1e-9), (0, 0.999), (3, 0.7), (40, 0.3)],
)
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_bisection_keeps_what_sorting_keeps(name, top_k, top_p, min_p):
    scaled = cases()[name]
    settings = rows(len(scaled), top_k=top_k, top_p=top_p, min_p=min_p)
    got = np.asarray(keep(jnp.asarray(scaled), settings))
    for row, line in zip(got, scaled, strict=True):
        kept = set(np.flatnonzero(row > -np.inf))
        low, high = (kept_by_sorting(line, top_k, top_p, s, min_p) for s in (-SLACK, SLACK))
        assert low <= kept <= high, f"{sorted(kept)} of {sorted(high)}"
        assert int(np.argmax(line)) in kept
        np.testing.assert_array_equal(row[sorted(kept)], line[sorted(kept)])


def test_rows_filter_by_their_own_parameters():
    scaled = np.random.default_rng(1).standard_normal((4, 50)).astype(np.float32)
    top_k, top_p = [0, 3, 0, 7], [1.0, 1.0, 0.4, 0.6]
    got = np.asarray(keep(jnp.asarray(scaled), rows(4, top_k=top_k, top_p=top_p)))
    for b in range(4):
        want = kept_by_sorting(scaled[b], top_k[b], top_p[b], 0)
        assert set(np.flatnonzero(got[b] > -np.inf)) == want
    assert (got[0] == scaled[0]).all()


@pytest.mark.parametrize("temperature", [1e-38, 1e-20, 1e30])
def test_absurd_temperatures_give_tokens(temperature):
    logits = jnp.asarray(np.random.default_rng(6).standard_normal((2, 300)), jnp.float32) * 50
    for top_p in (1.0, 0.9):
        got = choose(logits, rows(2, temperature=temperature, top_p=top_p), jnp.arange(2))
        if temperature < 1:
            assert got.tolist() == np.argmax(logits, axis=-1).tolist()
        assert (0 <= np.asarray(got)).all() and (np.asarray(got) < 300).all()


def test_greedy_rows_compare_logits_as_they_are():
    """Not less the largest: on a CPU XLA takes a difference this small for zero."""
    logits = np.zeros((1, 64), np.float32)
    logits[0, 5] = 1.2e-38
    logits[0, 9] = np.nextafter(logits[0, 5], np.float32(1))
    assert choose(jnp.asarray(logits), rows(1, temperature=0.0), jnp.zeros(1, jnp.int32)) == 9


def test_temperature_zero_is_the_first_of_the_largest():
    logits = jnp.array([[1.0, 5.0, 5.0, 0.0], [-1.0, -2.0, -1.0, -3.0]])
    got = choose(logits, rows(2, temperature=0.0, top_k=1, top_p=0.1), jnp.arange(2))
    assert got.dtype == jnp.int32 and got.tolist() == [1, 0]


def test_greedy_rows_stay_greedy_beside_random_ones():
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((6, 200)), jnp.float32)
    temperature = [0.0, 2.0, 0.0, 0.5, 0.0, 5.0]
    got = choose(logits, rows(6, temperature=temperature, top_k=[0, 5, 9, 0, 1, 0]), jnp.arange(6))
    best = np.argmax(logits, axis=-1)
    assert got[::2].tolist() == best[::2].tolist()
    many = [
        choose(logits, rows(6, temperature=temperature), jnp.full(6, p)).tolist() for p in range(20)
    ]
    assert all(tokens[::2] == best[::2].tolist() for tokens in many)
    assert len({tokens[5] for tokens in many}) > 5

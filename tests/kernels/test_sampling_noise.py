"""Noise that depends on nothing but its key, and has the distribution it should."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.token_sampling.numbers import noise_keys, token_noise
from tests.kernels.sampling_rows import choose, kept_by_sorting, rows, softmax


def test_noise_depends_on_seed_sample_and_position_alone():
    """The same draw at any row, beside any neighbours, whatever they ask for; another key, another draw."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((1, 300)).astype(np.float32)
    key = {
        "seed": [[5, 9]],
        "sample_index": [2],
        "temperature": [1.3],
        "top_k": [50],
        "top_p": [0.9],
    }
    alone = choose(jnp.asarray(logits), rows(1, **key), jnp.array([77]))[0]
    for place in range(4):
        others = {
            "seed": rng.integers(0, 2**32, (4, 2), np.uint32),
            "sample_index": rng.integers(0, 9, 4),
            "temperature": rng.choice([0.0, 0.4, 3.0], 4),
            "top_k": rng.choice([0, 1, 20], 4),
            "top_p": rng.choice([1.0, 0.2], 4),
        }
        for name, value in key.items():
            others[name][place] = value[0]
        batch = rng.standard_normal((4, 300)).astype(np.float32)
        batch[place] = logits[0]
        positions = rng.integers(0, 1000, 4).astype(np.int32)
        positions[place] = 77
        assert choose(jnp.asarray(batch), rows(4, **others), jnp.asarray(positions))[place] == alone
    flat = jnp.zeros((1, 4096))
    base = {"seed": [[5, 9]], "sample_index": [2]}
    draws = [
        choose(flat, rows(1, **base | change), jnp.array([position]))[0].item()
        for change, position in (
            ({}, 77),
            ({}, 78),
            ({"sample_index": [3]}, 77),
            ({"seed": [[6, 9]]}, 77),
            ({"seed": [[5, 10]]}, 77),
        )
    ]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 6, 1.0), (1.5, 0, 0.8)]
)
def test_many_draws_follow_the_distribution(temperature, top_k, top_p):
    """Chi-square over 20000 positions of one stream; the limit is far out, the keys are fixed."""
    count, vocab = 20_000, 20
    logits = np.random.default_rng(4).standard_normal(vocab).astype(np.float32) * 1.5
    scaled = logits / temperature
    kept = sorted(kept_by_sorting(scaled, top_k, top_p, 0))
    want = softmax(scaled[kept]) * count
    settings = {"seed": [[1, 2]], "temperature": temperature, "top_k": top_k, "top_p": top_p}
    batch = jnp.broadcast_to(jnp.asarray(logits), (count, vocab))
    tokens = np.asarray(choose(batch, rows(count, **settings), jnp.arange(count)))
    found = np.bincount(tokens, minlength=vocab)
    assert found.sum() == found[kept].sum()
    freedom = len(kept) - 1
    chi_square = ((found[kept] - want) ** 2 / want).sum()
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)
    wrong = softmax(scaled[kept] * 1.15) * count
    assert ((found[kept] - wrong) ** 2 / wrong).sum() > freedom + 4 * np.sqrt(2 * freedom)


def test_noise_has_the_gumbel_distribution():
    """Moments and tail over one key's vocabulary and over many keys at one token."""
    given = rows(2000)
    keys = noise_keys(given.seed, given.sample_index, jnp.arange(2000))
    tokens = jnp.arange(500)[None]
    noise = np.asarray(token_noise(keys, tokens), np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 0.005
    assert abs(noise.var() - np.pi**2 / 6) < 0.01
    for level in (0.0, 3.0, 8.0):
        want = 1 - np.exp(-np.exp(-level))
        assert abs((noise > level).mean() - want) < 5 * np.sqrt(want / noise.size) + 1e-6
    across_tokens = np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]
    across_keys = np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]
    assert abs(across_tokens) < 0.004 and abs(across_keys) < 0.004


def test_neighbouring_seeds_samples_and_positions_are_not_correlated():
    logits = jnp.zeros((4000, 2))
    for name in ("seed", "sample_index", "position"):
        numbers = np.arange(4000)
        settings = {"seed": [[3, 0]]}
        if name == "seed":
            settings["seed"] = np.stack([numbers, numbers * 0], 1)
        if name == "sample_index":
            settings["sample_index"] = numbers
        positions = numbers if name == "position" else numbers * 0 + 7
        tokens = np.asarray(choose(logits, rows(4000, **settings), jnp.asarray(positions)))
        assert abs(tokens.mean() - 0.5) < 0.04
        assert abs((tokens[1:] == tokens[:-1]).mean() - 0.5) < 0.04

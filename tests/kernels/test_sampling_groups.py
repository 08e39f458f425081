"""Drawing among groups of likely tokens, or by bounds, is drawing among all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.token_sampling import groups
from pallas_kernels.token_sampling.numbers import gumbel, token_noise
from pallas_kernels.token_sampling.xla import (
    LIKELY_GROUPS,
    draw_among_all,
    draw_among_likely,
    draw_by_bounds,
    mass_of_all,
    score,
)
from tests.kernels.sampling_rows import arrays_of, choose, keep, rows


@pytest.mark.parametrize(
    ("settings", "few"),
    [
        ({"top_k": 1}, True),
        ({"top_k": 50}, True),
        ({"top_k": 128}, True),
        ({"top_k": 2000}, False),
        ({"top_p": 0.3}, True),
        ({"top_p": 0.999}, False),
        ({"min_p": 0.1}, True),
        ({"min_p": 1e-7}, False),
        ({"top_k": 40, "top_p": 0.5, "min_p": 0.02}, True),
        # What top-p keeps is in, what it is a share of is not.
        ({"top_k": 2000, "top_p": 0.2}, False),
        ({"top_k": 2000, "min_p": 0.3}, True),  # min_p leaves fewer than 2000
        ({"top_k": 10**6, "min_p": 0.3}, True),
        ({"top_k": 10**6, "top_p": 0.2}, False),
        ({"top_p": 0.9, "min_p": 0.05}, True),
    ],
)
def test_drawing_among_the_likely_is_drawing_among_all(settings, few):
    """The same token where the likely groups are enough, and only then are they said to be."""
    check_way(few_groups, some_logits(), settings, few)


@pytest.mark.parametrize("settings", [{"top_k": 1000}, {"top_k": 1152}, {"top_p": 0.75}])
def test_more_groups_are_enough_for_more(settings):
    check_way(few_groups, some_logits(), settings, False)
    check_way(more_groups, some_logits(), settings, True)


def test_few_allowed_tokens_are_found_without_the_whole_vocabulary():
    """A constraint's mask leaves seven tokens of a row; filters that keep more than there are keep these."""
    logits = some_logits()
    allowed = np.random.default_rng(13).permutation(logits.shape[1])[:7]
    masked = np.full_like(logits, -np.inf)
    masked[:, allowed] = logits[:, allowed]
    for settings in ({"top_k": 10**6}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.999}):
        check_way(few_groups, masked, settings, True)
        check_way(more_groups, masked, settings, True)
    check_way(draw_by_bounds, masked, {}, True)


@pytest.mark.parametrize("name", ["flat", "steep", "ties", "one", "short"])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.9])
def test_drawing_by_bounds_is_drawing_among_all(name, min_p):
    logits = {
        "flat": np.zeros((12, 40_000), np.float32),
        "steep": some_logits() * 10,
        "ties": np.round(some_logits()),
        "one": np.where(np.arange(5000) == 4097, 0, -np.inf)[None].astype(np.float32),
        "short": some_logits()[:, :601],
    }[name]
    check_way(draw_by_bounds, logits, {"min_p": min_p}, True)


def test_bounds_that_leave_too_much_out_prove_nothing(monkeypatch):
    """Four groups of the vocabulary are looked at; a better token in another one is never missed."""
    monkeypatch.setattr("pallas_kernels.token_sampling.xla.BOUNDED_GROUPS", 4)
    # A shape that no other test has traced with more groups.
    check_way(draw_by_bounds, some_logits()[:, :39_000] / 3, {}, None)


def few_groups(scores, arrays, keys):
    mass = mass_of_all(scores, arrays, arrays.temperature > 0)
    return draw_among_likely(scores, arrays, keys, mass, LIKELY_GROUPS[0])


def more_groups(scores, arrays, keys):
    mass = mass_of_all(scores, arrays, arrays.temperature > 0)
    return draw_among_likely(scores, arrays, keys, mass, LIKELY_GROUPS[1])


def some_logits() -> np.ndarray:
    logits = np.random.default_rng(7).standard_normal((10, 40_000)).astype(np.float32) * 3
    logits[::7] = np.round(logits[::7])  # ties at the edges
    return logits


def check_way(way, logits: np.ndarray, settings: dict, few: bool | None) -> None:
    """`few`: whether most rows can do without the whole vocabulary; None if some can and some cannot."""
    count = len(logits)
    params, positions = rows(count, **settings), jnp.arange(count)
    arrays = arrays_of(jnp.asarray(logits), params, positions)
    scores, keys = score(arrays), arrays.noise_keys()
    tokens, enough = jax.jit(way)(scores, arrays, keys)
    every = jax.jit(draw_among_all)(scores, arrays, keys, jnp.ones(count, bool))
    scaled = jnp.asarray(logits) - logits.max(-1, keepdims=True)
    noise = token_noise(keys, jnp.arange(logits.shape[1])[None])
    np.testing.assert_array_equal(every, jnp.argmax(keep(scaled, params) + noise, axis=-1))
    enough = np.asarray(enough)
    share = enough.mean()
    assert 0 < share < 1 if few is None else (share > 0.5) == few
    np.testing.assert_array_equal(np.asarray(tokens)[enough], np.asarray(every)[enough])
    np.testing.assert_array_equal(choose(jnp.asarray(logits), params, positions), every)


def test_a_larger_hash_is_no_more_noise():
    """What bounds rest on, within the slack they allow: at both ends and over the whole range."""
    ends = np.arange(2**16, dtype=np.uint32)
    bits = np.concatenate(
        [ends, np.linspace(2**16, 2**32 - 2**17, 10**6).astype(np.uint32), ~ends[::-1]]
    )
    noise = np.asarray(gumbel(jnp.asarray(bits)), np.float64)
    assert (np.maximum.accumulate(noise[::-1])[::-1] - noise).max() < 1e-5


@pytest.mark.parametrize("count", [1, 5, 60])
@pytest.mark.parametrize("size", [70, 128, 1000, 6000, 7808])
def test_the_largest_of_a_row_are_those_of_top_k(size, count):
    """Ties included: whole numbers from few, so that groups tie with each other and inside."""
    rng = np.random.default_rng(3)
    for low in (-3, -40):
        x = jnp.asarray(rng.integers(low, 4, (20, size)), jnp.float32).at[0].set(-jnp.inf)
        for got, want in zip(groups.largest(x, count), jax.lax.top_k(x, count), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("count", [1, 7, 40])
@pytest.mark.parametrize("size", [5, 41, 400, 3001])
def test_the_best_groups_and_the_least_of_them_are_those_of_sorting(size, count):
    rng = np.random.default_rng(11)
    maxima = rng.integers(-20, 20, (6, size)).astype(np.float32)
    maxima[0] = np.sort(maxima[0])  # the best lie together
    places, least = groups.best(jnp.asarray(maxima), count)
    for row, got, edge in zip(maxima, np.asarray(places), least, strict=True):
        order = np.argsort(-row, kind="stable")
        np.testing.assert_array_equal(got, np.sort(order[:count]))
        assert edge == (row[order[count - 1]] if count < size else -np.inf)


def test_many_groups_are_those_of_sorting_or_none_are_promised():
    """Rows of distinct maxima, of ties that end at the edge, of ties across it, and of few finite ones."""
    size, count = 3001, groups.MANY + 88
    maxima = np.stack([np.random.default_rng(n).permutation(size) for n in range(4)]) - 1500.0
    maxima[1] = np.minimum(maxima[1], size - 1500.0 - count)  # all that are in tie
    maxima[2] = np.minimum(maxima[2], 0)  # more than fit
    maxima[3, maxima[3] < size - 1500 - 300] = -np.inf
    places, least = groups.best(jnp.asarray(maxima, jnp.float32), count)
    for row in (0, 1):
        np.testing.assert_array_equal(places[row], np.sort(np.argsort(-maxima[row])[:count]))
        assert least[row] == size - 1500 - count
    assert least[2] == np.inf
    np.testing.assert_array_equal(places[3, :300], np.flatnonzero(maxima[3] > -np.inf))
    assert (places[3, 300:] == size).all() and least[3] == -np.inf


def test_a_row_draws_the_same_whichever_way_its_neighbours_go():
    """Rows of all ways in one batch, and each kind in a batch of its own."""
    logits = np.random.default_rng(8).standard_normal((64, 3000)).astype(np.float32) * 3
    kinds = {
        "top_k": [20, 0, 2000, 0],
        "top_p": [1.0, 1.0, 0.9999, 0.9],
        "temperature": [1.0, 1.0, 1.0, 0.0],
    }
    seed = [[n, 0] for n in range(64)]
    mixed = {name: values * 16 for name, values in kinds.items()}
    together = choose(jnp.asarray(logits), rows(64, seed=seed, **mixed), jnp.arange(64))
    for kind in range(4):
        own = {name: values[kind] for name, values in kinds.items()}
        own = rows(16, seed=seed[kind::4], **own)
        alone = choose(jnp.asarray(logits[kind::4]), own, jnp.arange(64)[kind::4])
        np.testing.assert_array_equal(together[kind::4], alone)


@pytest.mark.parametrize("size", [1, 5, 16, 128, 129, 1000])
def test_the_largest_is_found_by_groups(size):
    x = np.random.default_rng(9).integers(-3, 3, (50, size)).astype(np.float32)
    x[3] = -np.inf
    np.testing.assert_array_equal(groups.argmax(jnp.asarray(x)), np.argmax(x, axis=-1))

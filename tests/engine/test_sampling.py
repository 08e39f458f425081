"""Sampling beside its definition with a sort, in numpy; noise that depends on nothing but its key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.engine import groups
from hybrid_jax.engine.sampling import (
    LIKELY_GROUPS,
    SamplingRows,
    draw_among_all,
    draw_among_likely,
    draw_by_bounds,
    gumbel,
    keep_likely,
    logprobs,
    mass_of_all,
    noise_keys,
    sample,
    score,
    stopped,
    token_noise,
)

# The device adds float32 probabilities in its own order: a set is right if p is reached within this.
SLACK = 1e-6

choose = jax.jit(sample)
keep = jax.jit(keep_likely)
report = jax.jit(logprobs, static_argnames="count")


def rows(count: int, **settings) -> SamplingRows:
    """Parameters of `count` rows; each setting is one value for all or a list."""
    defaults = {
        "seed": [[n, 0] for n in range(count)],
        "sample_index": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "min_end": 0,
        "stop_ids": [[-1] * 4] * count,
    }
    dtypes = {"seed": np.uint32} | dict.fromkeys(("temperature", "top_p", "min_p"), np.float32)
    fields = {}
    for name, value in (defaults | settings).items():
        array = np.asarray(value, dtypes.get(name, np.int32))
        fields[name] = jnp.asarray(np.broadcast_to(array, (count, *array.shape[1:])))
    return SamplingRows(**fields)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def kept_by_sorting(
    scaled: np.ndarray, top_k: int, top_p: float, slack: float, min_p: float = 0.0
) -> set[int]:
    """min_p, top-k, then the smallest set of the most likely that reaches top_p; ties at an edge all stay."""
    scaled = np.asarray(scaled, np.float64)
    if min_p:
        scaled = np.where(scaled >= scaled.max() + np.log(min_p), scaled, -np.inf)
    if top_k:
        edge = np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
        scaled = np.where(scaled >= edge, scaled, -np.inf)
    if top_p < 1:
        values = softmax(scaled)
        order = np.argsort(-values, kind="stable")
        reached = np.cumsum(values[order]) >= top_p + slack
        last = int(reached.argmax()) if reached.any() else len(order) - 1
        scaled = np.where(scaled >= scaled[order[last]], scaled, -np.inf)
    return set(np.flatnonzero(scaled > -np.inf))


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
        "flat": np.zeros((256, 40_000), np.float32),
        "steep": some_logits() * 10,
        "ties": np.round(some_logits()),
        "one": np.where(np.arange(5000) == 4097, 0, -np.inf)[None].astype(np.float32),
        "short": some_logits()[:, :601],
    }[name]
    check_way(draw_by_bounds, logits, {"min_p": min_p}, True)


def test_bounds_that_leave_too_much_out_prove_nothing(monkeypatch):
    """Four groups of the vocabulary are looked at; a better token in another one is never missed."""
    monkeypatch.setattr("hybrid_jax.engine.sampling.BOUNDED_GROUPS", 4)
    # A shape that no other test has traced with more groups.
    check_way(draw_by_bounds, some_logits()[:, :39_000] / 3, {}, None)


def few_groups(scores, params, keys):
    mass = mass_of_all(scores, params, params.temperature > 0)
    return draw_among_likely(scores, params, keys, mass, LIKELY_GROUPS[0])


def more_groups(scores, params, keys):
    mass = mass_of_all(scores, params, params.temperature > 0)
    return draw_among_likely(scores, params, keys, mass, LIKELY_GROUPS[1])


def some_logits() -> np.ndarray:
    logits = np.random.default_rng(7).standard_normal((64, 40_000)).astype(np.float32) * 3
    logits[::7] = np.round(logits[::7])  # ties at the edges
    return logits


def check_way(way, logits: np.ndarray, settings: dict, few: bool | None) -> None:
    """`few`: whether most rows can do without the whole vocabulary; None if some can and some cannot."""
    count = len(logits)
    params, positions = rows(count, **settings), jnp.arange(count)
    scores, keys = score(jnp.asarray(logits), params, positions), noise_keys(params, positions)
    tokens, enough = jax.jit(way)(scores, params, keys)
    every = jax.jit(draw_among_all)(scores, params, keys, jnp.ones(count, bool))
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


@pytest.mark.parametrize("temperature", [1e-38, 1e-20, 1e30])
def test_absurd_temperatures_give_tokens(temperature):
    logits = jnp.asarray(np.random.default_rng(6).standard_normal((2, 300)), jnp.float32) * 50
    for top_p in (1.0, 0.9):
        got = choose(logits, rows(2, temperature=temperature, top_p=top_p), jnp.arange(2))
        if temperature < 1:
            assert got.tolist() == np.argmax(logits, axis=-1).tolist()
        assert (0 <= np.asarray(got)).all() and (np.asarray(got) < 300).all()


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
    keys = noise_keys(rows(2000), jnp.arange(2000))
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
        assert got.rank[b] == (logits[b] > logits[b, tokens[b]]).sum() + 1
        best = np.argsort(-logits[b], kind="stable")[:count]
        np.testing.assert_array_equal(got.ids[b], best)
        np.testing.assert_allclose(got.values[b], values[best], rtol=1e-5)
    assert got.rank[0] == 1


def test_stop_ids_stop_and_unused_ones_do_not():
    settings = rows(
        5, stop_ids=[[3, 9, -1, -1], [3, 9, -1, -1], [-1] * 4, [0, -1, -1, -1], [7] * 4]
    )
    got = stopped(jnp.array([9, 4, 0, 0, 7], jnp.int32), settings)
    assert got.tolist() == [True, False, False, True, True]

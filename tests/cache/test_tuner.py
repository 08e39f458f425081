"""Alpha is found once, by replaying requests: when, which one, and from where."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_jax.cache.policy.flop_aware import FlopAware, whole_prefix_efficiency
from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.policy.tuner import ALPHAS, AlphaTuner
from hybrid_jax.costs import Costs

COSTS = Costs(flops_per_token=10, flops_per_key=2, kv_bytes=1, checkpoint_bytes=10)
PROMPT = np.array([1], np.int32)


class Scripted:
    """A cache that hits what a function of alpha and the request's number says."""

    def __init__(self, hit_len):
        self.made, self._hit_len = [], hit_len

    def __call__(self, policy: FlopAware):
        self.made.append(policy.alpha)
        asked = iter(range(10**6))
        hit_len = lambda: self._hit_len(policy.alpha, next(asked))
        return SimpleNamespace(request=lambda prompt, whole: hit_len())


def tuner(hit_len, **options) -> tuple[AlphaTuner, Scripted]:
    replay = Scripted(hit_len)
    return AlphaTuner(FlopAware(0.0, COSTS), replay, **options), replay


def observe(tuner: AlphaTuner, evictions: list[int]) -> list[bool]:
    """Whether it had tuned after each request; `evictions` are the counts so far."""
    tuned = []
    for count in evictions:
        tuner.observe(PROMPT, PROMPT, evictions=count)
        tuned.append(tuner.tuned)
    return tuned


@pytest.mark.parametrize("bootstrap", [1, 5, 15])
@pytest.mark.parametrize("first", [1, 3])
def test_it_tunes_when_the_bootstrap_period_after_the_first_eviction_is_over(bootstrap, first):
    found, replay = tuner(lambda alpha, number: alpha == 0.7, bootstrap=bootstrap)
    tuned = observe(found, [0] * (first - 1) + [1] * first * bootstrap)
    assert not any(tuned) and found.policy.alpha == 0 and replay.made == []
    assert observe(found, [2]) == [True]
    assert found.policy.alpha == 0.7


def test_it_tunes_only_once():
    found, replay = tuner(lambda alpha, number: alpha == 0.7, bootstrap=1)
    observe(found, [1] * 50)
    assert len(replay.made) == len(ALPHAS)


def test_without_an_eviction_it_never_tunes():
    found, replay = tuner(lambda alpha, number: 1)
    assert not any(observe(found, [0] * 100)) and replay.made == []


def test_of_many_requests_before_the_first_eviction_the_latest_are_kept():
    found, replay = tuner(lambda alpha, number: alpha == 0.7, bootstrap=2, max_before=3)
    assert not any(observe(found, [0] * 100)) and len(found._log) == 3
    assert observe(found, [1] * 7) == [False] * 6 + [True]  # the first of them, and twice three
    assert found.policy.alpha == 0.7


def test_every_alpha_of_the_paper_is_tried():
    found, replay = tuner(lambda alpha, number: 1, bootstrap=1)
    observe(found, [1, 1])
    assert sorted(replay.made) == pytest.approx([tenth / 10 for tenth in range(21)])


def test_of_equally_good_alphas_the_smallest_is_taken():
    found, _ = tuner(lambda alpha, number: 9 if alpha >= 0.5 else 8, bootstrap=1)
    observe(found, [1, 1])
    assert found.policy.alpha == 0.5


def test_hits_before_the_first_eviction_do_not_count():
    # 1.0 hits more in the first three requests, 2.0 after them.
    found, _ = tuner(
        lambda alpha, number: (alpha == 1.0) * 50 if number < 3 else alpha, bootstrap=1
    )
    observe(found, [0, 0, 1, 1, 1, 1])
    assert found.policy.alpha == 2.0


def evictions(cache: SimulatedCache) -> int:
    return cache.tree.counters.leaf_evictions + cache.tree.counters.tombstone_evictions


def test_a_replay_hits_what_going_on_from_a_snapshot_before_the_first_eviction_hits():
    rng = np.random.default_rng(5)
    bases = [rng.integers(0, 9, size, np.int32) for size in (10, 60, 30, 90, 20)]
    asked = [
        np.concatenate((bases[rng.integers(5)], rng.integers(0, 9, 4, np.int32)))
        for _ in range(200)
    ]
    make = lambda alpha: SimulatedCache(
        COSTS, 900, FlopAware(alpha, COSTS, efficiency=whole_prefix_efficiency)
    )
    cache, first = make(0.0), -1
    while not evictions(cache):
        first += 1
        snapshot = copy.deepcopy(cache)
        cache.request(asked[first], asked[first])
    totals = set()
    for alpha in (0.0, 0.4, 2.0):
        replay, went_on = make(alpha), copy.deepcopy(snapshot)
        went_on.tree.policy.alpha = alpha
        expected = [went_on.request(prompt, prompt) for prompt in asked[first:]]
        found = [replay.request(prompt, prompt) for prompt in asked]
        assert found[first:] == expected
        totals.add(sum(expected))
    assert first > 5 and len(totals) > 1


def test_what_it_finds_is_the_best_of_the_fixed_ones():
    # A long prompt comes back every sixth time, between short ones that push it out when age alone counts.
    asked = []
    for turn in range(90):
        words = [7] * 200 + [turn] if turn % 6 == 0 else [100 + turn] * 30
        asked.append(np.array(words, np.int32))
    make = lambda policy: SimulatedCache(COSTS, 300, policy)
    policy = FlopAware(0.0, COSTS)
    found, cache = AlphaTuner(policy, make), make(policy)
    seen = 0
    for prompt in asked:
        cache.request(prompt, prompt)
        seen += not found.tuned
        found.observe(prompt, prompt, evictions=cache.tree.counters.leaf_evictions)
    first = seen // 6

    def hits(alpha):
        replay = make(FlopAware(alpha, COSTS))
        return sum([replay.request(prompt, prompt) for prompt in asked[:seen]][first:])

    by_alpha = {alpha: hits(alpha) for alpha in ALPHAS}
    best = max(by_alpha.values())
    assert found.tuned and best > by_alpha[0.0]
    assert policy.alpha == min(alpha for alpha, count in by_alpha.items() if count == best)

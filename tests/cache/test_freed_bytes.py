"""What an eviction gives back beside what it was priced at: every candidate of random trees, in a copy of each."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hybrid_jax.cache.policy.adaptive import Adaptive
from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.policy.value import freed_bytes
from hybrid_jax.cache.tree.eviction import LeastRecentlyUsed
from hybrid_jax.cache.tree.node import ARENA, Node
from tests.cache.traffic import ask, text, traffic
from tests.cache.weighed import COSTS

POLICIES = {"lru": lambda costs: LeastRecentlyUsed(), "adaptive": Adaptive}


def evictable(cache: SimulatedCache) -> list[Node]:
    return [n for n in cache.tree.root.walk() if cache.tree.arena.candidates._where(n) is not None]


def given_back(cache: SimulatedCache, node: Node) -> int:
    """Bytes that are free once this node alone has been evicted; the cache itself stays as it is."""
    copies: dict = {}
    other = copy.deepcopy(cache, copies)
    twin = copies[id(node)]
    other.tree.policy.discard(twin)
    other.tree._evict(twin)
    other.check_invariants()
    return cache.budget.used - other.budget.used


@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("history", [0, 200, 10**6])
def test_every_candidate_gives_back_what_it_was_priced_at(kind, policy, history):
    costs = COSTS[kind]
    cache = SimulatedCache(costs, 250, POLICIES[policy](costs), history_tokens=history)
    seen = set()
    for number, pair in enumerate(traffic(5, 60)):
        ask(cache, *pair)
        if number % 6 == 5:
            for node in evictable(cache):
                price = freed_bytes(node, costs)
                assert given_back(cache, node) == price, text(node)
                seen.add(price)
    assert seen == {10} if kind == "recurrent" else len(seen) > 5


def cached(history: int, *prompts: str) -> SimulatedCache:
    cache = SimulatedCache(COSTS["hybrid"], 1000, LeastRecentlyUsed(), history_tokens=history)
    for prompt in prompts:
        ask(cache, prompt)
    return cache


def standing(cache: SimulatedCache, prefix: str) -> Node:
    return next(n for n in cache.tree.root.walk() if n.cached and text(n) == prefix)


def evict(cache: SimulatedCache, prefix: str) -> int:
    """Evicts the entry of one prefix; bytes given back."""
    node, before = standing(cache, prefix), cache.budget.used
    cache.tree.policy.discard(node)
    cache.tree._evict(node)
    cache.tree.make_room(0)  # forgets what is beyond the history
    return before - cache.budget.used


@pytest.mark.parametrize("history", [0, 1000])
def test_an_end_takes_the_pages_above_along_that_nothing_else_uses(history):
    # 20 shared tokens with a checkpoint, 4 and 5 after them. Without the shared checkpoint and the other end the
    # last one takes all 24 tokens along; the boundary at 20 stays where the other end's tokens are known.
    cache = cached(history, "s" * 20 + "aaaa", "s" * 20 + "bbbbb")
    assert evict(cache, "s" * 20) == 10
    assert evict(cache, "s" * 20 + "bbbbb") == 10 + 5
    last = standing(cache, "s" * 20 + "aaaa")
    assert last.start == (20 if history else 0)
    assert freed_bytes(last, COSTS["hybrid"]) == 10 + 24 == evict(cache, "s" * 20 + "aaaa")
    assert cache.budget.used == 0


def test_pages_that_a_checkpoint_above_uses_stay():
    cache = cached(1000, "s" * 10, "s" * 20 + "aaaa", "s" * 20 + "bbbbb")
    evict(cache, "s" * 20)
    evict(cache, "s" * 20 + "bbbbb")
    last = standing(cache, "s" * 20 + "aaaa")
    assert (last.start, last.parent.end) == (20, 20)  # a known sibling keeps the boundary
    assert freed_bytes(last, COSTS["hybrid"]) == 10 + 14 == evict(cache, "s" * 20 + "aaaa")


def test_several_boundaries_that_only_known_siblings_keep_are_passed():
    cache = cached(1000, "s" * 30, "s" * 20 + "aaaa", "s" * 10 + "bbbbb")
    for prefix in ("s" * 10 + "bbbbb", "s" * 20 + "aaaa", "s" * 20, "s" * 10):
        evict(cache, prefix)
    last = standing(cache, "s" * 30)
    assert [part.end for part in last.path()] == [10, 20, 30]
    assert freed_bytes(last, COSTS["hybrid"]) == 10 + 30 == evict(cache, "s" * 30)


def test_pages_above_that_somebody_pins_are_not_priced():
    cache = cached(1000, "s" * 20 + "aaaa", "s" * 20 + "bbbbb")
    cache.tree.pin(standing(cache, "s" * 20))
    cache.tree.disown(standing(cache, "s" * 20).slots[ARENA])
    evict(cache, "s" * 20 + "bbbbb")
    assert freed_bytes(standing(cache, "s" * 20 + "aaaa"), COSTS["hybrid"]) == 10 + 4
    assert evict(cache, "s" * 20 + "aaaa") == 10 + 4
    assert cache.budget.used == 20
    cache.tree.unpin(standing(cache, "s" * 20))
    assert cache.budget.used == 0


def test_without_checkpoints_an_end_gives_back_its_own_tokens_alone():
    costs = COSTS["attention"]
    cache = SimulatedCache(costs, 1000, LeastRecentlyUsed(), history_tokens=1000)
    for prompt in ("s" * 20 + "aaaa", "s" * 20 + "bbbbb"):
        ask(cache, prompt)
    assert evict(cache, "s" * 20 + "bbbbb") == 5
    assert evict(cache, "s" * 20 + "aaaa") == 4
    assert freed_bytes(standing(cache, "s" * 20), costs) == 20 == evict(cache, "s" * 20)


def test_the_cache_itself_is_left_alone_by_the_copies():
    cache = cached(1000, "s" * 20 + "aaaa", "s" * 20 + "bbbbb")
    before, used = np.array([n.end for n in evictable(cache)]), cache.budget.used
    for node in evictable(cache):
        given_back(cache, node)
    assert (before == [n.end for n in evictable(cache)]).all() and cache.budget.used == used

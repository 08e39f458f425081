"""What an eviction gives back beside what it was priced at: every candidate of random trees, in a copy of each."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax.cache.policy.adaptive import Adaptive
from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.policy.value import freed_bytes
from hybrid_jax.cache.tree.eviction import LeastRecentlyUsed
from hybrid_jax.cache.tree.node import ARENA, Node
from hybrid_jax.costs import frame_costs
from tests.cache.pools import GRAIN, Pools
from tests.cache.traffic import ask, text, tokens, traffic
from tests.cache.weighed import COSTS, CheckedAdaptive
from tests.schedule.simulated_engine import make_geometry

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


class WindowedPools(Pools):
    """A tree in real pools, with pages of layers with a window beside others, and prices as an engine has them."""

    def __init__(self, windows, page_tokens, kind="hybrid", policy=None):
        geometry = make_geometry(page_tokens=page_tokens, windows=windows, grain=GRAIN, kind=kind)
        self.costs, self.frame_bytes = frame_costs(geometry), geometry.frame_bytes
        super().__init__(
            page_tokens, geometry.has_state, 30000, geometry.frames_per_page,
            windows=[(part.window, part.frames) for part in geometry.windowed],
            state_frames=geometry.state_frames, max_slots=500, policy=policy,
        )  # fmt: skip

    def evictable(self) -> list[Node]:
        return [n for n in self.tree.root.walk() if self.tree.arena.candidates._where(n)]

    def given_back(self, node: Node) -> int:
        copies: dict = {}
        other = copy.deepcopy(self, copies)
        other.tree.policy.discard(copies[id(node)])
        other.tree._evict(copies[id(node)])
        other.check()
        return self.frame_bytes * (other.frames.num_free - self.frames.num_free)

    def note(self, text: str) -> None:
        """Caches a text of blocks, with a checkpoint where it parts from others and at its end."""
        whole = np.repeat(tokens(text), GRAIN).tolist()
        if parts := self.match(whole).match_len:
            self.insert(whole[:parts])
        self.insert(whole)


@pytest.mark.parametrize(
    ("page_tokens", "windows"),
    [(1, (None, 30)), (GRAIN, (12, 50)), (1, (400,))],
)
def test_pages_of_windows_are_priced_as_the_pool_has_them(windows, page_tokens):
    pools, prices = WindowedPools(windows, page_tokens), set()
    for number, (prompt, output) in enumerate(traffic(3, 16)):
        pools.note(prompt[-30:])
        pools.note(prompt[-30:] + output)
        if number % 8 == 7:
            for node in pools.evictable():
                price = freed_bytes(node, pools.costs)
                if parts_above(node):  # what its window reads above is shared, at least in part
                    assert 0 < price <= pools.given_back(node), (node, node.path())
                else:
                    assert price == pools.given_back(node), (node, node.path())
                    prices.add(price)
            pools.tree.make_room(pools.frames.num_free + 300)
    assert len(prices) > 5


def parts_above(node: Node) -> bool:
    """Whether paths part between a node and the next checkpoint above."""
    while (node := node.parent).parent is not None and not node.has_checkpoint(ARENA):
        if node.held[ARENA].num_children > 1:
            return True
    return False


def test_a_prompt_without_checkpoints_is_priced_whole_for_it_may_resume_anywhere():
    pools = WindowedPools((None, 20), GRAIN, kind="attention")
    for prompt in ("aaabbbbbb", "aaaccccccccc", "d" * 30):
        pools.note(prompt)
    nodes = pools.evictable()
    assert len(nodes) == 3
    for node in nodes:
        assert freed_bytes(node, pools.costs) == pools.given_back(node)


@pytest.mark.parametrize("windows", [(None, 30), (400,)])
def test_prices_are_kept_up_to_date_when_checkpoints_come_and_go(windows):
    order = CheckedAdaptive(frame_costs(make_geometry(page_tokens=1, windows=windows, grain=GRAIN)))
    pools = WindowedPools(windows, 1, policy=order)
    order.tree = pools.tree
    for prompt, output in traffic(4, 25):
        pools.note(prompt[-30:] + output)
        pools.tree.make_room(min(pools.frames.num_free + 100, 29000))
        order.check()
    assert len(order.victims) > 5


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
@pytest.mark.parametrize("windows", [(None, 30), (12, 50), (None, None)])
def test_a_prefix_takes_as_many_frames_of_the_pool_as_the_geometry_says(windows, kind):
    geometry = make_geometry(page_tokens=GRAIN, windows=windows, grain=GRAIN, kind=kind)
    for length in (GRAIN, 4 * GRAIN, 50 * GRAIN):
        pools = WindowedPools(windows, GRAIN, kind=kind)
        pools.insert(list(range(length)))
        assert pools.frames.num_held == geometry.cached_frames(length)
        if kind == "hybrid":
            taken = pools.costs.prefix_bytes(length)
            assert taken == pools.frames.num_held * pools.frame_bytes


def test_a_simulated_checkpoint_takes_what_its_windows_read_below_the_one_above():
    costs = replace(COSTS["hybrid"], kv_bytes=0, windowed_bytes=((6, 2), (30, 1)))
    cache = SimulatedCache(costs, 1000, LeastRecentlyUsed(), history_tokens=1000)
    for prompt, taken in (("s" * 20, 10 + 12 + 20), ("s" * 20 + "abcd", 10 + 8 + 4)):
        before = cache.budget.used
        ask(cache, prompt)
        assert cache.budget.used == before + taken
        cache.check_invariants()
    cache.tree.make_room(1000)
    assert cache.budget.used == 0

"""Pools that only count: what they refuse, what they give back, and that they notice a wrong count."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.pools.counted import ByteBudget, CountedPages, CountedSlots
from hybrid_jax.cache.pools.frames import OutOfFrames
from hybrid_jax.cache.tree.eviction import LeastRecentlyUsed
from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.costs import Costs

COSTS = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=10)


def test_a_budget_is_taken_to_its_last_byte():
    budget = ByteBudget(100)
    budget.take(60)
    budget.take(40)
    assert (budget.used, budget.num_free) == (100, 0)


def test_a_budget_refuses_what_it_does_not_have_and_stays_as_it_was():
    budget = ByteBudget(100)
    budget.take(60)
    with pytest.raises(OutOfFrames, match=r"^ByteBudget: needs 41 bytes, 40 of 100 free$"):
        budget.take(41)
    assert (budget.used, budget.peak) == (60, 60)


def test_the_peak_stays_when_bytes_are_given_back():
    budget = ByteBudget(100)
    budget.take(60)
    budget.give(50)
    budget.take(20)
    assert (budget.used, budget.peak) == (30, 60)


def test_what_is_lent_has_an_end_and_is_no_peak():
    budget = ByteBudget(100)
    budget.take(90)
    budget.lend(20)
    budget.take(30)
    with pytest.raises(OutOfFrames, match=r"^ByteBudget: needs 1 bytes, -20 of 100 free$"):
        budget.take(1)
    budget.give(25)
    budget.settle()
    assert (budget.used, budget.peak) == (95, 95)
    with pytest.raises(OutOfFrames, match="needs 6 bytes, 5 of 100 free"):
        budget.take(6)


def test_what_was_lent_must_be_given_back():
    budget = ByteBudget(100)
    budget.lend(20)
    budget.take(110)
    with pytest.raises(AssertionError, match="budget: 110 of 100 bytes used"):
        budget.settle()


def test_a_budget_shows_its_bytes():
    budget = ByteBudget(100)
    budget.take(60)
    assert repr(budget) == "ByteBudget(60 of 100 bytes used)"


def test_pages_take_the_bytes_of_their_tokens_and_give_them_back():
    budget = ByteBudget(100)
    pages = CountedPages(budget, token_bytes=3)
    held = pages.adopt(range(20), 0, 20)
    assert (budget.used, pages.num_frames) == (60, 20)
    pages.release(held[:5])
    assert (budget.used, pages.num_frames) == (45, 15)


def test_pages_that_the_budget_refuses_are_not_counted():
    budget = ByteBudget(50)
    pages = CountedPages(budget, token_bytes=3)
    with pytest.raises(OutOfFrames, match="needs 60 bytes, 50 of 50 free"):
        pages.adopt(range(20), 0, 20)
    assert (budget.used, pages.num_frames) == (0, 0)


def test_two_spans_of_pages_join_into_one_as_long():
    pages = CountedPages(ByteBudget(50), token_bytes=1)
    assert len(pages.join(range(3, 7), range(10), 4)) == 14
    assert len(pages.row([(14, range(0)), (4, range(10)), (0, range(3, 7))], 14)) == 14
    assert len(pages.row([(4, range(10)), (0, range(3, 7))], 9)) == 9


def test_a_checkpoint_is_held_until_its_last_holder_lets_go():
    budget = ByteBudget(25)
    slots = CountedSlots(budget, checkpoint_bytes=10)
    slot = slots.allocate()
    slots.retain(slot)
    slots.release(slot)
    assert (budget.used, slots.holders(slot), slots.num_held) == (10, 1, 1)
    slots.release(slot)
    assert (budget.used, slots.num_held) == (0, 0)


def test_a_checkpoint_that_the_budget_refuses_is_not_counted():
    slots = CountedSlots(ByteBudget(15), checkpoint_bytes=10)
    slots.allocate()
    with pytest.raises(OutOfFrames, match="needs 10 bytes, 5 of 15 free"):
        slots.allocate()
    assert slots.num_held == 1


def test_a_released_checkpoint_is_found_out():
    slots = CountedSlots(ByteBudget(15), checkpoint_bytes=10)
    slot = slots.allocate()
    assert slots.holders(slot) == 1
    slots.release(slot)
    with pytest.raises(KeyError, match=str(slot)):
        slots.holders(slot)


# --- wrong counts ---------------------------------------------------------------------------------


@pytest.fixture
def cache():
    """27 tokens and three checkpoints."""
    cache = SimulatedCache(COSTS, 1000, LeastRecentlyUsed())
    for last in (5, 6):
        cache.request(*[np.array([1] * 9 + [last] * 9, np.int32)] * 2)
    cache.check_invariants()
    assert (cache.budget.used, len(cache.tree.arena.slot_nodes)) == (27 + 30, 3)
    return cache


def test_a_simulated_tree_shows_itself(cache):
    assert repr(cache.tree) == "RadixTree(3 nodes, 3 checkpoints, 27 page frames)"


def test_bytes_that_nobody_holds_are_noticed(cache):
    cache.budget.take(7)
    with pytest.raises(AssertionError, match=r"^simulated cache: counts 64 bytes, found 57"):
        cache.check_invariants()


def test_a_lost_page_is_noticed(cache):
    node = next(iter(cache.tree.root.children.values()))
    node.held[ARENA].pages = node.held[ARENA].pages[:-1]
    with pytest.raises(AssertionError, match=r"^counted pages: counts 27 tokens, found 26"):
        cache.check_invariants()


def test_a_checkpoint_that_no_node_lists_is_noticed(cache):
    cache._slots.allocate()
    with pytest.raises(AssertionError, match=r"^simulated cache: counts 4 checkpoints, found 3"):
        cache.check_invariants()


def test_a_budget_that_was_exceeded_is_noticed(cache):
    cache.budget.peak = 1001
    with pytest.raises(
        AssertionError, match=r"^simulated cache: 57 bytes used, 1001 at most, of 1000"
    ):
        cache.check_invariants()

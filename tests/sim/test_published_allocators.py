"""The published allocators' rules, by examples small enough to work out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pools.model_sizes import PUBLISHED
from benchmarks.pools.published import (
    KV,
    STATE,
    Avmp,
    FixedDual,
    PaddedUnified,
    UnitPool,
)
from tests.sim.tiny import POOL as TINY

A, B, C, D = range(4)


# --- one pool -------------------------------------------------------------------------------------


def test_units_go_out_from_the_lowest_and_the_last_that_came_back_first():
    pool = UnitPool(6, 10)
    pool.take(A, 2)
    pool.take(B, 1)
    pool.give_back(A)
    pool.take(C, 3)
    assert pool.held == {B: [2], C: [1, 0, 3]}
    assert pool.used_bytes == 40


def test_a_request_keeps_the_order_of_its_units_over_several_calls():
    pool = UnitPool(6, 10)
    for request in (A, B, A):
        pool.take(request, 1)
    pool.give_back(A)
    assert pool.free == [5, 4, 3, 0, 2]


def test_who_was_given_units_longest_ago_is_evicted():
    pool = UnitPool(6, 10)
    for request in (A, B, A):
        pool.take(request, 1)
    assert pool.evict_oldest() == (B, 1)
    assert pool.evict_oldest() == (A, 2)
    assert pool.evict_oldest() is None


def test_only_a_free_tail_is_given_up():
    pool = UnitPool(5, 10)
    pool.take(A, 2)
    pool.take(B, 1)
    pool.give_back(A)  # 2 is in use; free are 4, 3, 0, 1
    assert not pool.shrink(3) and not pool.shrink(5) and not pool.shrink(6)
    assert (pool.num_units, pool.free) == (5, [4, 3, 0, 1])
    assert pool.shrink(2)
    assert (pool.num_units, pool.free) == (3, [0, 1])
    assert not pool.shrink(1)


def test_of_new_units_the_highest_goes_out_first():
    pool = UnitPool(2, 10)
    pool.grow(3)
    pool.take(A, 4)
    assert pool.held == {A: [4, 3, 2, 0]}


def test_a_unit_that_is_free_and_held_is_found():
    pool = UnitPool(3, 10)
    pool.take(A, 2)
    pool.check_invariants()
    pool.free.append(0)
    with pytest.raises(AssertionError, match=r"counts \[0, 1, 2\] units, found \[0, 0, 1, 2\]"):
        pool.check_invariants()


# --- fixed_dual -----------------------------------------------------------------------------------


def test_a_share_of_the_bytes_is_rounded_down_to_states_and_the_rest_to_pages():
    memory = FixedDual(TINY, 179, 0.5)  # 89 bytes for states, 90 for pages
    assert [pool.num_units for pool in memory.pools] == [9, 2]
    assert FixedDual(TINY, 300, 0.9).pools[STATE].num_units == 9


def test_a_request_that_fits_evicts_nobody():
    memory = FixedDual(TINY, 200, 0.5)
    assert memory.allocate(A, KV, 5, 2) == 0
    assert memory.allocate(A, STATE, 1, 3) == 0
    assert memory.counters.evictions == 0
    memory.release(A)
    assert memory.used_bytes == 0 and memory.counters.peak_bytes == 190


def test_shortage_evicts_the_oldest_from_that_pool_alone():
    memory = FixedDual(TINY, 200, 0.5)  # 10 pages, 3 states
    for request in (A, B):
        memory.allocate(request, STATE, 1)
        memory.allocate(request, KV, 4)
    assert memory.allocate(C, KV, 5) == 0
    assert list(memory.pools[KV].held) == [B, C] and list(memory.pools[STATE].held) == [A, B]
    assert (memory.counters.evictions, memory.counters.pages_evicted) == (1, 4)
    assert memory.counters.victims == {A}


def test_one_eviction_and_then_the_call_fails_though_the_victim_lost_all():
    memory = FixedDual(TINY, 200, 0.5)
    for request in (A, B, C):
        memory.allocate(request, KV, 3)
    assert memory.allocate(D, KV, 5) == 1  # 1 free and 3 of A
    assert list(memory.pools[KV].held) == [B, C]
    assert memory.counters.victims == {A}


def test_calls_fail_one_by_one():
    memory = FixedDual(TINY, 200, 0.5)
    memory.allocate(A, KV, 4)
    assert memory.allocate(B, KV, 6, 3) == 1  # 6 are free; A's 4 are too few; B's own 6 are enough
    assert memory.counters.victims == {A, B}
    assert memory.counters.evictions == 2 and memory.counters.self_evictions == 1
    assert memory.allocate(C, KV, 11, 3) == 3
    assert memory.counters.evictions == 3  # C holds nothing, so only B goes once more


def test_a_request_that_asks_may_evict_itself():
    memory = FixedDual(TINY, 200, 0.5)
    memory.allocate(A, KV, 8)
    assert memory.allocate(A, KV, 3) == 0
    assert memory.counters.self_evictions == 1 and memory.counters.pages_evicted == 8
    assert len(memory.pools[KV].held[A]) == 3


def test_a_success_makes_a_request_young_and_a_failure_does_not():
    memory = FixedDual(TINY, 200, 0.5)
    for request in (A, B, C):
        memory.allocate(request, KV, 3)
    memory.allocate(A, KV, 1)
    assert memory.allocate(B, KV, 9) == 1  # evicts B itself
    assert list(memory.pools[KV].held) == [C, A]


# --- padded_unified -------------------------------------------------------------------------------


def test_every_page_takes_the_larger_size():
    memory = PaddedUnified(TINY, 200)
    memory.allocate(A, KV, 2)
    memory.allocate(A, STATE, 1)
    assert memory.pools[KV].num_units == 6 and memory.used_bytes == 90


def test_an_evicted_request_gives_back_pages_of_others_when_it_departs():
    memory = PaddedUnified(TINY, 180)
    memory.allocate(A, KV, 4)  # 0 1 2 3
    memory.allocate(B, KV, 3)  # evicts A, takes 3 2 1
    assert memory.pools[KV].owners == {3: B, 2: B, 1: B}
    memory.release(A)
    assert memory.pools[KV].owners == {} and memory.pools[KV].held == {}
    assert memory.pools[KV].free == [5, 4, 0, 1, 2, 3]
    memory.check_invariants()
    memory.release(B)
    assert memory.pools[KV].free == [5, 4, 0, 1, 2, 3]


def test_who_loses_some_pages_to_a_departure_keeps_its_place():
    memory = PaddedUnified(TINY, 180)
    memory.allocate(A, KV, 3)  # 0 1 2
    memory.allocate(B, KV, 2)  # 3 4
    memory.allocate(C, KV, 2)  # evicts A; free were 5, then 0 1 2: takes 2 1
    memory.release(A)
    assert list(memory.pools[KV].held) == [B] and list(memory.pools[KV].free) == [5, 0, 1, 2]
    memory.allocate(D, KV, 5)
    assert memory.counters.victims == {A, B}


def test_a_page_in_use_that_nobody_holds_is_found():
    memory = PaddedUnified(TINY, 180)
    memory.allocate(A, KV, 2)
    del memory.pools[KV].held[A][0]
    with pytest.raises(AssertionError, match=r"units, found \[1, 2, 3, 4, 5\]"):
        memory.check_invariants()


# --- avmp -----------------------------------------------------------------------------------------


def test_a_shortage_turns_the_free_units_around():
    memory = Avmp(TINY, 120, 0.5)  # 6 pages
    memory.allocate(A, KV, 2)
    assert memory.pools[KV].free == [5, 4, 3, 2]
    assert memory.allocate(B, KV, 5) == 0  # fails on 4, turns them, evicts A
    assert memory.pools[KV].held == {B: [1, 0, 5, 4, 3]}


def test_without_a_batch_capacity_stays_where_it_is():
    memory = Avmp(TINY, 120, 0.5)  # 6 pages, 2 states
    assert memory.allocate(A, KV, 7) == 1
    assert memory.pools[KV].free == [5, 4, 3, 2, 1, 0]  # turned before and after the eviction
    assert memory.counters.rebalances == memory.counters.rebalances_refused == 0


def test_states_that_are_free_at_the_tail_become_pages():
    memory = Avmp(TINY, 120, 0.5, batch=1)
    memory.allocate(A, STATE, 1)  # 0
    assert memory.allocate(A, KV, 9) == 0
    assert [pool.num_units for pool in memory.pools] == [9, 1]
    assert memory.counters.rebalances == 1 and memory.counters.migrated_bytes == 30
    assert memory.counters.wasted_bytes == memory.counters.evictions == 0
    assert memory.used_bytes == 120 and memory.reserved_bytes == 240


def test_a_batch_that_is_too_small_for_the_need_moves_and_the_call_fails():
    memory = Avmp(TINY, 120, 0.5, batch=1)
    assert memory.allocate(A, KV, 10) == 1
    assert [pool.num_units for pool in memory.pools] == [9, 1]


def test_a_tail_in_use_refuses_the_move():
    memory = Avmp(TINY, 120, 0.5, batch=1)
    memory.allocate(A, STATE, 1, 2)
    assert memory.allocate(A, KV, 7) == 1
    assert memory.counters.rebalances_refused == 1 and memory.counters.rebalances == 0
    assert [pool.num_units for pool in memory.pools] == [6, 2]


def test_pages_that_make_no_state_are_lost_for_ever():
    memory = Avmp(TINY, 120, 0.5, batch=2)
    assert memory.allocate(A, STATE, 3) == 1
    assert [pool.num_units for pool in memory.pools] == [4, 2]
    assert memory.counters.rebalances == 1
    assert (memory.counters.migrated_bytes, memory.counters.wasted_bytes) == (0, 20)
    memory.batch = 4
    assert memory.allocate(A, STATE, 3) == 0
    assert [pool.num_units for pool in memory.pools] == [0, 3]
    assert (memory.counters.migrated_bytes, memory.counters.wasted_bytes) == (30, 30)


@pytest.mark.parametrize(
    ("model", "batch", "lost", "gained"),
    [
        ("jamba_1_5_mini", 1, 65_536, 0),
        ("jamba_1_5_mini", 3, 196_608, 0),
        ("jamba_1_5_mini", 4, 0, 1),
        ("mamba2_1b3", 16, 1 << 20, 0),
        ("mamba2_1b3", 31, 31 * 65_536, 0),
        ("mamba2_1b3", 32, 0, 1),
    ],
)
def test_small_batches_of_pages_leak(model, batch, lost, gained):
    memory = Avmp(PUBLISHED[model], 1 << 30, 0.5, batch=batch)
    states = memory.pools[STATE].num_units
    assert memory.rebalance(STATE)
    assert memory.pools[STATE].num_units == states + gained
    assert memory.counters.wasted_bytes == lost


# --- all of them ----------------------------------------------------------------------------------

MAKERS = {
    "padded": lambda: PaddedUnified(TINY, 900),
    "fixed": lambda: FixedDual(TINY, 600, 0.5),
    "static": lambda: Avmp(TINY, 600, 0.5),
    "dynamic": lambda: Avmp(TINY, 600, 0.5, batch=3),
}
CALLS = st.tuples(
    st.integers(0, 5), st.sampled_from((KV, STATE)), st.integers(1, 6), st.integers(0, 4)
)


@pytest.mark.parametrize(
    ("kind", "page"), [(kind, 30 if kind == "padded" else 10) for kind in MAKERS]
)
def test_the_peak_is_the_most_that_was_ever_in_use(kind, page):
    memory = MAKERS[kind]()
    memory.allocate(A, KV, 20)
    assert memory.allocate(B, KV, 99) == 1  # evicts A, and gets nothing
    memory.allocate(B, KV, 5)
    memory.release(B)
    assert memory.counters.peak_bytes == 20 * page
    memory.allocate(C, KV, 25)
    memory.release(C)
    memory.allocate(D, KV, 1)
    memory.release(D)
    assert memory.counters.peak_bytes == 25 * page


@pytest.mark.parametrize("kind", MAKERS)
@given(steps=st.lists(CALLS, max_size=60))
@settings(max_examples=60, deadline=None)
def test_calls_at_once_are_calls_one_by_one(kind, steps):
    together, single = MAKERS[kind](), MAKERS[kind]()
    for request, memory_kind, units, calls in steps:
        if calls == 0:
            together.release(request)
            single.release(request)
        else:
            failed = sum(single.allocate(request, memory_kind, units) for _ in range(calls))
            assert together.allocate(request, memory_kind, units, calls) == failed
        together.check_invariants()
        assert everything(together) == everything(single)


def everything(memory) -> dict:
    found = {name: value for name, value in vars(memory).items() if name != "pools"}
    return found | {"pools": [vars(pool) for pool in getattr(memory, "pools", ())]}

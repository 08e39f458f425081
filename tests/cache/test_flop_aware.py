"""FLOP-aware eviction: S(n) worked out by hand, beside a search over all candidates, and in a tree that changes."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_jax.cache.policy.flop_aware import STEPS_PER_OCTAVE, FlopAware, replay_length
from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.costs import Costs
from tests.cache.pools import evict

COSTS = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=10)


class Entry(SimpleNamespace):
    """A candidate with a use and an efficiency of its own."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def policy(alpha: float) -> FlopAware:
    return FlopAware(alpha, COSTS, efficiency=lambda node, costs, tier: node.value)


def simulated(alpha: float, capacity: int = 10_000) -> SimulatedCache:
    return SimulatedCache(COSTS, capacity, FlopAware(alpha, COSTS))


def ask(cache: SimulatedCache, text: str) -> int:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return cache.request(tokens, tokens)


def stands(cache: SimulatedCache, text: str) -> bool:
    """The prefix can be resumed from; looking changes nothing."""
    tokens = np.frombuffer((text + "~").encode(), np.uint8).astype(np.int32)
    return cache.tree.match(tokens).hit_len == len(text)


# --- by hand --------------------------------------------------------------------------------------

# Three ends, in order of their use: 40, 10 and 20 tokens, used at 1, 3 and 4; now is 5. FLOPs are tokens.
#               recency   scaled    FLOPs / (10 + bytes)   scaled    S, alpha 0    S, alpha 1
#   first       1/4       0         40 / 50 = 0.8          1         0             1
#   second      1/2       1/3       10 / 20 = 0.5          0         1/3           1/3
#   third       1         1         20 / 30 = 0.667        0.556     1             1.556
USES, VALUES = (1, 3, 4), (0.8, 0.5, 20 / 30)


@pytest.mark.parametrize(("alpha", "victim"), [(0, 0), (0.3, 0), (0.4, 1), (1, 1), (10, 1)])
def test_alpha_chooses_between_the_oldest_and_the_least_efficient(alpha, victim):
    # S(first) = alpha and S(second) = 1/3: they change places there.
    order = policy(alpha)
    entries = [Entry(last_use=use, value=value) for use, value in zip(USES, VALUES, strict=True)]
    for entry in entries:
        order.add(entry)
    assert order.pop() is entries[victim]


def test_in_a_tree_the_same_three_go_in_the_same_order():
    # The uses are the tree's own there, but their order and the efficiencies are those above.
    for alpha, victim in ((0, "a" * 40), (10, "b" * 10)):
        cache = simulated(alpha)
        for text in ("a" * 40, "b" * 10, "c" * 20):
            ask(cache, text)
        evict(cache.tree, 1)
        assert [t for t in ("a" * 40, "b" * 10, "c" * 20) if not stands(cache, t)] == [victim]


def test_of_equally_efficient_nodes_the_one_used_longest_ago_goes_first():
    order = policy(1)
    entries = [Entry(last_use=use, value=0.5) for use in (3, 1, 2)]
    for entry in entries:
        order.add(entry)
    assert [order.pop().last_use for _ in entries] == [1, 2, 3]


@pytest.mark.parametrize("newest_first", [True, False])
def test_of_nodes_with_equal_scores_the_one_used_longest_ago_goes_first(newest_first):
    # The most efficient one is the oldest: with alpha 1 both have S = 1.
    entries = [Entry(last_use=1, value=2.0), Entry(last_use=2, value=1.0)]
    order = policy(1)
    for entry in entries[:: -1 if newest_first else 1]:
        order.add(entry)
    assert order.pop() is entries[0]


def test_an_efficiency_within_a_step_counts_as_equal():
    order = policy(100)
    step = 2 ** (1 / STEPS_PER_OCTAVE)
    older, newer = Entry(last_use=1, value=step**0.4), Entry(last_use=2, value=1.0)
    order.add(older)
    order.add(newer)
    assert order.pop() is older
    older.value = step**0.6
    order.add(older)
    assert order.pop() is newer


def test_a_node_that_spares_nothing_is_a_candidate_too():
    order = policy(2)
    entries = [Entry(last_use=1, value=3.0), Entry(last_use=2, value=0.0)]
    for entry in entries:
        order.add(entry)
    assert order.pop() is entries[1] and order.pop() is entries[0] and order.pop() is None


@pytest.mark.parametrize("alpha", [-1, -0.001, math.nan, math.inf])
def test_an_alpha_below_0_or_without_end_is_an_error(alpha):
    with pytest.raises(
        ValueError, match=rf"^FlopAware: alpha must be a number of at least 0, got {alpha}$"
    ):
        FlopAware(alpha, COSTS)


def test_with_alpha_makes_an_empty_one_with_the_same_efficiency():
    order = policy(1)
    order.add(Entry(last_use=1, value=1.0))
    other = order.with_alpha(0.5)
    assert (other.alpha, len(other), order.alpha, len(order)) == (0.5, 0, 1, 1)
    other.add(Entry(last_use=1, value=2.0))
    assert len(other) == 1


# --- beside a search over all candidates ----------------------------------------------------------


def rounded(value: float) -> float:
    return 2.0 ** (round(STEPS_PER_OCTAVE * math.log2(value)) / STEPS_PER_OCTAVE)


def scaled(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 1.0 for value in values]


def least(entries: list[Entry], alpha: float, now: int) -> Entry:
    """The candidate with the least S(n); of equals the one used longest ago."""
    recency = scaled([1 / (now - entry.last_use) for entry in entries])
    efficiency = scaled([rounded(entry.value) for entry in entries])
    scores = [r + alpha * e for r, e in zip(recency, efficiency, strict=True)]
    return min(zip(scores, [e.last_use for e in entries], entries, strict=True))[2]


@pytest.mark.parametrize("alpha", [0, 0.1, 0.7, 1, 2, 50])
@pytest.mark.parametrize("kinds", [1, 4, 10_000])
def test_pop_takes_the_least_of_all_candidates(alpha, kinds):
    rng = random.Random(kinds)
    values = [rng.lognormvariate(0, 2) for _ in range(kinds)]
    order, live, clock, popped = policy(alpha), [], 0, 0
    for _ in range(3000):
        clock += rng.choice((1, 1, 1, 20))
        action = rng.random()
        if action < 0.45:
            live.append(Entry(last_use=clock, value=rng.choice(values)))
            order.add(live[-1])
        elif action < 0.6 and live:  # used
            entry = rng.choice(live)
            entry.last_use = newest = clock
            order.add(entry)
        elif action < 0.7 and live:  # worth more or less than before
            entry = rng.choice(live)
            entry.value = rng.choice(values)
            order.add(entry)
        elif action < 0.8 and live:
            order.discard(live.pop(rng.randrange(len(live))))
        elif live:
            expected = least(live, alpha, newest + 1)
            assert order.pop() is expected
            live.remove(expected)
            popped += 1
        if action < 0.45:
            newest = clock
        assert len(order) == len(live) and all(entry in order for entry in live[-3:])
    assert popped > 300


# --- in a tree whose checkpoints come and go ------------------------------------------------------

LINE, TAIL, OTHER = "p" * 50, "p" * 50 + "q" * 10, "s" * 30


def test_when_the_checkpoint_above_goes_what_is_below_is_worth_more():
    # The tail spares 10 FLOPs for 20 bytes beyond the line, the other end 30 for 40. Without the line's
    # checkpoint the tail spares all 60.
    for rebased, victim in ((False, TAIL), (True, OTHER)):
        cache = simulated(100)
        for text in (LINE, TAIL, OTHER):
            ask(cache, text)
        if rebased:
            node = next(
                n for n in cache.tree.root.walk() if n.end == 50 and n.has_checkpoint(ARENA)
            )
            cache.tree.disown(node.slots[ARENA])
        evict(cache.tree, 1)
        assert [text for text in (TAIL, OTHER) if not stands(cache, text)] == [victim]


def test_when_a_checkpoint_comes_between_what_is_below_is_worth_less():
    # The tail alone spares 60 FLOPs for 70 bytes, the other end 30 for 40. Once somebody parts from it at 50, it
    # spares 10 for 20.
    for parted, victim in ((False, OTHER), (True, TAIL)):
        cache = simulated(100)
        for text in (TAIL, OTHER):
            ask(cache, text)
        if parted:
            ask(cache, LINE + "x" * 60)
        evict(cache.tree, 1)
        assert [text for text in (TAIL, OTHER) if not stands(cache, text)] == [victim]


def test_a_chain_of_checkpoints_is_rebased_link_by_link():
    # Links of 10 tokens: each checkpoint inside spares 10 FLOPs for 10 bytes, the end 10 for 20. What goes first
    # is the end; then the new end, for the same reason.
    cache = simulated(100)
    chain = ["c" * 10 * count for count in range(1, 6)]
    for text in chain:
        ask(cache, text)
    for count in (4, 3, 2):
        evict(cache.tree, 1)
        assert [stands(cache, text) for text in chain] == [True] * count + [False] * (5 - count)


# --- other efficiencies -----------------------------------------------------------------------------


def test_the_replay_length_counts_from_the_nearest_checkpoint_above():
    cache = simulated(0)
    for text in ("a" * 20, "a" * 50, "a" * 50 + "b" * 7, "a" * 50 + "c" * 9):
        ask(cache, text)
    lengths = {}
    for node in cache.tree.root.walk():
        if node.has_checkpoint(ARENA):
            above = [part.end for part in node.path()[:-1] if part.has_checkpoint(ARENA)]
            lengths[node.end] = node.end - max(above, default=0)
            assert replay_length(node, COSTS) == lengths[node.end]
    assert lengths == {20: 20, 50: 30, 57: 7, 59: 9}


@pytest.mark.parametrize(("weight", "victim"), [(0.05, 0), (0.85, 1)])
def test_by_replay_length_a_short_entry_goes_before_an_older_long_one(weight, victim):
    order = FlopAware(weight / (1 - weight), COSTS, efficiency=replay_length)
    cache = SimulatedCache(COSTS, 10_000, order)
    for text in ("a" * 40, "b" * 10, "c" * 20):
        ask(cache, text)
    # Lengths, scaled: 1, 0 and 1/3. Recency is 0 for the first and little for the second.
    gone = order.pop()
    assert gone.end == (40, 10)[victim]

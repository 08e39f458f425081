"""Where checkpoints spare most, beside all ways to place them, and how far prompts go along with sequences."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from hybrid_jax.cache.tree.node import common_prefix_len
from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.caches import make_cache
from hybrid_jax.sim.prefix_cache.placement import best_positions, later_overlaps
from tests.sim.tiny import COSTS, hits, request

PLENTY = 10_000


def again(overlaps: dict[int, float], positions: tuple[int, ...], start: int) -> float:
    """Tokens that are computed again, prompt by prompt."""
    resumed = lambda overlap: max(p for p in (start, *positions) if p <= overlap)
    return sum(weight * (o - resumed(o)) for o, weight in overlaps.items() if o >= start)


@pytest.mark.parametrize("seed", range(60))
def test_no_other_positions_spare_more(seed):
    rng = random.Random(seed)
    start, grain, count = rng.choice([0, 0, 5, 8]), rng.choice([1, 1, 4]), rng.randrange(5)
    start -= start % grain
    depths = rng.sample(range(1, 25), rng.randrange(1, 8))
    overlaps = {depth: rng.choice([1, 1, 2, 7]) for depth in depths}
    found = best_positions(overlaps, count, start=start, grain=grain)
    assert found == sorted(set(found)) and len(found) <= count
    assert all(position % grain == 0 and position > start for position in found)
    everywhere = [p for p in range(start + 1, 25) if p % grain == 0]
    least = min(
        again(overlaps, chosen, start)
        for size in range(min(count, len(everywhere)) + 1)
        for chosen in combinations(everywhere, size)
    )
    assert again(overlaps, tuple(found), start) == least
    # None of them is idle.
    for position in found:
        others = tuple(p for p in found if p != position)
        assert again(overlaps, others, start) > least


def test_nobody_needs_a_checkpoint_where_nothing_is_shared():
    assert (
        best_positions({}, 3)
        == best_positions({7: 2}, 0)
        == best_positions({7: 2}, 3, start=7)
        == []
    )


@pytest.mark.parametrize("seed", range(10))
def test_overlaps_are_those_with_the_sequence_that_shares_most(seed):
    rng = random.Random(seed)
    draw = lambda most: "".join(rng.choice("ab") for _ in range(rng.randrange(most)))
    trace = []
    for _ in range(60):
        old = rng.choice(trace).whole[: rng.randrange(30)] if trace and rng.random() < 0.8 else []
        text = "".join(map(chr, old)) + draw(8)
        trace.append(request(text or "c", draw(5)))
    found: list[Counter[int]] = [Counter() for _ in trace]
    for number, later in enumerate(trace):
        shared = [common_prefix_len(later.prompt, one.whole) for one in trace[:number]]
        if shared and (most := max(shared)):
            latest = max(place for place, length in enumerate(shared) if length == most)
            if overlap := min(most, len(later.prompt) - 1):
                found[latest][overlap] += 1
    assert later_overlaps(trace) == found
    assert sum(map(len, found)) > 20


def test_a_shared_prefix_is_hit_from_its_second_prompt_on_where_it_was_known():
    seen = [("s" * 40 + "A",), ("s" * 40 + "B",), ("s" * 40 + "C",)]
    assert hits("placed", PLENTY, *seen) == [0, 40, 40]
    assert hits("optimal", PLENTY, *seen) == [0, 0, 40]


def test_what_nobody_comes_back_to_is_not_kept():
    trace = [request("abcd", "ef"), request("xyz", "")]
    cache = make_cache("placed", COSTS, PLENTY, trace)
    assert [cache.request(one.prompt, one.whole) for one in trace] == [0, 0]
    assert cache.budget.used == 0


def test_a_sequence_leaves_two_checkpoints_at_most():
    # Later prompts part at 40, 50 and 120; the two that spare most are left by the first.
    line = "s" * 120
    trace = [
        request(text, "") for text in (line + "a", line[:40] + "b", line[:50] + "c", line + "d")
    ]
    cache = make_cache("placed", COSTS, PLENTY, trace)
    cache.request(trace[0].prompt, trace[0].whole)
    stand = sorted(node.end for node in cache.tree.root.walk() if node.slots)
    assert stand == [40, 120]  # 40 + 40 + 120 spared; with 50 and 120 it would be 0 + 50 + 120


def test_without_states_a_prompt_resumes_anywhere():
    attention = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=0)
    seen = [("systemA", "yes"), ("systemB",), ("systemAyesno",)]
    assert hits("placed", PLENTY, *seen, costs=attention) == [0, 6, 10]


@pytest.mark.parametrize("seed", range(5))
def test_invariants_hold_whatever_is_placed(seed):
    rng = random.Random(seed)
    trace, known = [], ["".join(rng.choice("ab") for _ in range(60)) for _ in range(4)]
    for _ in range(80):
        text = rng.choice(known)[: rng.randrange(1, 60)] + rng.choice("xyz") * rng.randrange(1, 9)
        trace.append(request(text, "o" * rng.randrange(4)))
    cache = make_cache("placed", COSTS, 250, trace)
    for one in trace:
        cache.request(one.prompt, one.whole)
        cache.check_invariants()
    assert cache.evictions > 10 and np.isfinite(cache.peak)

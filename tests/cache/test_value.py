"""What an entry spares and what it takes: FLOPs are tokens here, a token takes 1 byte, a checkpoint 10."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax.cache.policy.flop_aware import own_edge_efficiency, whole_prefix_efficiency
from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.policy.value import freed_bytes, resume_point_above, saved_flops
from hybrid_jax.cache.tree.eviction import LeastRecentlyUsed
from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.costs import Costs
from tests.cache.pools import evict

COSTS = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=10)


def cached(*sequences: list[int], costs: Costs = COSTS) -> SimulatedCache:
    cache = SimulatedCache(costs, 10_000, LeastRecentlyUsed())
    for sequence in sequences:
        cache.request(*[np.array(sequence, np.int32)] * 2)
    return cache


def node_at(cache: SimulatedCache, *tokens: int):
    match = cache.tree.match(np.array(tokens, np.int32), least=0)
    assert match.hit_len == len(tokens)
    return match.node


# 20 tokens; 5 more after them; both of the others part from them after 12.
LINE, LONGER = [1] * 20, [1] * 25
BRANCH_A, BRANCH_B = [1] * 12 + [2] * 4, [1] * 12 + [3] * 8


def test_a_first_checkpoint_spares_everything_before_it():
    node = node_at(cached(LINE), *LINE)
    assert (resume_point_above(node), saved_flops(node, COSTS)) == (0, 20)


def test_a_checkpoint_below_another_spares_what_lies_between():
    node = node_at(cached(LINE, LONGER), *LONGER)
    assert (resume_point_above(node), saved_flops(node, COSTS)) == (20, 5)


def test_spared_flops_are_those_of_attention_at_that_depth():
    costs = replace(COSTS, flops_per_key=2)
    node = node_at(cached(LINE, LONGER), *LONGER)
    assert saved_flops(node, costs) == 5 + 2 * (21 + 22 + 23 + 24 + 25)


def test_the_checkpoint_where_paths_part_counts_for_all_below_it():
    cache = cached(LINE, BRANCH_A, BRANCH_B)
    found = {len(t): saved_flops(node_at(cache, *t), COSTS) for t in (LINE, BRANCH_A, [1] * 12)}
    assert found == {20: 8, 16: 4, 12: 12}


def test_where_the_checkpoint_above_is_gone_the_one_above_that_counts():
    cache = cached(LINE, LONGER, [1] * 30)
    cache.tree.disown(node_at(cache, *LONGER).slots[ARENA])
    node = node_at(cache, *[1] * 30)
    assert (resume_point_above(node), saved_flops(node, COSTS)) == (20, 10)


def test_where_paths_part_without_a_checkpoint_the_one_above_counts():
    cache = cached(LINE, BRANCH_A, BRANCH_B)
    cache.tree.disown(node_at(cache, *[1] * 12).slots[ARENA])
    node = node_at(cache, *BRANCH_B)
    assert (node.start, resume_point_above(node), saved_flops(node, COSTS)) == (12, 0, 20)


def test_without_recurrent_layers_a_node_spares_its_own_tokens():
    attention = replace(COSTS, checkpoint_bytes=0)
    cache = cached(LINE, BRANCH_A, costs=attention)
    node = node_at(cache, *BRANCH_A)
    assert (resume_point_above(node), saved_flops(node, attention)) == (12, 4)


@pytest.mark.parametrize(
    ("tokens", "num_bytes"),
    [
        (LINE, 8 + 10),  # an end: its pages and its checkpoint
        (BRANCH_A, 4 + 10),
        ([1] * 12, 10),  # inside: the checkpoint alone
    ],
)
def test_an_end_frees_its_pages_too_and_a_branch_its_checkpoint_alone(tokens, num_bytes):
    cache = cached(LINE, BRANCH_A)
    assert freed_bytes(node_at(cache, *tokens), COSTS) == num_bytes


def test_without_recurrent_layers_an_end_frees_its_pages_and_an_inside_nothing():
    attention = replace(COSTS, checkpoint_bytes=0)
    cache = cached(LINE, BRANCH_A, costs=attention)
    assert freed_bytes(node_at(cache, *BRANCH_A), attention) == 4
    assert freed_bytes(node_at(cache, *[1] * 12), attention) == 0


def test_freed_bytes_are_what_evictions_give_back_one_after_the_other():
    priced = []

    class Noted(LeastRecentlyUsed):
        def pop(self):
            node = super().pop()
            priced.append(freed_bytes(node, COSTS))
            return node

    cache = SimulatedCache(COSTS, 10_000, Noted())
    for sequence in (LINE, LONGER, BRANCH_A, BRANCH_B, [4] * 7, LONGER + [5]):
        cache.request(*[np.array(sequence, np.int32)] * 2)
    given = []
    while cache.budget.used:
        given.append(evict(cache.tree, 1))
    assert given == priced and len(set(given)) > 3


def test_the_papers_efficiency_is_per_byte_that_goes_with_the_node():
    cache = cached(LINE, BRANCH_A)
    assert own_edge_efficiency(node_at(cache, *LINE), COSTS) == 8 / (8 + 10)
    assert own_edge_efficiency(node_at(cache, *[1] * 12), COSTS) == 12 / 10


def test_the_published_codes_efficiency_is_per_byte_of_the_whole_prefix():
    cache = cached(LINE, BRANCH_A)
    assert whole_prefix_efficiency(node_at(cache, *LINE), COSTS) == 8 / (20 + 10)
    assert whole_prefix_efficiency(node_at(cache, *[1] * 12), COSTS) == 12 / (12 + 10)

"""What waiting prompts will use goes last, and of that what is used last goes first."""

import numpy as np
import pytest

from hybrid_jax.cache.policy.table import make_policy
from hybrid_jax.costs import Costs
from tests.cache.pools import Pools, evict, seq

COSTS = Costs(flops_per_token=1.0, flops_per_key=0.0, kv_bytes=1.0, checkpoint_bytes=64)


def expect(pools, tokens, turn=0):
    """Announces a prompt that waits; the node at its end."""
    end_node = pools.tree.announce(np.array(tokens))
    pools.tree.expected.add(end_node, turn)
    pools.check()
    return end_node


def arrive(pools, end_node):
    pools.tree.expected.remove(end_node)
    pools.tree.conclude(end_node)
    pools.check()


def hits(pools, *prefixes):
    return [pools.match([*prefix, -1]).hit_len for prefix in prefixes]


FIRST, SECOND, THIRD = seq((0, 32)), seq((100, 32)), seq((200, 32))


@pytest.mark.parametrize("policy", ["lru", "sglang", "alpha:1", "marconi-code", "adaptive"])
def test_what_a_waiting_prompt_will_use_goes_last(policy):
    pools = Pools(policy=make_policy(policy, COSTS))
    for prefix in (FIRST, SECOND, THIRD):
        pools.insert(prefix)
    end_node = expect(pools, [*FIRST, 5])
    evict(pools.tree, 1)
    evict(pools.tree, 1)
    assert hits(pools, FIRST, SECOND, THIRD) == [32, 0, 0]
    arrive(pools, end_node)
    pools.insert(SECOND)
    pools.tree.use(pools.match([*SECOND, -1]))
    evict(pools.tree, 1)
    assert hits(pools, FIRST, SECOND) == [0, 32]  # nobody waits for it any more


def test_of_several_the_last_to_be_used_goes_first():
    pools = Pools()
    for prefix in (FIRST, SECOND, THIRD):
        pools.insert(prefix)
    for prefix, turn in ((SECOND, 7), (FIRST, 3), (THIRD, 5)):
        expect(pools, [*prefix, 5], turn)
    expect(pools, [*THIRD, 6], turn=1)  # its last prompt counts
    order = []
    while evict(pools.tree, 1):
        order.append(hits(pools, FIRST, SECOND, THIRD))
    assert order == [[32, 0, 32], [32, 0, 0], [0, 0, 0]]


def test_a_prompt_that_comes_later_moves_what_it_will_use():
    pools = Pools()
    pools.insert(FIRST)
    pools.insert(SECOND)
    expect(pools, [*FIRST, 5], turn=1)
    expect(pools, [*SECOND, 5], turn=2)
    expect(pools, [*FIRST, 6], turn=3)
    evict(pools.tree, 1)
    assert hits(pools, FIRST, SECOND) == [0, 32]


def test_nodes_above_the_end_of_a_prompt_are_kept_too_and_those_below_are_not():
    pools = Pools()
    pools.insert(seq((0, 16)))
    pools.insert(seq((0, 48)))
    expect(pools, seq((0, 20)))  # splits an edge: the half above is expected
    evict(pools.tree, 1)
    assert hits(pools, seq((0, 16)), seq((0, 48))) == [16, 16]
    pools.check()


def test_a_path_that_is_split_later_is_expected_on_both_sides():
    pools = Pools()
    pools.insert(FIRST)
    pools.insert(SECOND)
    expect(pools, [*FIRST, 5], turn=4)
    expect(pools, [*SECOND, 5], turn=3)
    pools.insert(FIRST[:16])
    # All that wait for the upper half go on through the lower one, so the upper checkpoint goes first.
    evict(pools.tree, 1)
    assert hits(pools, FIRST[:16], FIRST, SECOND) == [0, 32, 32]
    evict(pools.tree, 1)
    assert hits(pools, FIRST, SECOND) == [0, 32]


def test_of_two_on_one_path_the_one_that_fewer_wait_for_goes_first():
    pools = Pools()
    pools.insert(FIRST[:16])
    pools.insert(FIRST)
    expect(pools, [*FIRST[:16], 5], turn=1)
    below = expect(pools, [*FIRST, 5], turn=2)
    evict(pools.tree, 1)
    assert hits(pools, FIRST[:16], FIRST) == [16, 16]
    pools.insert(FIRST)
    arrive(pools, expect(pools, [*FIRST[:16], 6], turn=2))
    upper = pools.match([*FIRST[:16], 9]).node
    pools.tree.pin(upper)
    pools.tree.unpin(upper)
    evict(pools.tree, 1)
    assert hits(pools, FIRST[:16], FIRST) == [16, 16]
    arrive(pools, below)


def test_everything_can_go_when_it_must():
    pools = Pools()
    pools.insert(FIRST)
    end_node = expect(pools, [*FIRST, 5])
    assert pools.tree.make_room(pools.frames.num_frames - 1)
    pools.check()
    assert len(pools.tree.expected) == 1
    arrive(pools, end_node)
    assert len(pools.tree.expected) == 0


def test_a_reset_expects_nothing():
    pools = Pools()
    pools.insert(FIRST)
    expect(pools, [*FIRST, 5])
    pools.tree.reset()
    assert len(pools.tree.expected) == 0
    pools.check()


def test_the_turn_of_prompts_that_are_gone_does_not_count():
    """A preempted request comes back with an earlier turn."""
    pools = Pools()
    for prefix in (FIRST, SECOND):
        pools.insert(prefix)
    arrive(pools, expect(pools, [*FIRST, 5], 9))
    expect(pools, [*FIRST, 6], 1)
    expect(pools, [*SECOND, 5], 5)
    evict(pools.tree, 1)
    assert hits(pools, FIRST, SECOND) == [32, 0]

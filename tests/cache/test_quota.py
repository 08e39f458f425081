"""Soft quotas: who gives way first when frames run out, and that nothing else changes."""

import pytest

from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.candidates import LOOK_AHEAD
from hybrid_jax.cache.tree.quota import Quota
from hybrid_jax.cache.tree.radix import RadixTree
from tests.cache.pools import Pools, seq

FRAMES = 41  # 40 to hand out; a page of 16 tokens is 1 frame, a checkpoint 2


def make_pools(kv_quota):
    pools = Pools(num_frames=FRAMES)
    pools.tree = RadixTree(
        pools.frames,
        pools.slots,
        grain=8,
        page_tokens=16,
        needs_slots=True,
        quota=None if kv_quota is None else Quota(pools.frames, pools.slots, kv_quota),
    )
    return pools


def fill_up(pools):
    """In order of use: a long text of 9 pages with a checkpoint inside and at its end, 5 of two pages, 2 of one."""
    pools.insert(seq((0, 80)))
    pools.insert(seq((0, 144)))
    for start in range(1000, 1500, 100):
        pools.insert(seq((start, 32)))
    for start in range(2000, 2002):
        pools.insert(seq((100 * start, 16)))


def cached(pools):
    """(pages, checkpoints) in the tree."""
    return pools.tree.page_holds.num_frames, len(pools.tree.slot_nodes)


def gone_after_one_frame(kv_quota):
    """What making room for one frame more takes: (pages, checkpoints)."""
    pools = make_pools(kv_quota)
    fill_up(pools)
    before = cached(pools)
    assert pools.frames.num_held == before[0] + 2 * before[1]
    assert pools.tree.evict(1) >= 1
    pools.check()
    return before[0] - cached(pools)[0], before[1] - cached(pools)[1]


def test_without_a_quota_the_entry_of_least_value_goes():
    assert gone_after_one_frame(None) == (0, 1)  # the checkpoint at 80, used longest ago


def test_within_its_quota_the_same_entry_goes():
    assert gone_after_one_frame((0.1, 0.9)) == (0, 1)


def test_pages_above_their_quota_go_first():
    # The checkpoint at 80 frees no page; the long text's end frees 4 and its checkpoint.
    assert gone_after_one_frame((0.0, 0.3)) == (4, 1)


def test_checkpoints_above_their_quota_go_first():
    pools = make_pools((0.9, 1.0))
    pools.insert(seq((0, 96)))  # 6 pages and a checkpoint: mostly pages, and used longest ago
    pools.insert(seq((1000, 16)))
    assert pools.tree.evict(1) == 3
    assert pools.match(seq((0, 97))).hit_len == 96
    assert pools.match(seq((1000, 17))).hit_len == 0
    pools.check()


def test_a_quota_looks_at_few_entries_only():
    pools = make_pools((0.0, 0.1))
    for start in range(LOOK_AHEAD):
        pools.insert(seq((1000 * start, 16)))  # a checkpoint of two frames, one page: mostly state
    pools.insert(seq((90000, 96)))
    assert pools.tree.evict(1) == 3 and pools.match(seq((0, 17))).hit_len == 0
    assert pools.match(seq((90000, 97))).hit_len == 96
    assert pools.tree.evict(1) == 8  # now it is among them
    pools.check()


def test_what_was_looked_at_keeps_its_order():
    pools = make_pools((0.0, 0.1))
    for start in range(4):
        pools.insert(seq((1000 * start, 16)))
    pools.insert(seq((90000, 96)))
    assert pools.tree.evict(1) == 8  # the long one
    hits = []
    for _ in range(4):
        pools.tree.evict(1)
        hits.append([pools.match(seq((1000 * start, 17))).hit_len for start in range(4)])
    assert hits == [[0, 16, 16, 16], [0, 0, 16, 16], [0, 0, 0, 16], [0, 0, 0, 0]]


def test_a_quota_never_refuses_anybody():
    frames = FrameAllocator(20)
    slots = SlotTable(frames, state_frames=2, max_slots=9)
    tree = RadixTree(
        frames, slots, grain=8, page_tokens=16, needs_slots=True, quota=Quota(frames, slots, (0, 0))
    )
    frames.allocate(12)  # a row takes more pages than the quota
    assert tree.make_room(7)
    assert not tree.make_room(8)


@pytest.mark.parametrize("policy_quota", [None, (0.3, 0.7), (0.0, 0.0), (1.0, 1.0)])
def test_everything_can_go_whatever_the_quota(policy_quota):
    pools = make_pools(policy_quota)
    fill_up(pools)
    assert pools.tree.make_room(FRAMES - 1)
    assert pools.frames.num_free == FRAMES - 1
    pools.check()

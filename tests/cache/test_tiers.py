"""A tree over two tiers: each is whole in itself, and none is told apart by what it lacks."""

import numpy as np
import pytest

from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.pages import PageHolds, WindowedFrames
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.copies import give_up, publish
from hybrid_jax.cache.tree.eviction import LeastRecentlyUsed
from hybrid_jax.cache.tree.node import ARENA, Why, look_up_result
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cache.tree.tier import Tier
from tests.cache.pools import GRAIN, Pools
from tests.cache.second_tier import SECOND, load, save, second_tier
from tests.drawing import spine

A, B = list(range(32)), [*range(16), *range(50, 66)]


class TwoTiers(Pools):
    """Small pools in two tiers, and what the arena's evictions told."""

    def __init__(self, page_tokens=16, needs_slots=True, policy=None, keeps=True):
        super().__init__(page_tokens, needs_slots, policy=policy)
        self.arena, self.keeps, self.told = self.tree.arena, keeps, []
        self.second = second_tier(self.arena, 200)
        tiers = [self.arena, self.second]
        self.tree = RadixTree(tiers, grain=GRAIN, needs_slots=needs_slots, sink=self.sink)

    def sink(self, tree, node, tier):
        assert tree.pages_to(node, node.end, tier).size == self.held(node, tier)
        self.told.append((tier, node.end, node.held[tier].num_children == 0))
        if self.keeps and tier == ARENA and (copy := save(tree, node)) is not None:
            publish(tree, copy)

    def held(self, node, tier):
        store = self.tree.tiers[tier].pages
        return store.num_pages(node.end)

    def below(self, tokens):
        """A prefix that the second tier has and the arena has not."""
        self.insert(tokens)
        self.evict()
        return self.node(tokens)

    def evict(self, tier=ARENA):
        self.tree.make_room(199, tier=tier)
        self.check()

    def node(self, tokens):
        return self.match([*tokens, 99]).reached

    def check(self):
        super().check()
        self.second.frames.check_invariants()
        self.second.slots.check_invariants()


@spine
def test_an_eviction_tells_the_sink_while_everything_is_in_place():
    tiers = TwoTiers(keeps=False)
    tiers.insert(A)
    tiers.insert(A[:16])  # used later than the longer one
    tiers.evict()
    assert tiers.told == [(ARENA, 32, True), (ARENA, 16, True)]
    assert tiers.frames.num_held == 0 and not tiers.node(A).cached


def test_a_match_says_the_deepest_resume_point_of_each_tier():
    tiers = TwoTiers()
    end = tiers.below(A)
    upper = tiers.insert(A[:16])
    found = tiers.match([*A, 99]).found
    assert [(tier.cached_len, tier.hit_len, tier.node) for tier in found] == [
        (16, 16, upper),
        (32, 32, end),
    ]
    assert tiers.match([*A, 99]).hit_len == 16  # what a row resumes from is in the arena
    assert [upper.has(ARENA), upper.has(SECOND), end.has(ARENA)] == [True, True, False]
    assert upper.has_checkpoint(ARENA) and not upper.has_checkpoint(SECOND)


def test_a_model_without_states_resumes_inside_what_each_tier_has():
    tiers = TwoTiers(page_tokens=8, needs_slots=False)
    tiers.below(A)
    tiers.insert(A[:16])
    assert [tier.hit_len for tier in tiers.match(A).found] == [16, 24]
    assert [tier.hit_len for tier in tiers.match([99]).found] == [0, 0]


@pytest.mark.parametrize("page_tokens", [0, 8, 16, 64])
def test_a_span_in_both_tiers_is_split_and_joined_in_both(page_tokens):
    tiers = TwoTiers(page_tokens)
    end = tiers.below(A)
    assert load(tiers.tree, np.array([*A, 99]))
    assert end.has(ARENA) and end.has(SECOND) and end.start == 0
    before = [tier.frames.num_held for tier in tiers.tree.tiers]
    tiers.tree.conclude(tiers.tree.announce(np.array([*A[:12], 77])))
    tiers.check()
    upper = end.parent
    assert (upper.end, upper.held.keys()) == (12, end.held.keys())
    assert all(held.num_children == 1 for held in upper.held.values())
    tiers.tree.forget(upper.children[77])
    tiers.check()
    assert end.start == 0 and [tier.frames.num_held for tier in tiers.tree.tiers] == before


def test_where_the_tiers_change_a_boundary_stays():
    tiers = TwoTiers(page_tokens=8, needs_slots=False)
    end = tiers.below(A)
    upper = tiers.insert(A[:16])
    assert end.parent is upper  # only the upper one is in the arena
    assert load(tiers.tree, np.array([*A, 99]))
    tiers.check()
    assert end.start == 0


@spine
def test_pages_leave_a_tier_with_its_own_last_checkpoint():
    tiers = TwoTiers()
    end = tiers.below(A)
    assert load(tiers.tree, np.array([*A, 99]))
    tiers.tree.drop_checkpoint(end, SECOND)
    tiers.check()
    assert end.held.keys() == end.slots.keys() == {ARENA}
    assert tiers.second.frames.num_held == 0


def test_a_tier_evicts_its_own_and_leaves_the_other_alone():
    tiers = TwoTiers()
    end = tiers.below(A)
    assert load(tiers.tree, np.array([*A, 99]))
    tiers.evict(SECOND)
    assert end.has(ARENA) and not end.has(SECOND)
    assert tiers.told[-1] == (SECOND, 32, True)
    counters = [tier.counters for tier in tiers.tree.tiers]
    assert [c.leaf_evictions for c in counters] == [1, 1]
    assert [c.inserted_checkpoints for c in counters] == [2, 1]


def test_a_pin_keeps_a_node_in_every_tier():
    tiers = TwoTiers()
    end = tiers.below(A)
    assert load(tiers.tree, np.array([*A, 99]))
    tiers.tree.pin(end)
    tiers.evict(), tiers.evict(SECOND)
    assert end.has(ARENA) and end.has(SECOND)
    tiers.tree.unpin(end)


@spine
def test_what_another_tier_still_has_is_not_lost():
    tiers = TwoTiers()
    end = tiers.below(A)
    assert not end.losses
    tiers.evict(SECOND)
    assert [loss.position for loss in tiers.node(A).losses] == [32]
    match = tiers.match([*A, 99])
    said = look_up_result(
        match, 0, prompt=np.array([*A, 99]), known_len=32, grain=GRAIN, needs_slots=True,
        look_ups=1, policy="lru",
    )  # fmt: skip
    assert (said.why, said.position) == (Why.EVICTED, 32)


def test_damage_is_dropped_from_every_tier():
    tiers = TwoTiers()
    tiers.below(A)
    assert load(tiers.tree, np.array([*A, 99]))
    tiers.tree.drop_path(np.array(A), 0)
    tiers.check()
    assert not tiers.node(A).cached
    assert tiers.frames.num_held == tiers.second.frames.num_held == 0


def test_a_reset_empties_every_tier():
    tiers = TwoTiers()
    tiers.below(A)
    tiers.insert(B)
    tiers.tree.reset()
    tiers.check()
    assert tiers.frames.num_held == tiers.second.frames.num_held == 0
    assert tiers.second.slots.num_held == 0


def test_what_no_tier_has_is_known_and_counted_once():
    tiers = TwoTiers()
    tiers.below(A)
    assert tiers.tree.num_known_nodes == 0
    tiers.evict(SECOND)
    assert (tiers.tree.num_known_nodes, tiers.tree.num_known_tokens) == (1, 32)


def test_a_copy_below_is_no_use_and_keeps_no_promise():
    tiers = TwoTiers()
    end = tiers.tree.announce(np.array([*A, 99]))
    tiers.tree.promise("r", end, 32)
    promised, second = end.parent, tiers.second
    used = promised.last_use
    pages, slot = second.frames.allocate(2).reshape(2, 1), second.slots.allocate()
    assert tiers.tree.fill(np.array(A), pages, slot, tier=SECOND) is promised
    second.frames.release(pages)
    second.slots.release(slot)
    tiers.check()
    assert promised.last_use == used
    assert tiers.match([*A, 99], "other").pending is promised


def test_a_second_tier_that_is_full_gives_up_what_was_used_longest_ago():
    tiers = TwoTiers(page_tokens=0)
    held = tiers.second.frames.allocate(195)  # two checkpoints are left
    for start in (100, 200, 300):
        tiers.below(list(range(start, start + 16)))
    hits = [tiers.match([*range(s, s + 16), 9]).found[SECOND].hit_len for s in (100, 200, 300)]
    assert hits == [0, 16, 16]
    tiers.second.frames.release(held)


def test_what_cannot_be_saved_is_dropped():
    tiers = TwoTiers()
    held = tiers.second.frames.allocate(199)
    assert not tiers.below(A).cached
    tiers.second.frames.release(held)


def test_a_copy_that_is_given_up_leaves_nothing_behind():
    tiers = TwoTiers()
    copy = save(tiers.tree, tiers.insert(A))
    assert tiers.second.frames.num_held == 4
    give_up(tiers.tree, copy)
    assert tiers.second.frames.num_held == tiers.second.slots.num_held == 0


class Keeper(LeastRecentlyUsed):
    """Knows something of one position, and writes nothing into nodes."""

    def keeps(self, node):
        return node.end == 8


def test_a_boundary_that_a_policy_knows_something_of_stays():
    for policy, start in ((Keeper(), 8), (LeastRecentlyUsed(), 0)):
        pools = Pools(policy=policy)
        end = pools.insert(A)
        pools.tree.tidy(pools.tree.boundary(end, 8))
        pools.check()
        assert end.start == start


def test_the_note_of_a_policy_is_nothing_to_the_tree():
    pools = Pools()
    end = pools.insert(A)
    upper = pools.tree.boundary(end, 8)
    upper.note = "anything"
    pools.tree.tidy(upper)
    assert end.start == 0


@pytest.mark.parametrize("numbers", [(1,), (0, 0), (0, 2)])
def test_tiers_are_numbered_in_their_order(numbers):
    frames = FrameAllocator(10)
    slots = SlotTable(frames, lengths=(1,), max_slots=2)
    tiers = [Tier(frames, slots, PageHolds(frames, 16), number=n) for n in numbers]
    with pytest.raises(AssertionError, match="numbers of tiers"):
        RadixTree(tiers, grain=8, needs_slots=True)


# --- wrong counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda t, n: t.second.slot_nodes.clear(), "tier 1: counts {} checkpoints"),
        (lambda t, n: n.slots.pop(SECOND), "tier 1: counts .* checkpoints, found {}"),
        (lambda t, n: setattr(n.held[SECOND], "num_children", 3), "counts 3 children, found 0"),
        (lambda t, n: t.tree.root.held.pop(SECOND), "tier 1, node .* children of no node"),
        (lambda t, n: t.second.candidates.evictable.discard(n), "counts False evictable"),
        (lambda t, n: setattr(n.held[SECOND], "pages", n.held[SECOND].pages[1:]), "page holds"),
    ],
)
def test_a_wrong_count_in_the_second_tier_is_noticed(break_it, message):
    tiers = TwoTiers()
    break_it(tiers, tiers.below(A))
    with pytest.raises(AssertionError, match=message):
        tiers.tree.check_invariants()


# --- checkpoints of several lengths ---------------------------------------------------------------


def test_checkpoints_of_two_lengths_stand_side_by_side():
    frames = FrameAllocator(10)
    slots = SlotTable(frames, lengths=(4, 1), max_slots=5)
    long, short, other = slots.allocate(), slots.allocate(form=1), slots.allocate(1)
    assert [slots.length(slot) for slot in (long, short, other)] == [4, 1, 1]
    assert slots.num_frames == frames.num_held == 6
    slots.check_invariants()
    told = {slot: listed.tolist() for slot, listed in slots.take_new()}
    assert told == {1: [1, 2, 3, 4]}  # the device knows the first form alone
    slots.release(short)
    slots.check_invariants()
    assert (slots.num_frames, frames.num_held) == (5, 5)
    with pytest.raises(AssertionError, match="counts 6 frames in all, found 5"):
        slots.num_frames += 1
        slots.check_invariants()


def test_a_checkpoint_is_made_shorter_in_place():
    frames = FrameAllocator(10)
    slots = SlotTable(frames, lengths=(4, 1), max_slots=5)
    slot = slots.allocate()
    rest = slots.shrink(slot, form=1)
    assert (slots.frames(slot), rest.tolist(), slots.num_frames) == ((1,), [2, 3, 4], 1)
    assert slots.take_new() == []
    slots.check_invariants()
    assert frames.num_held == 4
    frames.release(rest)
    slots.release(slot)
    assert frames.num_held == 0


def test_a_tree_holds_checkpoints_of_either_length():
    pools = Pools()
    pools.tree.arena.slots = pools.slots = SlotTable(pools.frames, lengths=(4, 1), max_slots=9)
    for tokens, form in ((A, 0), (B, 1)):
        pages, slot = pools.pages(32), pools.slots.allocate(form)
        pools.tree.fill(np.array(tokens), pages, slot)
        pools.frames.release(pages)
        pools.slots.release(slot)
    pools.check()
    assert pools.frames.num_held == 3 + 4 + 1  # the first of three pages is that of both
    pools.tree.make_room(199)
    assert pools.frames.num_held == 0 and pools.slots.num_frames == 0


def test_a_tree_takes_tiers_with_the_same_windows_alone():
    arena = Pools(16, True).tree.arena
    below = second_tier(arena, 20)
    below.pages.windows = (WindowedFrames(30, slice(0, 1)),)
    with pytest.raises(AssertionError, match=r"window=30.* windows of tiers, found"):
        RadixTree([arena, below], grain=GRAIN, needs_slots=True)

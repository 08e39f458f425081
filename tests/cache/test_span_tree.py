"""The tree of spans alone: its form, and whom it tells."""

import numpy as np
import pytest

from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.pages import PageHolds
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.node import Loss
from hybrid_jax.cache.tree.span_tree import SpanTree
from hybrid_jax.cache.tree.tier import Tier


class Spans:
    """A tree over small pools that remembers which nodes it called changed."""

    def __init__(self, page_tokens=16, needs_slots=True, max_slots=10):
        self.frames = FrameAllocator(150)
        self.slots = SlotTable(self.frames, lengths=(2,), max_slots=max_slots)
        self.changed = []
        self.tree = SpanTree(
            [Tier(self.frames, self.slots, PageHolds(self.frames, page_tokens))],
            needs_slots=needs_slots,
            changed=self.changed.append,
        )

    def insert(self, tokens):
        """A cached path with a checkpoint at its end."""
        node = self.tree.descend(np.array(tokens, np.int32))
        pages = self.frames.allocate(self.tree.arena.pages.num_pages(len(tokens)))[:, None]
        for part in node.path():
            if not part.cached:
                self.tree.give_pages(part, pages)
        self.frames.release(pages)
        if self.tree.needs_slots:
            slot = self.slots.allocate()
            self.tree.give_checkpoint(node, slot)
            self.slots.release(slot)
        self.tree.tidy(node)
        self.tree.check_invariants()
        return node


def test_a_boundary_goes_with_the_checkpoint_that_made_it():
    spans = Spans()
    lower, upper = spans.insert(range(32)), spans.insert(range(16))
    assert lower.parent is upper and spans.tree.num_nodes == 2
    spans.tree.drop_checkpoint(upper)
    spans.tree.check_invariants()
    assert (lower.start, lower.end, spans.tree.num_nodes) == (0, 32, 1)
    assert spans.tree.arena.pages.num_frames == 2


def test_pages_below_the_last_checkpoint_go_with_it():
    spans = Spans()
    node = spans.insert(range(32))
    spans.tree.drop_checkpoint(node)
    spans.tree.check_invariants()
    assert not node.cached and spans.frames.num_held == 0
    assert spans.tree.num_known_tokens == 32


def test_a_boundary_that_somebody_needs_stays():
    spans = Spans()
    node = spans.tree.descend(np.arange(40, dtype=np.int32))
    upper = spans.tree.split(node, 24)
    upper.num_announced = 1
    spans.tree.tidy(upper)
    assert spans.tree.num_nodes == 2
    spans.tree.check_invariants()
    upper.num_announced = 0
    with pytest.raises(AssertionError, match="the boundary at 24 is needless"):
        spans.tree.check_invariants()
    spans.tree.tidy(upper)
    assert spans.tree.num_nodes == 1 and node.start == 0


def test_pages_lead_to_a_node_and_the_deepest_of_a_cut_page_counts():
    spans = Spans(page_tokens=64)
    upper = spans.insert(range(24))
    lower = spans.insert([*range(24), *range(100, 140)])
    [[own]] = spans.tree.pages_to(upper, 24).tolist()
    [[deeper]] = spans.tree.pages_to(lower, 64).tolist()
    assert own != deeper and spans.frames.holders(own) == 1


def test_nodes_that_leave_are_told_of_without_a_parent():
    spans = Spans()
    lower, upper = spans.insert(range(32)), spans.insert(range(16))
    spans.changed.clear()
    spans.tree.drop_checkpoint(upper)
    assert upper in spans.changed and upper.parent is None
    assert lower in spans.changed
    spans.changed.clear()
    spans.tree.clear()
    assert spans.changed == [lower] and lower.parent is None
    assert spans.frames.num_held == 0 and spans.tree.num_nodes == 0
    spans.tree.check_invariants()


def test_a_child_that_comes_and_goes_changes_nothing_for_paths_that_part_below():
    spans = Spans(page_tokens=0, max_slots=50)
    spans.insert(range(16))
    for last in range(30):  # they part at 20, where no checkpoint stands
        spans.insert([*range(20), 100 + last])
    for beginning in ((), range(16), range(18)):
        spans.changed.clear()
        lone = spans.insert([*beginning, 77])
        spans.tree.drop_all(lone)
        spans.tree.check_invariants()
        assert len(spans.changed) < 15


def test_the_end_of_a_path_is_told_when_pages_above_are_its_own_again():
    spans = Spans(page_tokens=0)
    spans.insert(range(8))
    end, lone = spans.insert(range(32)), spans.insert([*range(16), 50])
    end.parent.num_announced += 1  # keeps the boundary at 16
    spans.changed.clear()
    spans.tree.drop_all(lone)
    assert end in spans.changed
    spans.changed.clear()
    spans.insert([*range(16), 50])
    assert end in spans.changed


def test_a_path_of_thousands_of_boundaries_is_followed_to_its_checkpoint():
    spans = Spans(page_tokens=0)
    end, top = spans.insert(range(3000)), spans.insert(range(1))
    while len(end.tokens) > 1:
        spans.tree.split(end, 1).num_announced += 1
    spans.changed.clear()
    spans.tree.drop_checkpoint(top)
    assert end in spans.changed
    spans.tree.check_invariants()


def test_without_checkpoints_nobody_looks_for_one_below_a_node(monkeypatch):
    spans = Spans(needs_slots=False)
    for last in range(8):
        spans.insert([*range(16), 20 + last])
    monkeypatch.setattr("hybrid_jax.cache.tree.span_tree.first_checkpoints", None)
    spans.tree.drop_all(spans.insert(range(30, 46)))  # the root had a second cached child
    spans.tree.check_invariants()


def test_what_was_given_away_at_a_cut_stays_with_what_is_above_it():
    spans = Spans()
    node = spans.insert(range(40))
    node.losses = [Loss(position=n, look_up=0, pages=False) for n in (8, 16, 24)]
    upper = spans.tree.split(node, 16)
    positions = [[loss.position for loss in part.losses] for part in (upper, node)]
    assert positions == [[8, 16], [24]]  # who parts at 16 comes by the upper one alone
    spans.tree.tidy(upper)
    assert [loss.position for loss in node.losses] == [8, 16, 24]

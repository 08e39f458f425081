"""The tree of spans alone: its form, and whom it tells."""

import numpy as np
import pytest

from hybrid_jax.cache.frames import FrameAllocator
from hybrid_jax.cache.pages import PageHolds
from hybrid_jax.cache.slots import SlotTable
from hybrid_jax.cache.span_tree import SpanTree


class Spans:
    """A tree over small pools that remembers which nodes it called changed."""

    def __init__(self, page_tokens=16, needs_slots=True):
        self.frames = FrameAllocator(50)
        self.slots = SlotTable(self.frames, state_frames=2, max_slots=10)
        self.changed = []
        self.tree = SpanTree(
            PageHolds(self.frames),
            self.slots,
            page_tokens=page_tokens,
            needs_slots=needs_slots,
            changed=self.changed.append,
        )

    def insert(self, tokens):
        """A cached path with a checkpoint at its end."""
        node = self.tree.descend(np.array(tokens, np.int32))
        pages = self.frames.allocate(self.tree.num_pages(len(tokens)))[:, None]
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
    assert spans.tree.page_holds.num_frames == 2


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


def test_without_checkpoints_nobody_looks_for_one_below_a_node():
    spans = Spans(needs_slots=False)
    for last in range(8):
        spans.insert([*range(16), 20 + last])
    visits, rebase = [], spans.tree._rebase
    spans.tree._rebase = lambda node: visits.append(node) or rebase(node)
    lone = spans.insert(range(30, 46))  # the root has a second cached child, and loses it again
    spans.tree.drop_all(lone)
    assert visits == [spans.tree.root] * 2
    spans.tree.check_invariants()

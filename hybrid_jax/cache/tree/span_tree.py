"""A tree of token spans with what they list: nodes, pages and checkpoints, always in the same form.

Edges are token spans. A node is *known* (tokens only) or *cached* (it lists the pages that overlap its span);
everything above a cached node is cached. A checkpoint stands at its node's end.

The tree holds one count on every frame and slot that a node lists, as any other holder does. A page that
two nodes share (a split inside it) is counted twice. Only offsets below a node's end are promised in its last
page: the row that filled it may go on writing after that, everybody else copies the page first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hybrid_jax.cache.pools.counted import CountedSlots
from hybrid_jax.cache.pools.pages import PageStore
from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.node import ENDINGS_KEPT, LOSSES_KEPT, Node, shared_len


class SpanTree:
    """The base of `RadixTree`, which decides what comes and goes; this keeps the tree in form.

    The form has two rules. A boundary between two spans has a reason: a checkpoint, a branch, a change from cached to
    known, or somebody who needs it. And in a model with recurrent layers there are no pages without a checkpoint below
    them. What takes from a node restores the form. What adds to one (`descend`, `split`, `give_pages`,
    `give_checkpoint`, and a caller who no longer needs a node) leaves that to `tidy`, once all of it is done.

    Args:
        page_holds: what the nodes' pages are, and the tree's own counts on them.
        slots: the checkpoints; the tree is one holder among others.
        page_tokens: tokens of a page; 0 for a model without attention, whose nodes list no pages.
        needs_slots: the model has recurrent layers, so pages are of use below a checkpoint only.
        changed: called with every node that may have changed: what it lists, its children, its use.
            A node that left the tree has no parent any more.

    Attributes:
        root: ends at 0 and is always cached; never split, merged or given anything.
        num_nodes, num_known_nodes, num_known_tokens: all nodes but the root; those without pages, and their tokens.
        page_holds: as given.
        slot_nodes: the node of each checkpoint, by handle.
    """

    def __init__(
        self,
        page_holds: PageStore,
        slots: SlotTable | CountedSlots,
        *,
        page_tokens: int,
        needs_slots: bool,
        changed: Callable[[Node], None],
    ):
        self.page_tokens, self.needs_slots = page_tokens, needs_slots
        self.page_holds, self._slots, self._changed = page_holds, slots, changed
        self._clock = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self.root = Node(np.zeros(0, np.int32), 0, pages=self.page_holds.none)
        self.num_nodes = self.num_known_nodes = self.num_known_tokens = 0
        self.slot_nodes: dict[int, Node] = {}

    def clear(self) -> None:
        """Takes every node out and releases what they list."""
        for node in self.root.walk():
            if node.parent is not None:
                if node.slot:
                    self._slots.release(node.slot)
                if node.cached:
                    self.page_holds.release(node.pages)
                node.parent = None
                self._changed(node)
        self._start_empty()

    # --- boundaries -----------------------------------------------------------------------------

    def descend(self, tokens: np.ndarray) -> Node:
        """The node that ends exactly at the end of `tokens`, made by splitting or as a known leaf."""
        node, position, text = self.root, 0, tokens.tobytes()
        while position < len(tokens):
            child = node.children.get(tokens.item(position))
            if child is None:
                return self._attach(node, tokens[position:].copy())
            shared = shared_len(child.tokens, tokens, text, position)
            node = child if shared == len(child.tokens) else self.split(child, shared)
            position += shared
        return node

    def _attach(self, parent: Node, tokens: np.ndarray) -> Node:
        self._clock += 1
        node = Node(tokens, parent.end, parent=parent, last_use=self._clock)
        was_leaf = not parent.children
        parent.children[int(tokens[0])] = node
        self.num_nodes += 1
        self.num_known_nodes += 1
        self.num_known_tokens += len(tokens)
        self._changed(node)
        if was_leaf:  # with other children it stays as it is
            self.tidy(parent)
        return node

    def split(self, node: Node, offset: int) -> Node:
        """Puts a new node above, ending `offset` tokens into this one; both list a page that the cut hits."""
        upper = Node(
            node.tokens[:offset], node.start, parent=node.parent, last_use=node.last_use,
            num_cached_children=int(node.cached), num_expected=node.num_expected,
            expected_until=node.expected_until,
        )  # fmt: skip
        node.above.children[int(upper.tokens[0])] = upper
        upper.children[int(node.tokens[offset])] = node
        node.parent, node.tokens, node.start = upper, node.tokens[offset:], upper.end
        if node.losses:
            upper.losses = [loss for loss in node.losses if loss.position <= upper.end]
            node.losses = node.losses[len(upper.losses) :]
        if node.endings:
            upper.endings = [ending for ending in node.endings if ending.saved <= upper.end]
            node.endings = [ending for ending in node.endings if ending.saved > upper.end]
        self.num_nodes += 1
        if node.cached:
            first = self._page_start(upper)
            upper.pages = node.pages[: self.num_pages(upper.end) - first]
            node.pages = node.pages[self._page_start(node) - first :]
            if self.page_tokens and upper.end % self.page_tokens:
                self.page_holds.share(upper.pages[-1:])
        else:
            self.num_known_nodes += 1
        self._changed(upper)
        self._changed(node)
        return upper

    def _merge(self, node: Node) -> None:
        """Joins a node into its only child, which keeps its identity; of a shared page the child's stays."""
        (child,) = node.children.values()
        if node.cached:
            cut = self.page_tokens and node.end % self.page_tokens
            if cut:
                self.page_holds.release(node.pages[-1:])
            child.pages = self.page_holds.join(node.pages[:-1] if cut else node.pages, child.pages)
        else:
            self.num_known_nodes -= 1
        child.tokens = np.concatenate((node.tokens, child.tokens))
        child.start, child.parent = node.start, node.parent
        child.losses = (node.losses + child.losses)[-LOSSES_KEPT:]
        child.endings = (node.endings + child.endings)[-ENDINGS_KEPT:]
        child.last_use = max(child.last_use, node.last_use)
        node.above.children[int(child.tokens[0])] = child
        self._leave(node)
        self._changed(child)

    def _leave(self, node: Node) -> None:
        node.parent = None
        self.num_nodes -= 1
        self._changed(node)

    def tidy(self, node: Node) -> None:
        """Restores the form from here upward: no useless pages, no needless boundary."""
        while node.parent is not None:
            parent, changed = node.parent, False
            useless = (
                self.needs_slots and node.cached and not node.slot and not node.num_cached_children
            )
            if useless and not node.pins:
                self._drop_pages(node)
                self._changed(parent)
                changed = True
            if self._mergeable(node):
                self._merge(node)
                changed = True
            else:
                self._changed(node)
            if not changed:
                break
            node = parent

    def _mergeable(self, node: Node) -> bool:
        if len(node.children) != 1 or node.slot or node.needed or node.note is not None:
            return False
        (child,) = node.children.values()
        return child.cached == node.cached

    def forget(self, node: Node) -> None:
        """Takes a known leaf that nobody needs out of the tree."""
        parent = node.above
        del parent.children[int(node.tokens[0])]
        self.num_known_nodes -= 1
        self.num_known_tokens -= len(node.tokens)
        self._leave(node)
        self._changed(parent)
        self.tidy(parent)

    def touch(self, node: Node) -> None:
        """The node is in use now; a new one counts as just used."""
        self._clock += 1
        node.last_use = self._clock
        self._changed(node)

    # --- what nodes list ------------------------------------------------------------------------

    def num_pages(self, length: int) -> int:
        """Pages that overlap [0, length)."""
        return -(-length // self.page_tokens) if self.page_tokens else 0

    def _page_start(self, node: Node) -> int:
        return node.start // self.page_tokens if self.page_tokens else 0

    def pages_to(self, node: Node, length: int) -> np.ndarray:
        """The pages that overlap [0, length) on the path to a cached node: int32[n, frames_per_page] frame ids.

        Of a page that a boundary cuts it is the deepest node's that counts.
        """
        parts, missing = [], self.num_pages(length)
        while node.parent is not None and missing:
            first = self._page_start(node)
            parts.append(node.pages[: missing - first])
            missing = min(missing, first)
            node = node.parent
        return self.page_holds.row(parts[::-1])

    def give_pages(self, node: Node, pages: np.ndarray) -> None:
        """Makes a known node below a cached one cached, by those of a row's pages that overlap it."""
        own = pages[self._page_start(node) : self.num_pages(node.end)]
        node.pages = self.page_holds.adopt(own)
        parent = node.above
        parent.num_cached_children += 1
        if parent.num_cached_children == 2:
            self._child_came_or_went(parent)
        self.num_known_nodes -= 1
        self.num_known_tokens -= len(node.tokens)
        self._changed(parent)
        self._changed(node)

    def give_checkpoint(self, node: Node, slot: int) -> None:
        """Puts a checkpoint at the end of a cached node that has none."""
        self._slots.retain(slot)
        node.slot = slot
        self.slot_nodes[slot] = node
        self._rebase(node)

    def drop_checkpoint(self, node: Node) -> None:
        """Releases a node's checkpoint, if it has one; its pages stay while something below uses them."""
        self._drop_slot(node)
        self.tidy(node)

    def drop_all(self, node: Node) -> None:
        """Makes a cached node without cached children a known one: releases its checkpoint and its pages."""
        parent = node.above
        self._drop_slot(node)
        self._drop_pages(node)
        self.tidy(parent)
        self.tidy(node)

    def _drop_slot(self, node: Node) -> None:
        if node.slot:
            self._slots.release(node.slot)
            del self.slot_nodes[node.slot]
            node.slot = 0
            self._rebase(node)

    def _rebase(self, node: Node) -> None:
        """Tells of the nodes below that this node's checkpoint came or went above them."""
        for end in _first_slots(node, lambda child: child.cached):
            self._changed(end)

    def _child_came_or_went(self, node: Node) -> None:
        """Pages of a node without a checkpoint go with the end of the one path below it, if it is one."""
        if self.needs_slots and not node.slot and node.parent is not None:
            for end in _first_slots(node, lambda child: child.num_cached_children == 1):
                self._changed(end)

    def _drop_pages(self, node: Node) -> None:
        self.page_holds.release(node.pages)
        node.pages = None
        parent = node.above
        parent.num_cached_children -= 1
        if parent.num_cached_children == 1:
            self._child_came_or_went(parent)
        self.num_known_nodes += 1
        self.num_known_tokens += len(node.tokens)

    # --- looking at it --------------------------------------------------------------------------

    def check_invariants(self) -> list[Node]:
        """Recomputes every count and link; raises AssertionError with both numbers when they differ.

        Returns:
            All nodes but the root.
        """
        _, *nodes = self.root.walk()
        known = [node for node in nodes if not node.cached]
        agree(
            "radix",
            nodes=(self.num_nodes, len(nodes)),
            known_nodes=(self.num_known_nodes, len(known)),
            known_tokens=(self.num_known_tokens, sum(len(node.tokens) for node in known)),
            checkpoints=(self.slot_nodes, {node.slot: node for node in nodes if node.slot}),
        )
        self.page_holds.check_invariants([node.pages for node in nodes if node.cached])
        self._check_links(self.root)
        for node in nodes:
            self._check_links(node)
            self._check_form(node)
        return nodes

    def _check_links(self, node: Node) -> None:
        children = node.children.values()
        pages = self.num_pages(node.end) - self._page_start(node)
        agree(
            f"radix: node {node}",
            pages=(len(node.pages) if node.cached else pages, pages),
            cached_children=(node.num_cached_children, sum(child.cached for child in children)),
            first_tokens=(
                [[first] for first in node.children],
                [child.tokens[:1].tolist() for child in children],
            ),
            parents_of_children=([child.parent for child in children], [node] * len(children)),
            starts_of_children=([child.start for child in children], [node.end] * len(children)),
        )

    def _check_form(self, node: Node) -> None:
        if node.slot:
            self._slots.holders(node.slot)  # raises if it was released
        assert node.cached or not (node.slot or node.num_cached_children), (
            f"radix: node {node} has no pages, but there is a checkpoint or a cached node below it"
        )
        used = node.slot or node.num_cached_children or node.pins
        assert used or not (self.needs_slots and node.cached), (
            f"radix: leaf {node} has pages, no checkpoint"
        )
        assert not self._mergeable(node), f"radix: the boundary at {node.end} is needless"


def _first_slots(node: Node, through: Callable[[Node], bool]) -> Iterator[Node]:
    """The first nodes with a checkpoint on every path below this one that leads `through` nodes without one.

    A path may have thousands of nodes: they are not joined where a policy has its points.
    """
    stack = [iter(node.children.values())]
    while stack:
        child = next(stack[-1], None)
        if child is None:
            stack.pop()
        elif child.slot:
            yield child
        elif through(child):
            stack.append(iter(child.children.values()))

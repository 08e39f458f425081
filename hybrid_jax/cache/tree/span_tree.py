"""A tree of token spans with what they list: nodes, pages and checkpoints, always in the same form.

Edges are token spans. A node is *known* (tokens only) or *cached* (some tier has the pages that overlap its span, and
perhaps a checkpoint at its end). Tiers may have copies of the same.

The tree holds one count on every frame and slot that a node lists, as any other holder does. A page that
two nodes share (a split inside it) is counted twice. Only offsets below a node's end are promised in its last
page: the row that filled it may go on writing after that, everybody else copies the page first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from hybrid_jax.cache.pools.pages import NodePages, RowPages
from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.tree.node import ARENA, ENDINGS_KEPT, LOSSES_KEPT, Held, Node, shared_len
from hybrid_jax.cache.tree.tier import Tier


class Watcher(Protocol):
    """Is told where prompts can resume."""

    def came(self, node: Node, tier: int) -> None:
        """A tier has a checkpoint at a node's end now, or, in a model without recurrent layers, the node's pages."""

    def went(self, node: Node, tier: int) -> None:
        """A tier is about to lose what `came` told of."""

    def emptied(self) -> None:
        """Nothing is left in any tier."""


class SpanTree:
    """The base of `RadixTree`, which decides what comes and goes; this keeps the tree in form.

    The form has three rules. Each tier is whole: it has all that is above what it has. A boundary between two spans
    has a reason: a checkpoint, a branch, other tiers above it than below, a page that it cuts and that is missing
    below, or somebody who needs it. And in a model with recurrent layers a tier has no pages without a checkpoint of
    its own below them, and none that lie behind every window there. What takes from a node restores the form. What adds
    to one (`descend`, `split`, `give_pages`, `give_checkpoint`, and a caller who no longer needs a node) leaves that to
    `tidy`, once all of it is done.

    Args:
        tiers: where pages and checkpoints live, by number; the first is the arena. All have the same windows.
        needs_slots: the model has recurrent layers, so pages are of use below a checkpoint only.
        changed: called with every node that may have changed: what it lists, its children, its use.
            A node that left the tree has no parent any more.

    Attributes:
        root: ends at 0 and is in every tier; never split, merged or given anything.
        num_nodes, num_known_nodes, num_known_tokens: all nodes but the root; those in no tier, and their tokens.
        tiers, arena: as given; the tier that rows work in.
        watcher: is told where prompts can resume; None for nobody. `watch` sets it.
    """

    def __init__(
        self, tiers: Sequence[Tier], *, needs_slots: bool, changed: Callable[[Node], None]
    ):
        agree("radix", numbers_of_tiers=([tier.number for tier in tiers], list(range(len(tiers)))))
        windows = [tier.pages.windows for tier in tiers]
        agree("radix", windows_of_tiers=(windows, windows[:1] * len(tiers)))
        self.tiers, self.arena = tuple(tiers), tiers[ARENA]
        self.needs_slots, self._changed = needs_slots, changed
        self._clock = 0
        self.watcher: Watcher | None = None
        self._start_empty()

    def _start_empty(self) -> None:
        held = {tier.number: Held(tier.pages.none) for tier in self.tiers}
        self.root = Node(np.zeros(0, np.int32), 0, held=held)
        self.num_nodes = self.num_known_nodes = self.num_known_tokens = 0
        for tier in self.tiers:
            tier.slot_nodes = {}

    def clear(self) -> None:
        """Takes every node out and releases what they list."""
        for node in self.root.walk():
            if node.parent is not None:
                for tier, slot in node.slots.items():
                    self.tiers[tier].slots.release(slot)
                for tier, held in node.held.items():
                    self.tiers[tier].pages.release(held.pages)
                node.parent = None
                self._changed(node)
        self._start_empty()
        if self.watcher is not None:
            self.watcher.emptied()

    def watch(self, watcher: Watcher) -> None:
        """Has somebody told where prompts can resume: now, and whenever that changes."""
        self.watcher = watcher
        watcher.emptied()
        for node, tier in self.resume_points():
            watcher.came(node, tier)

    def resume_points(self) -> Iterator[tuple[Node, int]]:
        """Where prompts can resume: nodes, each with a tier that has all that is needed."""
        for node in self.root.walk():
            if node.parent is not None:
                for tier in node.slots if self.needs_slots else node.held:
                    yield node, tier

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
        # The lower part stays the same node, because checkpoints, promises and pins belong to its end. Prompts that
        # wait for it run through the upper part, too.
        upper = Node(
            node.tokens[:offset], node.start, parent=node.parent, last_use=node.last_use,
            num_expected=node.num_expected, expected_until=node.expected_until,
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
        self.num_known_nodes += not node.held
        for tier, held in node.held.items():
            store = self.tiers[tier].pages
            above, held.pages = store.split(held.pages, upper.start, upper.end)
            upper.held[tier] = Held(above, num_children=1)
        self._changed(upper)
        self._changed(node)
        return upper

    def _merge(self, node: Node) -> None:
        """Joins a node into its only child, which keeps its identity; of a shared page the child's stays."""
        (child,) = node.children.values()
        self.num_known_nodes -= not node.held
        for tier, held in node.held.items():
            below = child.held[tier]
            below.pages = self.tiers[tier].pages.join(held.pages, below.pages, node.end)
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
            if self.needs_slots and not node.pins:
                for tier, held in [*node.held.items()]:
                    if not (held.num_children or tier in node.slots):  # useless pages
                        self._drop_pages(node, tier)
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
        if len(node.children) != 1 or node.slots or node.needed:
            return False
        (child,) = node.children.values()
        if child.held.keys() != node.held.keys():
            return False
        for number, held in node.held.items():
            if self.tiers[number].pages.loses(held.pages, child.held[number].pages, node.end):
                return False
        for tier in self.tiers:  # noqa: SIM110  # twice as fast as any()
            if tier.policy.keeps(node):
                return False
        return True

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

    def pages_to(self, node: Node, length: int, tier: int = ARENA) -> RowPages:
        """A tier's pages that overlap [0, length) on the path to a node in it: int32[n, frames_per_page] frame ids.

        They are 0 where nothing is read by a row that goes on at `length`.
        """
        return self.tiers[tier].pages.row(_spans(node, tier), length)

    def readable(self, node: Node, tier: int = ARENA) -> bool:
        """Whether a tier has all that a row reads which goes on from a node's end."""
        store = self.tiers[tier].pages
        return not store.windows or store.readable(_spans(node, tier), node.end)

    def deepest(self, node: Node, length: int, grain: int, tier: int = ARENA) -> int:
        """The last multiple of `grain` up to `length`, which is one, from which a row can go on with a tier's pages.

        Args:
            node: in the tier, and around `length`.

        Returns:
            0 if there is none.
        """
        store = self.tiers[tier].pages
        spans = _spans(node, tier) if store.windows else []
        return store.deepest(spans, length, grain)

    def give_pages(self, node: Node, pages: RowPages, tier: int = ARENA) -> None:
        """Puts a node into a tier that has the node above, with those of a row's pages there that overlap it."""
        adopted = self.tiers[tier].pages.adopt(pages, node.start, node.end)
        if not node.held:
            self.num_known_nodes -= 1
            self.num_known_tokens -= len(node.tokens)
        node.held[tier] = Held(adopted)
        if self.watcher is not None and not self.needs_slots:
            self.watcher.came(node, tier)
        parent = node.above
        above = parent.held[tier]
        above.num_children += 1
        if above.num_children == 2:
            self._child_came_or_went(parent, tier)
        self._changed(parent)
        self._changed(node)

    def mend(self, node: Node, pages: RowPages, tier: int = ARENA) -> None:
        """Gives a node in a tier those of a row's pages there that overlap it and that it lacks."""
        held = node.held[tier]
        held.pages = self.tiers[tier].pages.mend(held.pages, pages, node.start, node.end)

    def hollow(self, node: Node, tier: int = ARENA) -> None:
        """Releases those pages of a node in a tier that no checkpoint at its end or below can read.

        A model without recurrent layers can read them from any grain boundary.
        """
        if self.needs_slots and node.has(tier):
            first = self._first_resumed(node, tier)
            if first is not None:
                self.release_before(node, first, tier)

    def release_before(self, node: Node, position: int, tier: int = ARENA) -> None:
        """Releases those pages of a node in a tier that are only read by rows that go on before `position`."""
        held = node.held[tier]
        held.pages = self.tiers[tier].pages.hollow(held.pages, node.start, position)

    def _first_resumed(self, node: Node, tier: int) -> int | None:
        """Where the first checkpoint stands at a node's end or below; None for none."""
        if node.has_checkpoint(tier):
            return node.end
        return min((below.end for below in first_checkpoints(node, tier)), default=None)

    def give_checkpoint(self, node: Node, slot: int, tier: int = ARENA) -> None:
        """Puts a checkpoint at the end of a node in a tier that has none there."""
        self.tiers[tier].slots.retain(slot)
        node.slots[tier] = slot
        self.tiers[tier].slot_nodes[slot] = node
        if self.watcher is not None:
            self.watcher.came(node, tier)
        self._rebase(node, tier)

    def drop_checkpoint(self, node: Node, tier: int = ARENA) -> None:
        """Releases a node's checkpoint in a tier, if there is one; its pages stay while something below uses them."""
        self._drop_slot(node, tier)
        self.tidy(node)

    def drop_all(self, node: Node, tier: int = ARENA) -> None:
        """Takes a node without children in a tier out of it: releases its checkpoint and its pages."""
        parent = node.above
        self._drop_slot(node, tier)
        self._drop_pages(node, tier)
        self.tidy(parent)
        self.tidy(node)

    def _drop_slot(self, node: Node, tier: int) -> None:
        if node.has_checkpoint(tier):
            if self.watcher is not None:
                self.watcher.went(node, tier)
            slot = node.slots.pop(tier)
            self.tiers[tier].slots.release(slot)
            del self.tiers[tier].slot_nodes[slot]
            self._rebase(node, tier)
            first = self.tiers[tier].pages.read_from(node.end)
            while node.end > first:
                self.hollow(node, tier)
                node = node.above

    def _rebase(self, node: Node, tier: int) -> None:
        """Tells of the next checkpoints below that one came or went here; with a window of the next above, too."""
        for end in first_checkpoints(node, tier):
            self._changed(end)
        if self.tiers[tier].pages.windows:
            above = node.above
            while above.parent is not None and not above.has_checkpoint(tier):
                above = above.parent
            self._changed(above)

    def _child_came_or_went(self, node: Node, tier: int) -> None:
        """Pages of a node without a checkpoint go with the end of the one path below it, if it is one."""
        if self.needs_slots and node.parent is not None and not node.has_checkpoint(tier):
            for end in first_checkpoints(node, tier, lone=True):
                self._changed(end)

    def _drop_pages(self, node: Node, tier: int) -> None:
        if self.watcher is not None and not self.needs_slots:
            self.watcher.went(node, tier)
        self.tiers[tier].pages.release(node.held.pop(tier).pages)
        parent = node.above
        above = parent.held[tier]
        above.num_children -= 1
        if above.num_children == 1:
            self._child_came_or_went(parent, tier)
        if not node.held:
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
        )
        for tier in self.tiers:
            number = tier.number
            stand = {n.slots[number]: n for n in nodes if n.has_checkpoint(number)}
            agree(f"radix: tier {number}", checkpoints=(tier.slot_nodes, stand))
            tier.pages.check_invariants([n.held[number].pages for n in nodes if n.has(number)])
            for node in [self.root, *nodes]:
                self._check_tier(node, tier)
        for node in [self.root, *nodes]:
            self._check_links(node)
        for node in nodes:
            assert not self._mergeable(node), f"radix: the boundary at {node.end} is needless"
        return nodes

    def _check_tier(self, node: Node, tier: Tier) -> None:
        """Checks what one tier has of a node and of its children."""
        held, slot = node.held.get(tier.number), node.slots.get(tier.number)
        below = [child for child in node.children.values() if child.has(tier.number)]
        where = f"radix: tier {tier.number}, node {node}"
        if held is None:
            agree(where, children_of_no_node=(below, []), checkpoints_of_no_node=(slot, None))
            return
        places = tier.pages.places(node.start, node.end)
        agree(
            where,
            pages=(len(held.pages), places.stop - places.start),
            children=(held.num_children, len(below)),
        )
        if slot is not None:
            tier.slots.holders(slot)  # raises if it was released
            readable = self.readable(node, tier.number)
            agree(where, readable_from_its_checkpoint=(readable, True))
        if self.needs_slots and (first := self._first_resumed(node, tier.number)) is not None:
            needless = tier.pages.hollow(held.pages, node.start, first) is not held.pages
            assert not needless, f"{where}: there are pages that no window reads"
        used = slot or below or node.pins or node.parent is None
        assert used or not self.needs_slots, f"{where}: there are pages, but no checkpoint"

    def _check_links(self, node: Node) -> None:
        children = node.children.values()
        agree(
            f"radix: node {node}",
            first_tokens=(
                [[first] for first in node.children],
                [child.tokens[:1].tolist() for child in children],
            ),
            parents_of_children=([child.parent for child in children], [node] * len(children)),
            starts_of_children=([child.start for child in children], [node.end] * len(children)),
        )


def _spans(node: Node, tier: int) -> list[tuple[int, NodePages]]:
    """Where the nodes on a path start, and what a tier has of their pages; the deepest node first."""
    found = []  # a generator would take as long again
    while node.parent is not None:
        found.append((node.start, node.held[tier].pages))
        node = node.parent
    return found


def first_checkpoints(node: Node, tier: int, *, lone: bool = False) -> Iterator[Node]:
    """The first nodes with a checkpoint in a tier on every path below this one.

    A path may have thousands of nodes: they are not joined where a policy has its points.

    Args:
        lone: only along paths that do not part in the tier.
    """
    stack = [iter(node.children.values())]
    while stack:
        child = next(stack[-1], None)
        if child is None:
            stack.pop()
            continue
        if tier in child.slots:
            yield child
        elif tier in child.held and (not lone or child.held[tier].num_children == 1):
            stack.append(iter(child.children.values()))

"""The prefix tree: which token prefixes are known, and which of them a request can resume from.

Edges are token spans. A node is *known* (tokens only) or *cached* (it lists the pages that overlap its span);
everything above a cached node is cached. A checkpoint stands at its node's end. A model with recurrent layers
resumes where a checkpoint stands; a model without resumes at any grain multiple whose pages are cached.

The tree holds one count on every frame and slot that a node lists, as any other holder does. A page that
two nodes share (a split inside it) is counted twice. Only offsets below a node's end are promised in its last
page: the row that filled it may go on writing behind that, everybody else copies the page first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_jax.cache.census import count_nodes
from hybrid_jax.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from hybrid_jax.cache.frames import FrameAllocator
from hybrid_jax.cache.node import Match, Node, common_prefix_len, describe_tree
from hybrid_jax.cache.pages import Page, PageHolds
from hybrid_jax.cache.slots import SlotTable
from hybrid_jax.cache.stats import CacheCounters


class RadixTree:
    """Prefix cache over a `FrameAllocator` and a `SlotTable`; knows nothing of rows or steps.

    Args:
        frames, slots: the pools; the tree is one holder among others.
        grain: tokens between positions where checkpoints may lie.
        page_tokens: tokens of a page; 0 for a model without attention, whose nodes list no pages.
        needs_slots: the model has recurrent layers, so resuming takes a checkpoint.
        policy: orders the eviction candidates; least recently used when None.
        max_known_nodes, max_known_tokens: bounds on what is known but not cached and needed by nobody.
    """

    def __init__(
        self,
        frames: FrameAllocator,
        slots: SlotTable,
        *,
        grain: int,
        page_tokens: int,
        needs_slots: bool,
        policy: EvictionPolicy | None = None,
        max_known_nodes: int = 4096,
        max_known_tokens: int = 1 << 22,
    ):
        self.grain, self.page_tokens, self.needs_slots = grain, page_tokens, needs_slots
        self.max_known_nodes, self.max_known_tokens = max_known_nodes, max_known_tokens
        self.counters = CacheCounters()
        self.version = 0  # changes whenever paths part in new places
        self._frames, self._slots = frames, slots
        self._candidates: EvictionPolicy = LeastRecentlyUsed() if policy is None else policy
        self._prunable = LeastRecentlyUsed()
        self._clock = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self.root = Node(np.zeros(0, np.int32), 0, pages=[])
        self.num_nodes = self.num_known_nodes = self.num_known_tokens = 0
        self._pages = PageHolds(self._frames)
        self._slot_nodes: dict[int, Node] = {}
        self._promises: dict[str, dict[int, Node]] = {}
        self.version += 1

    # --- look-up --------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, owner: str = "") -> Match:
        """Looks a prompt up without changing anything.

        Args:
            tokens: int32[n] the prompt.
            owner: whose own promises do not count as pending.
        """
        tokens = np.asarray(tokens, np.int32)
        limit = len(tokens) - 1  # one token at least is computed, to have logits
        node, position, cached_len, hit_len = self.root, 0, 0, 0
        hit, pending = self.root, None
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                break
            shared = common_prefix_len(child.tokens, tokens[position:])
            position += shared
            whole = shared == len(child.tokens)
            if child.cached:
                cached_len = position
                if not self.needs_slots:
                    resume = min(position, limit) // self.grain * self.grain
                    if resume > hit_len:
                        hit_len, hit = resume, child
                elif whole and child.slot and position <= limit:
                    hit_len, hit = position, child
            if not whole:
                break
            if position <= limit and child.promised_by - {owner}:
                pending = child
            node = child
        if pending is not None and pending.end <= hit_len:
            pending = None
        return Match(position, cached_len, hit_len, len(tokens), hit, pending)

    def acquire(self, match: Match) -> tuple[list[Page], int]:
        """Pages and slot of a match's resume point, retained for the caller; counts the look-up.

        Returns:
            The pages that overlap [0, hit_len) as frame ids, and the handle of the checkpoint (0 for none).
            The last page is shared: it must be copied before it is written when hit_len lies inside it.
        """
        counters = self.counters
        counters.lookups += 1
        counters.lookup_tokens += match.num_tokens
        counters.cached_tokens += match.cached_len
        if match.hit_len == 0:
            return [], 0
        counters.hits += 1
        counters.hit_tokens += match.hit_len
        pages: list[Page | None] = [None] * self._page_end(match.hit_len)
        missing, node = len(pages), match.node
        while node.parent is not None and missing:
            first = self._page_start(node)
            for index in range(min(first + len(node.pages), missing) - 1, first - 1, -1):
                pages[index] = self._pages.ids(node.pages[index - first])
            missing = min(missing, first)
            node = node.parent
        self._frames.retain(frame for page in pages for frame in page)
        slot = match.node.slot if self.needs_slots else 0
        if slot:
            self._slots.retain(slot)
        self._touch(match.node)
        return pages, slot

    # --- knowing: announcements and promises ----------------------------------------------------

    def announce(self, tokens: np.ndarray) -> Node:
        """Makes a prompt known that will be computed; the node at its end stays until `conclude`."""
        node = self._descend(np.asarray(tokens, np.int32))
        node.num_announced += 1
        self.version += 1
        if node.cached:
            self._refresh(node)
        else:
            self._touch(node)
        self._prune()
        return node

    def conclude(self, node: Node) -> None:
        """Ends one announcement at this node: its prompt is computed, or nobody wants it any more."""
        node.num_announced -= 1
        self._tidy(node)

    def partings(self, node: Node) -> tuple[list[int], list[int]]:
        """Where the path to an announced node parts, and where other announced prompts end on it."""
        branches, ends = [], []
        node = node.parent
        while node is not None and node.parent is not None:
            if len(node.children) > 1:
                branches.append(node.end)
            if node.num_announced:
                ends.append(node.end)
            node = node.parent
        return branches, ends

    def promise(self, owner: str, node: Node, position: int) -> None:
        """Marks `position` on the path to `node` as one that `owner` is about to fill.

        Nothing happens where a checkpoint stands already.
        """
        while node.start >= position:
            node = node.parent
        if node.end > position:
            node = self._split(node, position - node.start)
        if not node.slot:
            node.promised_by.add(owner)
            self._promises.setdefault(owner, {})[position] = node
        self._refresh(node)
        self._tidy(node)

    def withdraw(self, owner: str) -> None:
        """Takes back whatever `owner` has promised and not filled."""
        for node in self._promises.pop(owner, {}).values():
            node.promised_by.discard(owner)
            self._tidy(node)

    def pin(self, node: Node) -> None:
        """Keeps a node's pages and checkpoint from eviction until `unpin`."""
        node.pins += 1
        self._refresh(node)

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        assert node.pins >= 0, f"radix: node ending at {node.end} unpinned more often than pinned"
        self._tidy(node)

    # --- filling and forgetting -----------------------------------------------------------------

    def fill(self, tokens: np.ndarray, pages: Sequence[Page], slot: int = 0) -> Node:
        """Caches a prefix up to a resume point; takes its own counts on what it adopts.

        Spans that are cached already keep their pages, and a checkpoint that stands already stays; the caller
        keeps its own holds either way.

        Args:
            tokens: int32[n] the prefix; n is a multiple of grain.
            pages: the pages that overlap [0, n), or more, as frame ids.
            slot: handle of the checkpoint at n; 0 for a model without recurrent layers.

        Raises:
            ValueError: n is off the grain, pages are missing, or a hybrid brings no checkpoint.
        """
        tokens = np.asarray(tokens, np.int32)
        length = len(tokens)
        if length == 0 or length % self.grain or bool(slot) != self.needs_slots:
            raise ValueError(
                f"RadixTree: a resume point is a positive multiple of grain {self.grain} "
                f"{'with' if self.needs_slots else 'without'} a checkpoint, got {length} tokens "
                f"and slot {slot:#x}"
            )
        if len(pages) < self._page_end(length):
            raise ValueError(
                f"RadixTree: {length} tokens need {self._page_end(length)} pages, got {len(pages)}"
            )
        node = self._descend(tokens)
        path = node.path()
        for part in path:
            if not part.cached:
                self._adopt(part, pages)
            if not self.needs_slots:
                self._fulfil(part)
        if slot:
            self._fulfil(node)
            if not node.slot:
                self._slots.retain(slot)
                node.slot = slot
                self._slot_nodes[slot] = node
                self.counters.inserted_checkpoints += 1
        self._touch(node)
        for part in path:
            if part.parent is not None:
                self._tidy(part)
        self._prune()
        return node

    def _adopt(self, node: Node, pages: Sequence[Page]) -> None:
        """Gives a known node the row's pages that overlap it, with counts of its own."""
        own = pages[self._page_start(node) : self._page_end(node.end)]
        node.pages = self._pages.adopt(own)
        node.parent.num_cached_children += 1
        self.num_known_nodes -= 1
        self.num_known_tokens -= len(node.tokens)
        self.counters.inserted_tokens += len(node.tokens)
        self._refresh(node.parent)
        self._refresh(node)

    def _fulfil(self, node: Node) -> None:
        for owner in node.promised_by:
            del self._promises[owner][node.end]
        node.promised_by.clear()

    def make_room(self, num_frames: int, num_slots: int = 0) -> bool:
        """Evicts until so many frames and slots are free; False when nothing more can go.

        Nodes whose memory rows hold as well are passed over: dropping them would free nothing.
        """
        passed = []
        while self._frames.num_free < num_frames or self._slots.num_free < num_slots:
            node = self._candidates.pop()
            if node is None:
                break
            if self._frees_something(node):
                self._evict(node)
            else:
                passed.append(node)
        for node in passed:
            if node.parent is not None:
                self._refresh(node)
        self._prune()
        return self._frames.num_free >= num_frames and self._slots.num_free >= num_slots

    def evict(self, num_frames: int) -> int:
        """Evicts the least valuable entries until `num_frames` more frames are free; returns how many."""
        before = self._frames.num_free
        self.make_room(before + num_frames)
        return self._frames.num_free - before

    def _frees_something(self, node: Node) -> bool:
        """Evicting this node, or it and then what it shares pages with, returns memory to the pools."""
        if node.slot and self._slots.holders(node.slot) == 1:
            return True
        if node.num_cached_children:
            return False
        if not node.pages:
            return not node.slot  # nothing in the way of its parent
        return self._pages.only_ours(node.pages)

    def _evict(self, node: Node) -> None:
        if node.num_cached_children:
            self.counters.tombstone_evictions += 1
            self._drop_slot(node)
        else:
            self.counters.leaf_evictions += 1
            parent = node.parent
            self._drop_slot(node)
            self._drop_pages(node)
            self._tidy(parent)
        self._tidy(node)

    def disown(self, slot: int) -> bool:
        """Gives a checkpoint back so that its other holder may overwrite it; False if it is not here."""
        node = self._slot_nodes.get(slot)
        if node is None:
            return False
        self.counters.disowned_checkpoints += 1
        self._drop_slot(node)
        self._tidy(node)
        return True

    def _drop_slot(self, node: Node) -> None:
        if node.slot:
            self._slots.release(node.slot)
            del self._slot_nodes[node.slot]
            node.slot = 0

    def _drop_pages(self, node: Node) -> None:
        """Makes a cached node without cached children a known one."""
        self._pages.release(node.pages)
        node.pages = None
        node.parent.num_cached_children -= 1
        self.num_known_nodes += 1
        self.num_known_tokens += len(node.tokens)

    def reset(self) -> None:
        """Forgets everything, announcements and promises too, and releases what the tree holds."""
        for node in self.root.walk():
            if node.parent is not None:
                self._candidates.discard(node)
                self._prunable.discard(node)
                if node.slot:
                    self._slots.release(node.slot)
                if node.pages:
                    self._pages.release(node.pages)
                node.parent = None
        self._start_empty()

    # --- structure ------------------------------------------------------------------------------

    def _descend(self, tokens: np.ndarray) -> Node:
        """The node that ends exactly at the end of `tokens`, made by splitting or as a known leaf."""
        node, position = self.root, 0
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                return self._attach(node, tokens[position:].copy())
            shared = common_prefix_len(child.tokens, tokens[position:])
            node = child if shared == len(child.tokens) else self._split(child, shared)
            position += shared
        return node

    def _attach(self, parent: Node, tokens: np.ndarray) -> Node:
        self._clock += 1
        node = Node(tokens, parent.end, parent=parent, last_use=self._clock)
        parent.children[int(tokens[0])] = node
        self.num_nodes += 1
        self.num_known_nodes += 1
        self.num_known_tokens += len(tokens)
        self._refresh(node)
        self._tidy(parent)
        return node

    def _split(self, node: Node, offset: int) -> Node:
        """Puts a new node above, ending `offset` tokens into this one; both list a page that the cut hits."""
        upper = Node(
            node.tokens[:offset], node.start, parent=node.parent, last_use=node.last_use,
            num_cached_children=int(node.cached),
        )  # fmt: skip
        node.parent.children[int(upper.tokens[0])] = upper
        upper.children[int(node.tokens[offset])] = node
        node.parent, node.tokens, node.start = upper, node.tokens[offset:], upper.end
        self.num_nodes += 1
        if node.cached:
            first = self._page_start(upper)
            upper.pages = node.pages[: self._page_end(upper.end) - first]
            node.pages = node.pages[self._page_start(node) - first :]
            if self.page_tokens and upper.end % self.page_tokens:
                self._pages.share(upper.pages[-1:])
        else:
            self.num_known_nodes += 1
        self._refresh(upper)
        self._refresh(node)
        return upper

    def _merge(self, node: Node) -> None:
        """Joins a node into its only child, which keeps its identity; of a shared page the child's stays."""
        (child,) = node.children.values()
        if node.cached:
            cut = self.page_tokens and node.end % self.page_tokens
            if cut:
                self._pages.release(node.pages[-1:])
            child.pages = (node.pages[:-1] if cut else node.pages) + child.pages
        else:
            self.num_known_nodes -= 1
        child.tokens = np.concatenate((node.tokens, child.tokens))
        child.start, child.parent = node.start, node.parent
        child.last_use = max(child.last_use, node.last_use)
        node.parent.children[int(child.tokens[0])] = child
        self._leave(node)
        self._refresh(child)

    def _leave(self, node: Node) -> None:
        self._candidates.discard(node)
        self._prunable.discard(node)
        node.parent = None
        self.num_nodes -= 1

    def _tidy(self, node: Node) -> None:
        """Restores the canonical form from here upward: no useless pages, no needless boundary."""
        while node is not None and node.parent is not None:
            parent, changed = node.parent, False
            useless = (
                self.needs_slots and node.cached and not node.slot and not node.num_cached_children
            )
            if useless and not node.pins:
                self._drop_pages(node)
                self._refresh(parent)
                changed = True
            if self._mergeable(node):
                self._merge(node)
                changed = True
            else:
                self._refresh(node)
            if not changed:
                break
            node = parent

    def _mergeable(self, node: Node) -> bool:
        if len(node.children) != 1 or node.slot or node.needed:
            return False
        (child,) = node.children.values()
        return child.cached == node.cached

    def _prune(self) -> None:
        """Forgets known spans that nobody needs, oldest first, down to the bounds."""
        while (
            self.num_known_nodes > self.max_known_nodes
            or self.num_known_tokens > self.max_known_tokens
        ):
            node = self._prunable.pop()
            if node is None:
                return
            parent = node.parent
            del parent.children[int(node.tokens[0])]
            self.num_known_nodes -= 1
            self.num_known_tokens -= len(node.tokens)
            self.counters.pruned_nodes += 1
            self._leave(node)
            self._refresh(parent)
            self._tidy(parent)

    def _refresh(self, node: Node) -> None:
        """Puts the node into the candidate sets it belongs to now, and out of the others."""
        if node.parent is None:
            return
        if self._is_candidate(node):
            self._candidates.add(node)
        else:
            self._candidates.discard(node)
        if self._is_prunable(node):
            self._prunable.add(node)
        else:
            self._prunable.discard(node)

    def _is_candidate(self, node: Node) -> bool:
        if not node.cached or node.pins:
            return False
        return node.num_cached_children == 0 or (node.num_cached_children == 1 and node.slot != 0)

    def _is_prunable(self, node: Node) -> bool:
        return not (node.cached or node.children or node.needed)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_use = self._clock
        self._refresh(node)

    # --- pages ----------------------------------------------------------------------------------

    def _page_start(self, node: Node) -> int:
        return node.start // self.page_tokens if self.page_tokens else 0

    def _page_end(self, length: int) -> int:
        return -(-length // self.page_tokens) if self.page_tokens else 0

    # --- looking at it --------------------------------------------------------------------------

    def frame_holds(self) -> dict[int, int]:
        """Counts the tree holds per frame, for pages; a checkpoint's frames belong to its slot."""
        return self._pages.as_dict()

    def slot_holds(self) -> list[int]:
        """Handles of the checkpoints the tree holds."""
        return list(self._slot_nodes)

    def describe(self, *, max_nodes: int = 200) -> str:
        """An indented picture of the tree."""
        return describe_tree(self.root, max_nodes=max_nodes)

    def __repr__(self) -> str:
        return (
            f"RadixTree({self.num_nodes} nodes, {len(self._slot_nodes)} checkpoints, "
            f"{len(self._pages)} page frames)"
        )

    def check_invariants(self) -> None:
        """Recomputes every count and link; raises AssertionError with both numbers when they differ."""
        seen = count_nodes(self.root)
        counted = (self.num_nodes, self.num_known_nodes, self.num_known_tokens)
        found = (seen.nodes, seen.known_nodes, seen.known_tokens)
        assert counted == found, f"radix: nodes, known nodes, known tokens {counted}, has {found}"
        holds = self._pages.as_dict()
        assert holds == seen.page_holds(self._pages), (
            f"radix: counts {sum(holds.values())} page holds, nodes list {len(seen.pages)} pages"
        )
        assert seen.slots == self._slot_nodes, (
            f"radix: lists {len(self._slot_nodes)} slots, nodes have {len(seen.slots)}"
        )
        promises = {owner: held for owner, held in self._promises.items() if held}
        assert promises == seen.promises, (
            f"radix: promises by {sorted(promises)}, nodes say {sorted(seen.promises)}"
        )
        for node in self.root.walk():
            if node is not self.root:
                self._check_node(node)

    def _check_node(self, node: Node) -> None:
        span = f"[{node.start}, {node.end})"
        expected = self._page_end(node.end) - self._page_start(node)
        assert not node.cached or len(node.pages) == expected, (
            f"radix: node {span} lists {len(node.pages)} pages, overlaps {expected}"
        )
        if node.slot:
            self._slots.resolve(node.slot)
            assert node.cached and node.end % self.grain == 0, f"radix: checkpoint at {node.end}"
        elif self.needs_slots and node.cached and not node.pins:
            assert node.num_cached_children, f"radix: leaf {span} has pages, no checkpoint"
        assert not self._mergeable(node), f"radix: the boundary at {node.end} is needless"
        for name, order, belongs in (
            ("evictable", self._candidates, self._is_candidate(node)),
            ("prunable", self._prunable, self._is_prunable(node)),
        ):
            assert (node in order) == belongs, (
                f"radix: node {span} listed as {name}: {node in order}, it is: {belongs}"
            )

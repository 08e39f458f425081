"""The prefix cache: which token prefixes are known, and which of them a request can resume from.

Here is what requests and memory pressure do to the tree: look-ups, announcements and promises, filling, eviction.
Its nodes, what they list and the form it keeps are in `span_tree`; which nodes may go, and which of them first, in
`eviction`; where a checkpoint is worth making in `policy.value`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from hybrid_jax.cache.pools.counted import ByteBudget, CountedSlots
from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.pages import PageStore, RowPages
from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.eviction import Candidates, EvictionPolicy, Expected
from hybrid_jax.cache.tree.node import Ending, Loss, Match, Node, shared_len
from hybrid_jax.cache.tree.span_tree import SpanTree


@dataclass(kw_only=True)
class CacheCounters:
    """What happened in a prefix tree since it was made; `reset` of the tree keeps them.

    Attributes:
        lookups, lookup_tokens: prompts looked up at admission, and their tokens.
        hits, hit_tokens: how many resumed from a checkpoint, and the tokens that skipped.
        cached_tokens: tokens looked up whose pages were cached; the gap to hit_tokens is what no checkpoint
            covered.
        inserted_checkpoints, inserted_tokens: checkpoints adopted, and tokens whose pages were.
        leaf_evictions: nodes evicted whole, pages and checkpoint.
        tombstone_evictions: checkpoints evicted from inside a path, pages kept.
        expected_evictions: those of both that a waiting prompt would have used.
        disowned_checkpoints: checkpoints given back so that their row could fold in place.
        pruned_nodes: known but uncached spans forgotten.
    """

    lookups: int = 0
    lookup_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    cached_tokens: int = 0
    inserted_checkpoints: int = 0
    inserted_tokens: int = 0
    leaf_evictions: int = 0
    tombstone_evictions: int = 0
    expected_evictions: int = 0
    disowned_checkpoints: int = 0
    pruned_nodes: int = 0

    @property
    def token_hit_rate(self) -> float:
        """Tokens skipped per token looked up; 0.0 before the first look-up."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    @property
    def evictions(self) -> int:
        """Entries evicted, whole or their checkpoint alone."""
        return self.leaf_evictions + self.tombstone_evictions

    @property
    def lost_tokens(self) -> int:
        """Tokens looked up whose pages were cached and that were computed all the same, for want of a checkpoint."""
        return self.cached_tokens - self.hit_tokens

    def as_dict(self) -> dict[str, int | float]:
        """All counters by name, with the hit rate and the lost tokens."""
        return asdict(self) | {
            "token_hit_rate": self.token_hit_rate,
            "lost_tokens": self.lost_tokens,
        }


class RadixTree(SpanTree):
    """Prefix cache over a `FrameAllocator` and a `SlotTable`; knows nothing of rows or steps.

    Args:
        frames, slots: the pools; the tree is one holder among others.
        page_holds: the tree's side of `frames`.
        grain: tokens between positions where checkpoints may lie.
        page_tokens: tokens of a page; 0 for a model without attention, whose nodes list no pages.
        needs_slots: the model has recurrent layers, so resuming takes a checkpoint.
        policy: orders the eviction candidates; least recently used when None.
        max_known_nodes, max_known_tokens: bounds on what is known but not cached and needed by nobody.

    Attributes:
        policy: what orders the eviction candidates.
        expected: which announced prompts wait, for whom what they share is kept.
    """

    def __init__(
        self,
        frames: FrameAllocator | ByteBudget,
        slots: SlotTable | CountedSlots,
        page_holds: PageStore,
        *,
        grain: int,
        page_tokens: int,
        needs_slots: bool,
        policy: EvictionPolicy | None = None,
        max_known_nodes: int = 4096,
        max_known_tokens: int = 1 << 22,
    ):
        self.grain = grain
        self.max_known_nodes, self.max_known_tokens = max_known_nodes, max_known_tokens
        self.counters = CacheCounters()
        self.version = 0  # changes whenever paths part in new places
        self._frames = frames
        self._candidates = Candidates(policy)
        self.policy = self._candidates.evictable
        self.expected = Expected(self._candidates.refresh)
        self._promises: dict[str, dict[int, Node]] = {}
        self._num_announced = self._announced_tokens = 0
        super().__init__(
            page_holds,
            slots,
            page_tokens=page_tokens,
            needs_slots=needs_slots,
            changed=self._candidates.refresh,
        )

    # --- look-up --------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, owner: str = "", *, least: int = 1) -> Match:
        """Looks a prompt up; changes nothing.

        A model with recurrent layers resumes where a checkpoint stands; a model without resumes at any multiple of
        grain whose pages are cached.

        Args:
            tokens: int32[n] the prompt.
            owner: whose own promises do not count as pending.
            least: how many tokens are computed at least; 1 to have logits.
        """
        tokens = np.asarray(tokens, np.int32)
        limit = len(tokens) - least
        text = tokens.tobytes()
        node, position, cached_len, hit_len = self.root, 0, 0, 0
        hit, reached, pending = self.root, self.root, None
        while position < len(tokens):
            child = node.children.get(tokens.item(position))
            if child is None:
                break
            shared = shared_len(child.tokens, tokens, text, position)
            position += shared
            reached = child
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
            if child.promised_by and position <= limit and child.promised_by != {owner}:
                pending = child
            node = child
        if pending is not None and pending.end <= hit_len:
            pending = None
        return Match(position, cached_len, hit_len, len(tokens), hit, reached, pending)

    def acquire(self, match: Match) -> tuple[np.ndarray, int]:
        """Pages and slot of a match's resume point, retained for the caller; counts the look-up.

        Returns:
            The pages that overlap [0, hit_len), int32[n, frames_per_page] frame ids, and the handle of the
            checkpoint (0 for none).
            The last page is shared: it must be copied before it is written when hit_len lies inside it.
        """
        self.use(match)
        pages, slot = self.pages_to(match.node, match.hit_len), match.node.slot
        self._frames.retain(pages)
        if slot:
            self._slots.retain(slot)
        return pages, slot

    def use(self, match: Match) -> None:
        """Counts a look-up, and the resume point it found as just used."""
        counters = self.counters
        counters.lookups += 1
        counters.lookup_tokens += match.num_tokens
        counters.cached_tokens += match.cached_len
        if match.hit_len:
            counters.hits += 1
            counters.hit_tokens += match.hit_len
            self.touch(match.node)

    def touch(self, node: Node) -> None:
        """The node counts as just used, and everything above it too if the policy says so."""
        for part in node.path() if self._candidates.evictable.touches_path else [node]:
            super().touch(part)

    # --- knowing: announcements and promises ----------------------------------------------------

    def announce(self, tokens: np.ndarray) -> Node:
        """Makes a prompt known that will be computed; the node at its end stays until `conclude`."""
        node = self.descend(np.asarray(tokens, np.int32))
        node.num_announced += 1
        self._num_announced += 1
        self._announced_tokens += node.end
        self.version += 1
        if node.cached:
            self._candidates.refresh(node)
        else:
            super().touch(node)
        self._prune()
        return node

    def conclude(self, node: Node) -> None:
        """Ends one announcement at this node: its prompt is computed, or nobody wants it any more."""
        node.num_announced -= 1
        self._num_announced -= 1
        self._announced_tokens -= node.end
        self.tidy(node)
        self._prune()

    def branch_points(self, node: Node) -> tuple[list[int], list[int]]:
        """Where the path to an announced node parts, and where other announced prompts end on it."""
        above = node.path()[-2::-1]
        branches = [part.end for part in above if len(part.children) > 1]
        return branches, [part.end for part in above if part.num_announced]

    def boundary(self, node: Node, position: int) -> Node:
        """The node that ends at `position` > 0 on the path to `node`, made by splitting; `tidy` may undo it."""
        while node.start >= position:
            node = node.above
        return node if node.end == position else self.split(node, position - node.start)

    def promise(self, owner: str, node: Node, position: int) -> None:
        """Marks `position` on the path to `node` as one that `owner` is about to fill.

        Nothing happens where a checkpoint stands already.
        """
        node = self.boundary(node, position)
        if not node.slot:
            node.promised_by.add(owner)
            self._promises.setdefault(owner, {})[position] = node
        self._candidates.refresh(node)
        self.tidy(node)

    def withdraw(self, owner: str) -> None:
        """Takes back whatever `owner` has promised and not filled."""
        for node in self._promises.pop(owner, {}).values():
            node.promised_by.discard(owner)
            self.tidy(node)

    def pin(self, node: Node) -> None:
        """Keeps a node's pages and checkpoint from eviction until `unpin`."""
        node.pins += 1
        self._candidates.refresh(node)

    def unpin(self, node: Node) -> None:
        """Ends one `pin`."""
        node.pins -= 1
        assert node.pins >= 0, f"radix: node ending at {node.end} unpinned more often than pinned"
        self.tidy(node)

    # --- filling and forgetting -----------------------------------------------------------------

    def fill(self, tokens: np.ndarray, pages: RowPages, slot: int = 0) -> Node:
        """Caches a prefix up to a resume point; takes its own counts on what it adopts.

        Spans that are cached already keep their pages, and a checkpoint that stands already stays; the caller
        keeps its own holds either way.

        Args:
            tokens: int32[n] the prefix; n is a multiple of grain.
            pages: int32[n, frames_per_page] frame ids of the pages that overlap [0, n), or more; a range where
                pages are only counted.
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
        num_pages = self.num_pages(length)
        if len(pages) < num_pages:
            raise ValueError(f"RadixTree: {length} tokens need {num_pages} pages, got {len(pages)}")
        node = self.descend(tokens)
        uncached, part = [], node
        while not part.cached:
            uncached.append(part)
            part = part.above
        changed = [*uncached, part]
        for part in reversed(uncached):
            self.give_pages(part, pages)
            self.counters.inserted_tokens += len(part.tokens)
        if slot:
            self._fulfil(node)
            if not node.slot:
                self.give_checkpoint(node, slot)
                self.counters.inserted_checkpoints += 1
        else:
            promised = [part for part in node.path() if part.promised_by]
            changed += promised
            for part in promised:
                self._fulfil(part)
        self.touch(node)
        for part in reversed(changed):
            if part.parent is not None:
                self.tidy(part)
        self._prune()
        return node

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
            node = self._candidates.pop_victim()
            if node is None:
                break
            if self._frees_something(node):
                self._evict(node)
            else:
                passed.append(node)
        for node in passed:
            self._candidates.refresh(node)
        self._prune()
        return self._frames.num_free >= num_frames and self._slots.num_free >= num_slots

    def _frees_something(self, node: Node) -> bool:
        """Evicting this node, or it and then what it shares pages with, returns memory to the pools."""
        if node.slot and self._slots.holders(node.slot) == 1:
            return True
        if node.num_cached_children:
            return False
        if not len(node.pages):
            return not node.slot  # nothing in the way of its parent
        return self.page_holds.only_ours(node.pages)

    def _evict(self, node: Node) -> None:
        if node.slot or not self.needs_slots:
            whole = not node.num_cached_children
            node.lose(Loss(position=node.end, look_up=self.counters.lookups, pages=whole))
        self.counters.expected_evictions += node.num_expected > 0
        if node.num_cached_children:
            self.counters.tombstone_evictions += 1
            self.drop_checkpoint(node)
        else:
            self.counters.leaf_evictions += 1
            self.drop_all(node)

    def disown(self, slot: int) -> bool:
        """Gives a checkpoint back so that its other holder may overwrite it; False if it is not here."""
        node = self.slot_nodes.get(slot)
        if node is None:
            return False
        self.counters.disowned_checkpoints += 1
        look_ups = self.counters.lookups
        node.lose(Loss(position=node.end, look_up=look_ups, pages=False, taken_back=True))
        self.drop_checkpoint(node)
        return True

    def drop_path(self, tokens: np.ndarray, keep: int) -> None:
        """Gives up what is cached of a prefix after its first `keep` tokens, as far as nothing else hangs on it.

        Args:
            tokens: int32[n] the prefix.
            keep: how many of its first tokens are left alone.
        """
        while True:
            node = self.match(tokens).reached
            while not node.cached:
                node = node.above
            if node.end <= keep or node.num_cached_children or node.pins:
                return
            self.drop_all(node)

    def ended(self, tokens: np.ndarray, saved: int) -> None:
        """Remembers how a sequence ended, to explain what later prompts miss.

        Nothing is remembered if its first `saved` tokens are not known any more.

        Args:
            tokens: int32[n] all of them.
            saved: how many of them were put into the tree; 0 if none were.
        """
        match = self.match(tokens[: max(saved, 1)])
        if saved < len(tokens) and match.match_len >= max(saved, 1):
            match.reached.remember(Ending(saved=saved, tokens=tokens[saved:].copy()))

    def reset(self) -> None:
        """Forgets everything, announcements and promises too, and releases what the tree holds."""
        self.clear()
        self.expected = Expected(self._candidates.refresh)
        self._promises = {}
        self._num_announced = self._announced_tokens = 0
        self.version += 1

    def _prune(self) -> None:
        """Forgets known spans that nobody needs, oldest first, down to the bounds.

        An announced prompt takes at most two nodes and its own tokens, which do not count as history.
        """
        max_nodes = self.max_known_nodes + 2 * self._num_announced
        max_tokens = self.max_known_tokens + self._announced_tokens
        while self.num_known_nodes > max_nodes or self.num_known_tokens > max_tokens:
            node = self._candidates.prunable.pop()
            if node is None:
                return
            self.counters.pruned_nodes += 1
            self.forget(node)

    # --- looking at it --------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"RadixTree({self.num_nodes} nodes, {len(self.slot_nodes)} checkpoints, "
            f"{self.page_holds.num_frames} page frames)"
        )

    def check_invariants(self) -> list[Node]:
        nodes = super().check_invariants()
        promised: dict[str, dict[int, Node]] = {}
        for node in nodes:
            for owner in node.promised_by:
                promised.setdefault(owner, {})[node.end] = node
        agree(
            "radix",
            promises=({owner: held for owner, held in self._promises.items() if held}, promised),
            checkpoints_off_the_grain=([n for n in nodes if n.slot and n.end % self.grain], []),
        )
        self._candidates.check_invariants(self.root)
        self.expected.check_invariants(self.root)
        return nodes

"""The prefix cache: which token prefixes are known, and which of them a request can resume from.

Here is what requests and memory pressure do to the tree: look-ups, announcements and promises, filling, eviction.
Its nodes, what they list and the form it keeps are in `span_tree`; which nodes may go, and which of them first, in
`eviction`; where a checkpoint is worth making in `policy.value`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hybrid_jax.cache.pools.pages import NOWHERE, RowPages
from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.tree.eviction import EvictionPolicy, Expected, LeastRecentlyUsed
from hybrid_jax.cache.tree.node import ARENA, Ending, Found, Loss, Match, Node, shared_len
from hybrid_jax.cache.tree.span_tree import SpanTree
from hybrid_jax.cache.tree.tier import CacheCounters, Tier

Sink = Callable[["RadixTree", Node, int], None]


def drop(tree: RadixTree, node: Node, tier: int) -> None:
    """A sink that keeps nothing: what a tier evicts is gone."""


class RadixTree(SpanTree):
    """Prefix cache over tiers of pages and checkpoints; knows nothing of rows or steps.

    Args:
        tiers: where pages and checkpoints live; the first is the arena.
        grain: tokens between positions where checkpoints may lie.
        needs_slots: the model has recurrent layers, so resuming takes a checkpoint.
        sink: called as `sink(tree, node, tier)` before an eviction takes a node's entry out of a tier: its checkpoint
            and, where nothing in the tier lies below, its pages. All of it is still in place, and so are the pages
            above. What the sink wants to keep it copies or takes holds of its own on. It may put copies into other
            tiers (`fill`), at once or later; it leaves this tier and the announcements alone.
        max_known_nodes, max_known_tokens: bounds on what is known but not cached and needed by nobody.

    Attributes:
        sink: as given.
        expected: which announced prompts wait, for whom what they share is kept.
        prunable: known leaves that nobody needs, the oldest first.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        grain: int,
        needs_slots: bool,
        sink: Sink = drop,
        max_known_nodes: int = 4096,
        max_known_tokens: int = 1 << 22,
    ):
        self.grain, self.sink = grain, sink
        self.max_known_nodes, self.max_known_tokens = max_known_nodes, max_known_tokens
        self.version = 0  # changes whenever paths part in new places
        self.expected = Expected(self._refresh)
        self.prunable = LeastRecentlyUsed()
        self._orders = [tier.candidates.refresh for tier in tiers]
        self._promises: dict[str, dict[int, Node]] = {}
        self._num_announced = self._announced_tokens = 0
        super().__init__(tiers, needs_slots=needs_slots, changed=self._refresh)

    @property
    def policy(self) -> EvictionPolicy:
        """What orders the eviction candidates of the arena."""
        return self.arena.policy

    @property
    def counters(self) -> CacheCounters:
        """What happened in the arena, and to known spans."""
        return self.arena.counters

    def _refresh(self, node: Node) -> None:
        """Puts a node where it belongs now, among the candidates of every tier and among what may be pruned."""
        for refresh in self._orders:
            refresh(node)
        if node.held:
            if node in self.prunable.candidates:
                self.prunable.discard(node)
        elif _is_prunable(node):
            self.prunable.add(node)
        else:
            self.prunable.discard(node)

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
        path, position, pending = self._walk(tokens, owner, limit)
        found = tuple([self._found(tier.number, path, position, limit) for tier in self.tiers])
        if pending is not None and pending.end <= found[ARENA].hit_len:
            pending = None
        return Match(position, len(tokens), found, path[0], pending)

    def reach(self, tokens: np.ndarray) -> tuple[Node, int]:
        """The node that a prompt's match ends in, and how many of its leading tokens are known, cached or not."""
        path, position, _ = self._walk(np.asarray(tokens, np.int32))
        return path[0], position

    def _walk(
        self, tokens: np.ndarray, owner: str = "", limit: int = 0
    ) -> tuple[list[Node], int, Node | None]:
        """The nodes that a prompt runs through, the deepest first and the root last, and how far it does.

        With them comes the deepest node up to `limit` that somebody but `owner` has promised to fill.
        """
        text = tokens.tobytes()
        node, position, path = self.root, 0, [self.root]
        pending: Node | None = None
        while position < len(tokens):
            child = node.children.get(tokens.item(position))
            if child is None:
                break
            shared = shared_len(child.tokens, tokens, text, position)
            position += shared
            path.append(child)
            if shared < len(child.tokens):
                break
            if child.promised_by and position <= limit and child.promised_by != {owner}:
                pending = child
            node = child
        path.reverse()
        return path, position, pending

    def _found(self, tier: int, path: list[Node], match_len: int, limit: int) -> Found:
        """What a tier has of a prompt that matches a path; the path's deepest node comes first, the root last."""
        cached_len, reach = 0, min(limit, match_len)
        for node in path:
            if tier in node.held:
                cached_len = min(node.end, match_len)
                break
        if self.needs_slots:
            for node in path:
                if tier in node.slots and node.end <= reach and self.readable(node, tier):
                    return Found(cached_len, node.end, node)
            return Found(cached_len, 0, self.root)
        hit_len = max(0, min(cached_len, limit)) // self.grain * self.grain
        hit_len = self.deepest(node.around(hit_len), hit_len, self.grain, tier)
        return Found(cached_len, hit_len, node.around(hit_len))

    def acquire(self, match: Match) -> tuple[np.ndarray, int]:
        """Pages and slot of a match's resume point in the arena, retained for the caller; counts the look-up.

        Returns:
            The pages that overlap [0, hit_len), int32[n, frames_per_page] frame ids, and the handle of the
            checkpoint (0 for none). A page is 0 in the frames of layers that do not see so far back.
            The last page is shared: it must be copied before it is written when hit_len lies inside it.
        """
        self.use(match)
        pages, slot = self.pages_to(match.node, match.hit_len), match.node.slots.get(ARENA, 0)
        self.arena.frames.retain(self.arena.pages.given(pages))
        if slot:
            self.arena.slots.retain(slot)
        return pages, slot

    def use(self, match: Match) -> None:
        """Counts a look-up, and the resume point it found as just used."""
        counters, (cached_len, hit_len, node) = self.counters, match.found[ARENA]
        counters.lookups += 1
        counters.lookup_tokens += match.num_tokens
        counters.cached_tokens += cached_len
        if hit_len:
            counters.hits += 1
            counters.hit_tokens += hit_len
            self.touch(node)

    def touch(self, node: Node) -> None:
        """The node counts as just used, and everything above it too if the policy says so."""
        for part in node.path() if self.policy.touches_path else [node]:
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
            self._refresh(node)
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
        node = node.around(position)
        return node if node.end == position else self.split(node, position - node.start)

    def promise(self, owner: str, node: Node, position: int) -> None:
        """Marks `position` on the path to `node` as one that `owner` is about to fill.

        Nothing happens where a checkpoint stands already.
        """
        node = self.boundary(node, position)
        if not node.has_checkpoint(ARENA):
            node.promised_by.add(owner)
            self._promises.setdefault(owner, {})[position] = node
        self._refresh(node)
        self.tidy(node)

    def withdraw(self, owner: str) -> None:
        """Takes back whatever `owner` has promised and not filled."""
        for node in self._promises.pop(owner, {}).values():
            node.promised_by.discard(owner)
            self.tidy(node)

    def pin(self, node: Node) -> None:
        """Keeps a node's pages and checkpoint from eviction until `unpin`."""
        node.pins += 1
        self._refresh(node)

    def unpin(self, node: Node) -> None:
        """Ends one `pin`."""
        node.pins -= 1
        assert node.pins >= 0, f"radix: node ending at {node.end} unpinned more often than pinned"
        self.tidy(node)

    # --- filling and forgetting -----------------------------------------------------------------

    def fill(
        self, tokens: np.ndarray, pages: RowPages, slot: int = 0, *, tier: int = ARENA
    ) -> Node:
        """Puts a prefix up to a resume point into a tier; takes its own counts on what it adopts.

        Spans that the tier has already keep their pages, and a checkpoint that stands already stays; the caller
        keeps its own holds either way. Where a span lacks pages of layers with a window, it takes those of the row.

        Args:
            tokens: int32[n] the prefix; n is a multiple of grain.
            pages: int32[n, frames_per_page] frame ids of the pages that overlap [0, n), or more, 0 where they were
                given back; a range where pages are only counted.
            slot: handle of the checkpoint at n; 0 for a model without recurrent layers.
            tier: whose pools the pages and the slot are of. In the arena this counts as a use, and promises are kept.

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
        num_pages = self.tiers[tier].pages.num_pages(length)
        if len(pages) < num_pages:
            raise ValueError(f"RadixTree: {length} tokens need {num_pages} pages, got {len(pages)}")
        counters = self.tiers[tier].counters
        node = self.descend(tokens)
        missing, part = [], node
        while tier not in part.held:
            missing.append(part)
            part = part.above
        changed = [*missing, part]
        for part in reversed(missing):
            self.give_pages(part, pages, tier)
            counters.inserted_tokens += len(part.tokens)
        kept, part, first = [], node, self.tiers[tier].pages.kept_from(pages)
        while part.end > first:
            self.mend(part, pages, tier)
            kept.append(part)
            part = part.above
        changed += kept
        if tier == ARENA:
            promised = [node]
            if not slot:  # then a request resumes anywhere on the path
                promised = [part for part in node.path() if part.promised_by]
                changed += promised
            for part in promised:
                self._fulfil(part)
        if slot and not node.has_checkpoint(tier):
            self.give_checkpoint(node, slot, tier)
            counters.inserted_checkpoints += 1
        for part in kept:
            self.hollow(part, tier)
        if tier == ARENA:
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

    def make_room(self, num_frames: int, num_slots: int = 0, *, tier: int = ARENA) -> bool:
        """Evicts until so many frames and slots of a tier are free; False when nothing more can go.

        Nodes whose memory rows hold as well are passed over: dropping them would free nothing. What lies above them may
        have pages behind all windows of these rows, and some of those go last.
        """
        room, passed = self.tiers[tier], []
        while not room.has_free(num_frames, num_slots):
            node = room.candidates.pop_victim()
            if node is None:
                break
            if room.frees_something(node):
                self._evict(node, tier)
            else:
                passed.append(node)
        for node in passed:
            self._refresh(node)
        if not room.has_free(num_frames, num_slots) and self._strands(tier):
            for node, position in self._thinned(passed).items():
                if room.has_free(num_frames, num_slots):
                    break
                self._thin(node, position, tier)
        self._prune()
        return room.has_free(num_frames, num_slots)

    def _thinned(self, leaves: list[Node]) -> dict[Node, int]:
        """The nodes above leaves, and before which position nobody is likely to go on there, the upper ones first.

        Prompts go on where a leaf ends, where paths part, and where somebody needs it; an equal one goes on a grain
        before.
        """
        found: dict[Node, int] = {}
        for leaf in leaves:
            position, above = leaf.end, []
            for node in reversed(leaf.path()[:-1]):
                if len(node.children) > 1 or node.needed:
                    position = node.end
                above.append((node, position - self.grain))
                if node.pins:  # a hit lies somewhere on its span
                    position = node.start
            for node, position in reversed(above):
                found.setdefault(node, position)
        return found

    def _strands(self, tier: int) -> bool:
        """Whether nodes above others may have pages that nobody else holds and that no eviction reaches."""
        return not self.needs_slots and bool(self.tiers[tier].pages.windows)

    def thin_out(self, tier: int = ARENA) -> bool:
        """Gives up all pages of layers with a window that no eviction reaches and nobody else holds.

        That costs hits where prompts leave a path that rows go on from. So it is for a row that could not go on.

        Returns:
            Whether frames became free.
        """
        if not self._strands(tier):
            return False
        before, nodes = self.tiers[tier].frames.num_free, [*self.root.walk()]
        kept = {part for node in nodes if node.pins for part in node.path()}
        for node in nodes:
            if node not in kept:
                self._thin(node, NOWHERE, tier)
        return self.tiers[tier].frames.num_free > before

    def _thin(self, node: Node, position: int, tier: int) -> None:
        """Takes from a node what is only read by rows that go on before `position`, if that frees something.

        Pinned nodes stay as they are, and so does one that was joined with the node below meanwhile.
        """
        if node.parent is not None and node.has(tier) and not node.pins:
            if self.tiers[tier].pages.only_ours(node.held[tier].pages):
                self.release_before(node, position, tier)
                self.tidy(node)

    def _evict(self, node: Node, tier: int = ARENA) -> None:
        """Takes the entry at a node out of a tier, once the sink has been told."""
        self.sink(self, node, tier)
        counters, whole = self.tiers[tier].counters, not node.held[tier].num_children
        # It is lost to prompts only if no other tier has it.
        if list(node.slots if self.needs_slots else node.held) == [tier]:
            node.lose(Loss(position=node.end, look_up=self.counters.lookups, pages=whole))
        counters.expected_evictions += node.num_expected > 0
        if whole:
            counters.leaf_evictions += 1
            self.drop_all(node, tier)
        else:
            counters.tombstone_evictions += 1
            self.drop_checkpoint(node, tier)

    def disown(self, slot: int) -> bool:
        """Gives a checkpoint of the arena back so that its other holder may overwrite it; False if it is not here."""
        node = self.arena.slot_nodes.get(slot)
        if node is None:
            return False
        self.counters.disowned_checkpoints += 1
        look_ups = self.counters.lookups
        node.lose(Loss(position=node.end, look_up=look_ups, pages=False, taken_back=True))
        self.drop_checkpoint(node)
        return True

    def drop_path(self, tokens: np.ndarray, keep: int) -> None:
        """Gives up what any tier has of a prefix after its first `keep` tokens, as far as nothing else hangs on it.

        Args:
            tokens: int32[n] the prefix.
            keep: how many of its first tokens are left alone.
        """
        for tier in range(len(self.tiers)):
            while True:
                node, known_len = self.reach(tokens)
                while not node.has(tier):
                    node = node.above
                if min(node.end, known_len) <= keep:
                    break  # what the node has after that is another prefix's
                if node.held[tier].num_children or node.pins:
                    break
                if node.start < keep:
                    self.split(node, keep - node.start)
                self.drop_all(node, tier)

    def ended(self, tokens: np.ndarray, saved: int) -> None:
        """Remembers how a sequence ended, to explain what later prompts miss.

        Nothing is remembered if its first `saved` tokens are not known any more.

        Args:
            tokens: int32[n] all of them.
            saved: how many of them were put into the tree; 0 if none were.
        """
        node, known_len = self.reach(tokens[: max(saved, 1)])
        if saved < len(tokens) and known_len >= max(saved, 1):
            node.remember(Ending(saved=saved, tokens=tokens[saved:].copy()))

    def reset(self) -> None:
        """Forgets everything, announcements and promises too, and releases what the tree holds."""
        self.clear()
        self.expected = Expected(self._refresh)
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
            node = self.prunable.pop()
            if node is None:
                return
            self.counters.pruned_nodes += 1
            self.forget(node)

    # --- looking at it --------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"RadixTree({self.num_nodes} nodes, {len(self.arena.slot_nodes)} checkpoints, "
            f"{self.arena.pages.num_frames} page frames)"
        )

    def check_invariants(self) -> list[Node]:
        nodes = super().check_invariants()
        promised: dict[str, dict[int, Node]] = {}
        off = []
        for node in nodes:
            for owner in node.promised_by:
                promised.setdefault(owner, {})[node.end] = node
            if node.end % self.grain and node.slots:
                off.append(node)
        agree(
            "radix",
            promises=({owner: held for owner, held in self._promises.items() if held}, promised),
            checkpoints_off_the_grain=(off, []),
            prunable=(set(self.prunable.candidates), set(filter(_is_prunable, nodes))),
        )
        for tier in self.tiers:
            tier.candidates.check_invariants(self.root)
        self.expected.check_invariants(self.root)
        return nodes


def _is_prunable(node: Node) -> bool:
    return not (node.held or node.children or node.needed or node.parent is None)

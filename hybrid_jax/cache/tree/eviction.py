"""Which nodes of the prefix tree may be evicted now, and which of them goes first.

A policy orders them behind one small interface. What waiting prompts will use is known and not guessed, so it stands
apart and goes last.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.tree.node import ARENA, Node

if TYPE_CHECKING:
    from hybrid_jax.cache.tree.radix import RadixTree


class EvictionPolicy(Protocol):
    """Keeps the candidates of one tier in order; every operation is O(log n).

    The tree calls `add` when a node becomes a candidate or changes (it was used, its content grew), `discard` for any
    node that is not a candidate, `pop` to take the least valuable one out, and `forget` when a node left the tree.

    Attributes:
        tier: number of the tier, which sets it.
        leaves_only: nodes with cached children are not candidates; their checkpoints stay until the children went.
        touches_path: a use refreshes all nodes from the root, not the resume point alone.
        learns: it is told of every prompt and every end, and compares new entries with old ones. It may keep what it
            knows of a node in `Node.note`.
        candidates: each candidate, with its place in the order.
    """

    tier: int = ARENA
    leaves_only: bool = False
    touches_path: bool = False
    learns: bool = False
    candidates: dict[Node, Any]

    def add(self, node: Node) -> None:
        """Makes the node a candidate, or moves it to where it belongs now."""

    def discard(self, node: Node) -> None:
        """The node is not a candidate now; it may have been one."""

    def pop(self) -> Node | None:
        """Takes out the least valuable candidate; None when there is none."""

    def forget(self, node: Node) -> None:
        """The node left the tree for good; nothing is kept of those that did."""
        return None

    def keeps(self, node: Node) -> bool:
        """Whether the node must stay a node, because the policy knows something of its end."""
        return False

    def __contains__(self, node: Node) -> bool:
        return node in self.candidates

    def __len__(self) -> int:
        return len(self.candidates)

    def again(self) -> EvictionPolicy:
        """An empty order for another tier of the same tree: of the same kind, if this kind can be there twice.

        What is learned of nodes is shared.
        """
        return LeastRecentlyUsed()

    def asked(
        self, tree: RadixTree, end_node: Node, known_len: int, declared: Iterable[int] = ()
    ) -> Any:
        """A prompt came; only policies that learn are told. What is returned comes back with `ended`.

        Args:
            tree: where the prompt was announced.
            end_node: the node at its end.
            known_len: tokens of it that were known before.
            declared: numbers of its leading tokens that others will share, as its caller says.
        """
        return None

    def ended(self, node: Node, relation: Any) -> None:
        """A sequence ends at this node; `relation` is what `asked` made of its prompt."""
        return None


class OrderedCandidates(EvictionPolicy):
    """A set ordered by `key`, smallest first: a heap whose outdated entries are skipped when they surface.

    Attributes:
        candidates: the nodes, with the valid entry of each.
    """

    def __init__(self, key: Callable[[Node], Any]):
        self._key = key
        self._heap: list[tuple[Any, int, Node]] = []
        self.candidates: dict[Node, tuple[Any, int, Node]] = {}
        self._serial = 0

    def add(self, node: Node) -> None:
        """Inserts the node, or moves it to where its key says now."""
        key = self._key(node)
        current = self.candidates.get(node)
        if current is not None and current[0] == key:
            return
        self._serial += 1
        entry = self.candidates[node] = (key, self._serial, node)
        heapq.heappush(self._heap, entry)
        # Every use leaves an outdated entry. Once most are outdated the heap is made anew, so it stays small.
        if len(self._heap) > 64 + 2 * len(self.candidates):
            self._heap = list(self.candidates.values())
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Takes the node out if it is in."""
        self.candidates.pop(node, None)

    def first(self) -> Node | None:
        """The node with the smallest key; None when there is none."""
        heap, current = self._heap, self.candidates
        while heap:
            node = heap[0][2]
            if current.get(node) is heap[0]:
                return node
            heapq.heappop(heap)
        return None

    def pop(self) -> Node | None:
        """Removes and returns the node with the smallest key; None when there is none."""
        node = self.first()
        if node is not None:
            heapq.heappop(self._heap)
            del self.candidates[node]
        return node


class LeastRecentlyUsed(OrderedCandidates):
    """The node whose resume point was used longest ago goes first.

    Args:
        leaves_only: only the ends of paths are candidates, and a use refreshes the whole path, as in SGLang's tree.
    """

    def __init__(self, *, leaves_only: bool = False) -> None:
        super().__init__(key=attrgetter("last_use"))
        self.leaves_only = self.touches_path = leaves_only

    def again(self) -> LeastRecentlyUsed:
        return LeastRecentlyUsed(leaves_only=self.leaves_only)


class Candidates:
    """Ordered sets of a tier's nodes, kept up to date by `refresh`; a node in none of them stays.

    Args:
        policy: orders what can be evicted; least recently used when None.
        tier: the tier's number.

    Attributes:
        evictable: nodes in the tier that nobody pins: those at the end of a path there, which go whole, and those with
            one child there, whose checkpoint goes and whose pages join the child's.
        expected: those of them that waiting prompts will use, apart from the others; the last to be used is first.
    """

    def __init__(self, policy: EvictionPolicy | None = None, tier: int = ARENA):
        self.evictable: EvictionPolicy = LeastRecentlyUsed() if policy is None else policy
        self.evictable.tier = self._tier = tier
        # Of two nodes on a path, the one that fewer prompts wait for. If all go through both, the upper is useless.
        self.expected = OrderedCandidates(
            key=lambda node: (-node.expected_until, node.num_expected, node.end)
        )

    def refresh(self, node: Node) -> None:
        """Puts the node into the sets it belongs to now, and out of the others; its order may be another too."""
        if node.parent is None:
            self.evictable.forget(node)
        belongs = self._where(node)
        if belongs is not None:
            belongs.add(node)
        if belongs is not self.evictable and node in self.evictable.candidates:
            self.evictable.discard(node)
        if belongs is not self.expected and node in self.expected.candidates:
            self.expected.discard(node)

    def pop_victim(self) -> Node | None:
        """Takes out what is to be evicted next; None when nothing may go."""
        # What waiting prompts will use is known; whether anything else comes back is a guess.
        node = self.evictable.pop()
        return self.expected.pop() if node is None else node

    def _where(self, node: Node) -> EvictionPolicy | None:
        """Which set of those that are evicted from a node belongs to; None for a node that may not go."""
        held = node.held.get(self._tier)
        if held is None or node.pins or node.parent is None:
            return None
        if held.num_children:
            inside = held.num_children == 1 and not self.evictable.leaves_only
            if not (inside and node.has_checkpoint(self._tier)):
                return None
        return self.expected if node.num_expected else self.evictable

    def check_invariants(self, root: Node) -> None:
        """Asks every node below `root` anew; raises AssertionError where a set disagrees."""
        for node in root.walk():
            belongs = self._where(node)
            agree(
                f"radix: node {node}",
                evictable=(node in self.evictable, belongs is self.evictable),
                expected=(node in self.expected, belongs is self.expected),
            )


class Expected:
    """Tells the nodes of a tree which waiting prompts run through them.

    Such a node is evicted when nothing else is left, and of several the one whose last prompt comes last: what is
    used last is missed last (Belady 1966).

    Args:
        changed: called with every node that other prompts, or another number of them, wait for now.
    """

    def __init__(self, changed: Callable[[Node], None]):
        self._changed = changed
        self._prompts: dict[Node, int] = {}  # the node at their end, and how many

    def __len__(self) -> int:
        """Prompts that wait."""
        return sum(self._prompts.values())

    def add(self, end_node: Node, turn: int) -> None:
        """A prompt waits that was announced to end at `end_node`.

        Args:
            turn: its place among the waiting ones; the larger, the later it is computed.
        """
        self._prompts[end_node] = self._prompts.get(end_node, 0) + 1
        for node in end_node.path():
            node.num_expected += 1
            if node.num_expected == 1 or turn > node.expected_until:
                node.expected_until = turn
            self._changed(node)

    def remove(self, end_node: Node) -> None:
        """One of the prompts that end at `end_node` waits no longer."""
        self._prompts[end_node] -= 1
        if not self._prompts[end_node]:
            del self._prompts[end_node]
        for node in end_node.path():
            node.num_expected -= 1
            self._changed(node)

    def check_invariants(self, root: Node) -> None:
        """Counts the prompts of every node anew; raises AssertionError with both numbers when they differ."""
        found: Counter[Node] = Counter()
        for end_node, count in self._prompts.items():
            found.update(dict.fromkeys(end_node.path(), count))
        counted = {node: node.num_expected for node in root.walk() if node.num_expected}
        agree("radix", expected_prompts=(counted, found))

"""Which nodes of the prefix tree may go now: to make room, or to bound what is only known."""

from __future__ import annotations

from hybrid_jax.cache.tree.eviction import EvictionPolicy, LeastRecentlyUsed, OrderedCandidates
from hybrid_jax.cache.tree.node import Node


class Candidates:
    """Ordered sets of nodes, kept up to date by `refresh`; what is in none of them stays.

    Args:
        policy: orders what can be evicted; least recently used when None.

    Attributes:
        evictable: cached nodes that nobody pins: those at the end of a cached path, which go whole, and those with
            one cached child, whose checkpoint goes and whose pages join the child's.
        expected: those of them that waiting prompts will use, apart from the others; the last to be used is first.
        prunable: known leaves that nobody needs, the oldest first.
    """

    def __init__(self, policy: EvictionPolicy | None = None):
        self.evictable: EvictionPolicy = LeastRecentlyUsed() if policy is None else policy
        # Of two on one path: the one that fewer wait for; where all go through both, the upper is of no use.
        self.expected = OrderedCandidates(
            key=lambda node: (-node.expected_until, node.num_expected, node.end)
        )
        self.prunable = LeastRecentlyUsed()

    def refresh(self, node: Node) -> None:
        """Puts the node into the sets it belongs to now, and out of the others; its order may be another too."""
        if node.parent is None:
            self.evictable.forget(node)
        belongs = None
        if self._is_evictable(node):
            belongs = self.expected if node.num_expected else self.evictable
        for candidates in (self.evictable, self.expected):
            if candidates is belongs:
                candidates.add(node)
            else:
                candidates.discard(node)
        if _is_prunable(node):
            self.prunable.add(node)
        else:
            self.prunable.discard(node)

    def pop_victim(self) -> Node | None:
        """Takes out what is to be evicted next; None when nothing may go."""
        node = self.evictable.pop()
        return self.expected.pop() if node is None else node

    def _is_evictable(self, node: Node) -> bool:
        if node.pages is None or node.pins or node.parent is None:
            return False
        if node.num_cached_children == 0:
            return True
        inside = node.num_cached_children == 1 and node.slot != 0
        return inside and not self.evictable.leaves_only

    def check_invariants(self, root: Node) -> None:
        """Asks every node below `root` anew; raises AssertionError where a set disagrees."""
        for node in root.walk():
            evictable, expected = self._is_evictable(node), node.num_expected > 0
            for name, candidates, belongs in (
                ("evictable", self.evictable, evictable and not expected),
                ("expected", self.expected, evictable and expected),
                ("prunable", self.prunable, _is_prunable(node)),
            ):
                assert (node in candidates) == belongs, (
                    f"radix: node [{node.start}, {node.end}) listed as {name}: {node in candidates}, "
                    f"it is: {belongs}"
                )


def _is_prunable(node: Node) -> bool:
    return node.pages is None and not node.children and node.parent is not None and not node.needed

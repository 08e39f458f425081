"""Which nodes of the prefix tree may go now: to make room, or to bound what is only known."""

from __future__ import annotations

from hybrid_jax.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from hybrid_jax.cache.node import Node


class Candidates:
    """Two ordered sets of nodes, kept up to date by `refresh`; what is in neither stays.

    Args:
        policy: orders what can be evicted; least recently used when None.

    Attributes:
        evictable: cached nodes that nobody pins: those at the end of a cached path, which go whole, and those with
            one cached child, whose checkpoint goes and whose pages join the child's.
        prunable: known leaves that nobody needs, the oldest first.
    """

    def __init__(self, policy: EvictionPolicy | None = None):
        self.evictable: EvictionPolicy = LeastRecentlyUsed() if policy is None else policy
        self.prunable = LeastRecentlyUsed()

    def refresh(self, node: Node) -> None:
        """Puts the node into the sets it belongs to now, and out of the others; its order may be another too."""
        if node.parent is None:
            self.evictable.forget(node)
        if self._is_evictable(node):
            self.evictable.add(node)
        elif node in self.evictable:
            self.evictable.discard(node)
        if _is_prunable(node):
            self.prunable.add(node)
        elif node in self.prunable:
            self.prunable.discard(node)

    def _is_evictable(self, node: Node) -> bool:
        if node.parent is None or not node.cached or node.pins:
            return False
        if node.num_cached_children == 0:
            return True
        inside = node.num_cached_children == 1 and node.slot != 0
        return inside and not self.evictable.leaves_only

    def check_invariants(self, root: Node) -> None:
        """Asks every node below `root` anew; raises AssertionError where a set disagrees."""
        for node in root.walk():
            for name, candidates, belongs in (
                ("evictable", self.evictable, self._is_evictable(node)),
                ("prunable", self.prunable, _is_prunable(node)),
            ):
                assert (node in candidates) == belongs, (
                    f"radix: node [{node.start}, {node.end}) listed as {name}: {node in candidates}, "
                    f"it is: {belongs}"
                )


def _is_prunable(node: Node) -> bool:
    return node.parent is not None and not (node.cached or node.children or node.needed)

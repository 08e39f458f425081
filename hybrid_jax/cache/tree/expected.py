"""Cached prefixes that waiting prompts are going to use: what is known of the future, before any guess about it."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_jax.cache.tree.node import Node


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

    def clear(self) -> None:
        """The nodes are gone."""
        self._prompts = {}

    def check_invariants(self, root: Node) -> None:
        """Counts the prompts of every node anew; raises AssertionError with both numbers when they differ."""
        found: dict[Node, int] = {}
        for end_node, count in self._prompts.items():
            for node in end_node.path():
                found[node] = found.get(node, 0) + count
        for node in root.walk():
            assert node.num_expected == found.get(node, 0), (
                f"radix: node [{node.start}, {node.end}) is expected by {node.num_expected}, "
                f"{found.get(node, 0)} prompts wait"
            )

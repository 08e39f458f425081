"""Tells marks what the tree of one replica can resume from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from hybrid_jax.cache.tree.node import Node
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cache.tree.span_tree import Watcher
from hybrid_jax.cluster.names import prefix_names


class News(NamedTuple):
    """What changed in a tier of a replica.

    Attributes:
        what: its resume points came, went, or all tiers are empty.
        tier: its number. names: of the prefixes that end there.
    """

    what: Literal["came", "went", "emptied"]
    tier: int = 0
    names: Sequence[int] = ()


class TreeWatcher(Watcher):
    """A tree's watcher that passes on the names of resume points.

    Args:
        grain, needs_slots: of the tree.
        tell: takes the news, in the thread that changes the tree. It must not block.
    """

    def __init__(self, grain: int, *, needs_slots: bool, tell: Callable[[News], object]) -> None:
        self._grain, self._needs_slots, self._tell = grain, needs_slots, tell
        self._known: dict[tuple[int, int], list[int]] = {}  # by tier and slot

    def came(self, node: Node, tier: int) -> None:
        names = self.names(node)
        if self._needs_slots:
            self._known[tier, node.slots[tier]] = names
        self._tell(News("came", tier, names))

    def went(self, node: Node, tier: int) -> None:
        names = self._known.pop((tier, node.slots[tier])) if self._needs_slots else self.names(node)
        self._tell(News("went", tier, names))

    def emptied(self) -> None:
        self._known.clear()
        self._tell(News("emptied"))

    def names(self, node: Node) -> list[int]:
        """Of the prefixes that end at a node's checkpoint, or on its span in a model without recurrent layers."""
        names = prefix_names(node.prefix(), self._grain)
        first = len(names) - 1 if self._needs_slots else node.start // self._grain
        return names[first:].tolist()


def resume_points(tree: RadixTree, tier: int) -> np.ndarray:
    """uint64[n] the names of all prefixes that a tier of a tree can resume from, counted anew."""
    watcher = TreeWatcher(tree.grain, needs_slots=tree.needs_slots, tell=lambda news: None)
    found: list[int] = []
    for node, its_tier in tree.resume_points():
        if its_tier == tier:
            found += watcher.names(node)
    return np.array(found, np.uint64)

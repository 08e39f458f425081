"""A second tier of integers below an arena: what goes from one to the other are numbers of frames."""

from __future__ import annotations

import numpy as np

from hybrid_jax.cache.tree import copies
from hybrid_jax.cache.tree.copies import Copy
from hybrid_jax.cache.tree.node import ARENA, Node
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cache.tree.tier import Tier

SECOND = 1


def second_tier(arena: Tier, num_frames: int) -> Tier:
    """An empty tier below an arena."""
    return copies.tier_below(arena, num_frames, number=SECOND)


def save(tree: RadixTree, node: Node) -> Copy | None:
    """What the arena is about to evict, on its way into the second tier."""
    wanted = copies.to_save(tree, node, SECOND)
    return wanted and copies.copy_of(tree, *wanted, source=ARENA, into=SECOND)


def load(tree: RadixTree, tokens: np.ndarray) -> Copy | None:
    """What the second tier has of a prompt beyond the arena's hit, on its way there; None if that is nothing."""
    match = tree.match(tokens)
    hit = match.found[SECOND]
    if hit.hit_len <= match.hit_len:
        return None
    node = tree.boundary(hit.node, hit.hit_len)
    tree.pin(node)
    copy = copies.copy_of(tree, node, hit.hit_len, source=SECOND, into=ARENA)
    if copy is not None:
        copies.publish(tree, copy)
    tree.unpin(node)
    return copy

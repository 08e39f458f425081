"""What a cached entry is worth: compute it spares, memory it takes."""

from __future__ import annotations

from hybrid_jax.cache.tree.node import Node
from hybrid_jax.costs import Costs


def resume_point_above(node: Node) -> int:
    """Where a request would resume if this node's entry were gone: the nearest checkpoint above, or 0.

    A node that needs no checkpoint resumes at its start without its own pages.
    """
    if not node.slot:
        return node.start
    node = node.parent
    while node.parent is not None and not node.slot:
        node = node.parent
    return node.end


def saved_flops(node: Node, costs: Costs) -> float:
    """FLOPs that resuming at this node spares, relative to the nearest resume point above it."""
    return costs.flops(node.end, start=resume_point_above(node))


def saved_tokens(node: Node) -> int:
    """Tokens that resuming at this node spares, relative to the nearest resume point above it."""
    return node.end - resume_point_above(node)


def freed_bytes(node: Node, costs: Costs) -> int:
    """Bytes that evicting this node gives back: the checkpoint alone inside a path, at its end pages as well.

    With an end go the pages above it that no other checkpoint makes use of.
    """
    checkpoint = costs.checkpoint_bytes if node.slot else 0
    if node.num_cached_children:
        return checkpoint
    top = node
    while costs.checkpoint_bytes and _useless_without(top.parent):
        top = top.parent
    return checkpoint + (node.end - top.start) * costs.kv_bytes


def _useless_without(node: Node) -> bool:
    """The node's pages go with its only cached child."""
    inside = node.parent is not None and not node.slot and not node.pins
    return inside and node.num_cached_children == 1

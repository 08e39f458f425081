"""What a cached entry is worth: compute it spares, memory it takes."""

from __future__ import annotations

from hybrid_jax.cache.node import Node
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


def freed_bytes(node: Node, costs: Costs) -> int:
    """Bytes that evicting this node gives back: checkpoint and pages of an end, the checkpoint inside a path."""
    checkpoint = costs.checkpoint_bytes if node.slot else 0
    if node.num_cached_children:
        return checkpoint
    return checkpoint + len(node.tokens) * costs.kv_bytes

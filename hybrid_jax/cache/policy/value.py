"""What is worth keeping: where a prompt should leave checkpoints, what an entry spares and what it takes.

A checkpoint costs as much memory as hundreds of tokens of KV, so a prompt makes few: one where its path parts
from another known prompt (the evidence that the prefix is shared), one where another prompt that still waits
ends, and one at its own last grain boundary, so that the same prompt sent again skips all but its tail.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_jax.cache.pools.pages import NOWHERE
from hybrid_jax.cache.tree.node import ARENA, Node
from hybrid_jax.cache.tree.span_tree import first_checkpoints
from hybrid_jax.costs import Costs


def align_down(position: int, grain: int) -> int:
    """The last grain boundary at or before `position`."""
    return position - position % grain


def same_prompt_checkpoint(prompt_len: int, grain: int) -> int:
    """The last grain boundary <= prompt_len - 1: one token at least is left to compute; 0 for none."""
    return align_down(prompt_len - 1, grain)


def wanted_checkpoints(
    *,
    prompt_len: int,
    after: int,
    grain: int,
    branch_points: Iterable[int] = (),
    prompt_ends: Iterable[int] = (),
) -> list[int]:
    """Positions where a prompt that is about to be computed shall leave a checkpoint, ascending.

    Args:
        prompt_len: tokens of the prompt.
        after: its hit length, or how far it has been computed; only later positions count.
        grain: tokens between positions where checkpoints may lie.
        branch_points: positions on its path where known prompts part, or where its caller says that they will.
        prompt_ends: positions on its path where other prompts, not yet computed, end.

    Example:
        >>> wanted_checkpoints(prompt_len=200, after=32, grain=32, branch_points=[50, 100])
        [96, 192]
    """
    last = same_prompt_checkpoint(prompt_len, grain)
    wanted = {align_down(point, grain) for point in branch_points}
    wanted |= {same_prompt_checkpoint(end, grain) for end in prompt_ends}
    wanted.add(last)
    return sorted(position for position in wanted if after < position <= last)


def resume_point_above(node: Node, tier: int = ARENA) -> int:
    """Where a request would resume if this node's entry in a tier were gone: its nearest checkpoint above, or 0.

    A node that needs no checkpoint resumes at its start without its own pages.
    """
    if not node.has_checkpoint(tier):
        return node.start
    node = node.above
    while node.parent is not None and tier not in node.slots:
        node = node.parent
    return node.end


def saved_flops(node: Node, costs: Costs, tier: int = ARENA) -> float:
    """FLOPs that resuming at this node spares, relative to the nearest resume point above it."""
    return costs.flops(node.end, start=resume_point_above(node, tier))


def saved_tokens(node: Node, tier: int = ARENA) -> int:
    """Tokens that resuming at this node spares, relative to the nearest resume point above it."""
    return node.end - resume_point_above(node, tier)


def freed_bytes(node: Node, costs: Costs, tier: int = ARENA) -> int:
    """Bytes that evicting this node from a tier gives back: the checkpoint alone inside a path, at its end pages too.

    Together with an end go the pages above it that no other checkpoint needs. With a checkpoint go the pages that only
    its windows read.
    """
    checkpoint = costs.checkpoint_bytes if node.has_checkpoint(tier) else 0
    inside = node.held[tier].num_children > 0
    if inside and not costs.windowed_bytes:
        return checkpoint
    top = node
    while costs.checkpoint_bytes and _useless_without(top.above, tier):
        top = top.above
    pages = 0 if inside else (node.end - top.start) * costs.kv_bytes
    if checkpoint and costs.windowed_bytes:
        below = min((end.end for end in first_checkpoints(node, tier)), default=NOWHERE)
        for window, size in costs.windowed_bytes:
            first, last = max(node.end - window, top.start), min(node.end, below - window)
            pages += max(last - first, 0) * size
    return checkpoint + pages


def _useless_without(node: Node, tier: int) -> bool:
    """The node's pages go with its only child in the tier."""
    if node.parent is None or node.pins or tier in node.slots:
        return False
    return node.held[tier].num_children == 1

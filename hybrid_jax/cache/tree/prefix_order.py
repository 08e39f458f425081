"""The order in which prompts that are all known are best computed: along the tree of their prefixes.

What two of them share is then computed when it is needed first, and used up before anything else comes: at any
moment the cache has to hold no more than one path of that tree, however many prompts there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hybrid_jax.cache.tree.node import common_prefix_len


@dataclass(eq=False)
class _Branch:
    """Neighbours in sorted order that share `length` tokens; `first` is the earliest of them."""

    length: int
    first: int
    members: list[_Branch] = field(default_factory=list)


def prefix_order(prompts: Sequence[np.ndarray], grain: int) -> list[int]:
    """Places of the prompts in the order to compute them: depth first through the tree of their prefixes.

    Of the branches of a node the one with the earliest prompt comes first, so prompts that share nothing keep the
    order they have.

    Args:
        prompts: int32[n] token ids each.
        grain: tokens between resume points; what is shared counts in multiples of it.

    Example:
        >>> a, b = np.zeros(64, np.int32), np.ones(64, np.int32)
        >>> prefix_order([np.append(a, 1), np.append(b, 1), np.append(a, 2), np.append(b, 2)], 32)
        [0, 2, 1, 3]
    """
    # Big-endian bytes sort as the ids do.
    keys = [np.asarray(prompt, ">i4").tobytes() for prompt in prompts]
    ranked = sorted(range(len(prompts)), key=lambda place: (keys[place], place))
    root = _Branch(-1, 0)
    path = [root]  # branches that the last prompt is in, the widest first
    for rank, place in enumerate(ranked):
        shared = 0
        if rank:
            shared = common_prefix_len(prompts[ranked[rank - 1]], prompts[place])
        _close(path, shared - shared % grain)
        # On its own branch a prompt is longer than what it shares with any other.
        path.append(_Branch(len(prompts[place]) + grain, place))
    _close(path, -1)
    return _walk(root)


def _close(path: list[_Branch], shared: int) -> None:
    """Ends the branches that share more than `shared` tokens, inside one that shares just that."""
    while path[-1].length > shared:
        branch = path.pop()
        if path[-1].length < shared:
            path.append(_Branch(shared, branch.first))
        path[-1].members.append(branch)
        path[-1].first = min(path[-1].first, branch.first)


def _walk(root: _Branch) -> list[int]:
    order, stack = [], [root]
    while stack:
        branch = stack.pop()
        if branch.members:
            stack.extend(sorted(branch.members, key=lambda member: -member.first))
        elif branch is not root:
            order.append(branch.first)
    return order

"""The order in which prompts that are all known are best computed: along the tree of their prefixes.

What two of them share is then computed when it is needed first, and used up before anything else comes: at any
moment the cache has to hold no more than one path of that tree, however many prompts there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_jax.cache.tree.node import common_prefix_len


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
    keys = [np.asarray(prompt, np.int32).tobytes() for prompt in prompts]
    order: list[int] = []
    stack = [list(range(len(prompts)))]  # groups of prompts that share all that was compared so far
    while stack:
        group = stack.pop()
        if len(group) <= 1:
            order += group
            continue
        # What the first and the last of them in sorted order share, all share.
        first, last = min(group, key=keys.__getitem__), max(group, key=keys.__getitem__)
        shared = common_prefix_len(prompts[first], prompts[last])
        shared -= shared % grain
        branches: dict[bytes | int, list[int]] = {}
        for place in group:
            following = keys[place][4 * shared : 4 * (shared + grain)]
            # A prompt that ends before the next resume point shares no more with any other.
            branch = following if len(following) == 4 * grain else place
            branches.setdefault(branch, []).append(place)
        stack += reversed(branches.values())
    return order

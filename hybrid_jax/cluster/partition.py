"""Parts prompts that are all known among replicas, along the tree of their prefixes and by their FLOPs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_jax.cache.tree.node import common_prefix_len
from hybrid_jax.cache.tree.prefix_order import prefix_order
from hybrid_jax.costs import Costs

SLACK = 0.04  # of a mean part, by which a cut may move to where prompts share less


def part(prompts: Sequence[np.ndarray], count: int, costs: Costs, grain: int) -> list[list[int]]:
    """Indices of prompts, in `count` parts of nearly the same FLOPs, each in the order of the tree of its prefixes.

    In that order every prompt shares most with the one before it, so it costs what comes after that. A cut costs what
    the prompts on its two sides share, which both parts then compute. Each cut moves a little from its even place to
    where that is least.

    Args:
        prompts: int32 each. costs, grain: of the model.

    Example:
        >>> from hybrid_jax.costs import Costs
        >>> costs = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=1)
        >>> a, b = np.full(64, 1, np.int32), np.full(64, 2, np.int32)
        >>> part([a, b, a, b], 2, costs, 32)
        [[0, 2], [1, 3]]
    """
    order = prefix_order(list(prompts), grain)
    shared = [0] + [
        common_prefix_len(prompts[before], prompts[after]) // grain * grain
        for before, after in zip(order, order[1:], strict=False)
    ]
    again: np.ndarray = np.array([costs.flops(length) for length in shared])
    whole = np.array([costs.flops(len(prompts[index])) for index in order])
    ends = np.cumsum(whole - again)
    total, cuts = float(ends[-1]) if len(order) else 0.0, [0]
    for left in range(count, 1, -1):
        begin = cuts[-1]
        # What the part computes again at its beginning comes before what is left.
        done = ends[begin - 1] - again[begin] if 0 < begin < len(order) else min(begin, 1) * total
        size = (total - done) / left
        target, slack = done + size, SLACK * size
        # The next part begins at one of these places: what comes before it is nearly the target.
        first = int(np.searchsorted(ends, target - slack)) + 1
        last = int(np.searchsorted(ends, target + slack, side="right"))
        nearest = int(np.searchsorted(ends, target)) + 1
        if (
            nearest - 1 > begin
            and target - ends[nearest - 2] < ends[min(nearest, len(ends)) - 1] - target
        ):
            nearest -= 1
        places = range(max(begin, first), min(len(order) - 1, last) + 1)
        cuts.append(
            min(places, key=lambda place: (again[place], abs(place - nearest)))
            if places
            else max(begin, min(nearest, len(order)))
        )
    cuts.append(len(order))
    return [order[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]

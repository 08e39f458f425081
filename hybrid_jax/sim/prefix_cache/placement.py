"""Where checkpoints would stand if it were known how far later prompts go along with each sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from hybrid_jax.cache.policy.value import align_down
from hybrid_jax.cache.tree.node import Node
from hybrid_jax.sim.prefix_cache.clairvoyant import Future
from hybrid_jax.sim.prefix_cache.traces import TraceRequest


def best_positions(
    overlaps: Mapping[int, float], count: int, *, start: int = 0, grain: int = 1
) -> list[int]:
    """Positions of checkpoints that leave the fewest tokens to compute, by dynamic programming.

    A prompt with an overlap of o tokens resumes at the deepest position up to o, and computes the rest again. Some
    best positions are overlaps, rounded down to the grain (arXiv 2605.05219 has the same program over all depths).
    With n different ones it takes O(n^2 count) time.

    Args:
        overlaps: how many later prompts share exactly so many leading tokens.
        count: most checkpoints.
        start: where prompts can resume already; only later positions count.
        grain: tokens between positions where checkpoints may lie.

    Returns:
        Ascending multiples of the grain; no more than are of use.

    Example:
        >>> best_positions({100: 3, 400: 2, 420: 2}, 2)
        [100, 400]
    """
    depths = np.array(sorted(o for o in overlaps if o >= start), np.int64)
    if not len(depths):
        return []
    weights = np.array([overlaps[int(depth)] for depth in depths], np.float64)
    places = np.unique([start, *(align_down(int(depth), grain) for depth in depths)])
    places = places[places >= start]
    # Weight, and weight * depth, of the overlaps below each place; of all of them at the end: [n + 1].
    bounds: np.ndarray = np.append(np.searchsorted(depths, places), len(depths))
    below = np.append(0.0, np.cumsum(weights))[bounds]
    moment = np.append(0.0, np.cumsum(weights * depths))[bounds]
    # Row i, column j: tokens to compute again of overlaps from place i up to place j, if i is the deepest of them.
    again = moment - moment[:-1, None] - places[:, None] * (below - below[:-1, None])
    again[np.arange(len(bounds)) <= np.arange(len(places))[:, None]] = np.inf
    best = again[0]  # [n + 1] of all overlaps below a place, with the checkpoints so far
    chosen: list[np.ndarray] = []  # the deepest checkpoint below each place
    for _ in range(min(count, len(places) - 1)):
        totals = best[:-1, None] + again
        last = totals.argmin(axis=0)
        chosen.append(last)
        best = np.take_along_axis(totals, last[None], axis=0)[0]
    positions, place = [], len(places)
    for last in reversed(chosen):
        place = int(last[place])
        positions.append(int(places[place]))
    return positions[::-1]


def later_overlaps(trace: Sequence[TraceRequest]) -> list[Counter[int]]:
    """How far later prompts go along with each sequence of a trace: how many share exactly so many leading tokens.

    A prompt counts for the sequence, prompt and output, that shares most with it; of equals for the latest. One token
    of it is left to compute.
    """
    future = Future(trace)
    latest: dict[Node, int] = {}  # sequence through each node
    found: list[Counter[int]] = [Counter() for _ in trace]
    for number, (path, end) in enumerate(zip(future.paths, future.prompt_ends, strict=True)):
        shared = [node for node in path if node in latest and node.end <= end]
        if shared and (overlap := min(shared[-1].end, end - 1)):
            found[latest[shared[-1]]][overlap] += 1
        latest.update(dict.fromkeys(path, number))
    return found

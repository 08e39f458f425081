"""Prompts in the order of the tree of their prefixes, against that order's definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybrid_jax.cache.tree.prefix_order import prefix_order


def by_definition(
    prompts: list[np.ndarray], places: list[int], start: int, grain: int
) -> list[int]:
    """Groups by the next `grain` tokens, each in one piece, the one with the earliest prompt first."""
    if len(places) == 1:
        return places
    groups: dict[tuple, list[int]] = {}
    for place in places:
        tokens = tuple(prompts[place][start : start + grain].tolist())
        groups.setdefault(tokens if len(tokens) == grain else (place, "alone"), []).append(place)
    ordered = []
    for members in sorted(groups.values(), key=min):
        ordered += by_definition(prompts, members, start + grain, grain)
    return ordered


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=10),
    grain=st.integers(1, 3),
)
def test_order_is_depth_first_and_by_arrival(prompts, grain):
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    expected = by_definition(arrays, list(range(len(prompts))), 0, grain) if prompts else []
    assert prefix_order(arrays, grain) == expected


def test_prompts_that_share_less_than_a_grain_keep_their_order():
    prompts = [np.array(p, np.int32) for p in ([5, 1, 1], [4, 1, 1], [5, 2, 2], [4, 2, 2])]
    assert prefix_order(prompts, 2) == [0, 1, 2, 3]
    assert prefix_order(prompts, 1) == [0, 2, 1, 3]


def test_many_prompts_inside_one_another():
    """Deeper than Python recurses."""
    prompts = [np.zeros(length, np.int32) for length in range(3000, 0, -1)]
    assert sorted(prefix_order(prompts, 1)) == list(range(3000))

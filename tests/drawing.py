"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from itertools import combinations

import pytest

EVERYTHING = os.environ.get("HYBRID_JAX_TESTS") == "all"
left_to_all = pytest.mark.left_to_all


def covering(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Few of the cases, in order, in which every value of every parameter occurs.

    Each pick has the most values that no pick before it had; of those, the most pairs of values.

    Args:
        cases: the values of each case, one for each parameter.

    Returns:
        the places of the picked cases.
    """
    left = {value for case in cases for value in enumerate(case)}
    pairs: set = set()
    picked: list[int] = []

    def news(place: int) -> tuple[int, int]:
        values = list(enumerate(cases[place]))
        return len(left.intersection(values)), len(set(combinations(values, 2)) - pairs)

    while left:
        best = max(range(len(cases)), key=news)
        picked.append(best)
        values = list(enumerate(cases[best]))
        left.difference_update(values)
        pairs.update(combinations(values, 2))
    return sorted(picked)

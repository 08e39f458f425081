"""What `make test` leaves to `make test-all`, what it always runs, and few cases in which each value occurs.

- `@left_to_all` is for tests so long that `make test-all` alone runs them. `@left_to_all("a", "b")` is for the cases
  whose names begin like that. A word that begins no case is an error of `make test-all`.
- `@spine` is for few tests that look at everything once. They run after every change; with words, those cases do.
- Of tests with many parameters a run takes few cases, in which each value occurs (`covering`).

Which of all others run is told in tests/choice.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import NoReturn

import pytest

EVERYTHING = os.environ.get("HYBRID_JAX_TESTS") == "all"
left_to_all = pytest.mark.left_to_all
spine = pytest.mark.spine
NOTHING = "nothing to check"
# Tests of which a run takes few cases.
FEW_CASES = (
    *("aot", "kernels", "schedule/test_scheduler_traffic.py", "schedule/test_windows.py"),
    *("cli/test_cli.py",),
)


def nothing_to_check(why: str) -> NoReturn:
    """Ends a test of which no cell ran: it has not passed, and `make test` counts it."""
    pytest.skip(f"{NOTHING}: {why}")


def marked(item: pytest.Item, name: str) -> bool:
    """Whether a test has a mark. A mark with words is for the cases in brackets that begin so.

    A word that ends with a digit means that number: "kinds2" is not "kinds20".
    """
    case = item.nodeid.partition("[")[2]
    words = [mark.args for mark in item.iter_markers(name)]
    return any(not given or any(begins(case, word) for word in given) for given in words)


def idle_words(items: Iterable[pytest.Item]) -> list[str]:
    """Words of marks that no case of their test begins with, each with its test: such a mark does nothing.

    Args:
        items: with every case of each of their tests.
    """
    cases: dict[str, list[str]] = {}
    words: dict[str, set[str]] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        cases.setdefault(test, []).append(case)
        marks = [mark for mark in item.own_markers if mark.name in ("spine", "left_to_all")]
        words.setdefault(test, set()).update(word for mark in marks for word in mark.args)
    return [
        f"{test}: {word!r}"
        for test, asked in words.items()
        for word in sorted(asked)
        if not any(begins(case, word) for case in cases[test])
    ]


def begins(case: str, word: str) -> bool:
    return case.startswith(word) and not re.match(r"\d\d", word[-1:] + case[len(word) :][:1])


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


def drawn(cases: Iterable[Sequence[Hashable]]) -> list:
    """Cases as `pytest.mark.parametrize` takes them: few in which every value occurs, the rest for `make test-all`."""
    cases = list(cases)
    few = set(covering(cases))
    return [
        pytest.param(*case, marks=() if place in few else left_to_all)
        for place, case in enumerate(cases)
    ]

"""The process survives random and hostile forms; `python -m tests.constraints.fuzz` prints what became of them."""

from __future__ import annotations

import pytest

from tests.constraints.fuzz import run
from tests.drawing import left_to_all


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=left_to_all)])
def test_every_form_is_followed_or_refused(count):
    counts, faults = run(0, 0, count)
    assert not faults
    assert sum(counts.values()) == count
    ways = {what.split()[0] for what, number in counts.items() if what.endswith("followed")}
    assert ways == {"json", "regex", "grammar", "choice"}

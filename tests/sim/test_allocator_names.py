"""Allocators by name: sizes of their pools, and names that mean nothing."""

from __future__ import annotations

import re

import pytest

from benchmarks.pools.names import make_published
from tests.sim.tiny import POOL as TINY


@pytest.mark.parametrize(
    ("name", "pages", "states"),
    [
        ("fixed_dual_mr05", 30, 10),
        ("fixed_dual_mr09", 6, 18),
        ("fixed_dual_mr0474", 31, 9),
        ("fixed_dual:0.25", 45, 5),
        ("fixed_dual_sglang", 31, 9),
        ("avmp_static_mr03", 42, 6),
        ("avmp_static:.3", 42, 6),
        ("avmp_dynamic_b7", 30, 10),
    ],
)
def test_a_name_gives_the_sizes_of_its_pools(name, pages, states):
    memory = make_published(name, TINY, 600)
    assert [pool.num_units for pool in memory.pools] == [pages, states]
    assert getattr(memory, "batch", None) == (7 if name.endswith("b7") else None)


@pytest.mark.parametrize(
    "name", ["", "fixed", "fixed_dual", "avmp_dynamic_b0", "avmp_dynamic_b1.5", "fixed_dual_mr5", "padded_unified "]
)  # fmt: skip
def test_an_unknown_name_is_an_error_that_lists_the_known(name):
    message = f"pool-sim: no allocator {name!r}; known are padded_unified, fixed_dual_mrXX, fixed_dual:X, "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}.*as in fixed_dual_mr05, "):
        make_published(name, TINY, 600)


@pytest.mark.parametrize(("name", "share"), [("fixed_dual:1.5", "1.5"), ("avmp_static_mr00", "0")])
def test_a_share_must_leave_something(name, share):
    message = f"pool-sim: {name}: the share of states must lie between 0 and 1, got {share}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_published(name, TINY, 600)


def test_a_share_too_small_for_one_state_is_refused():
    message = "pool-sim: fixed_dual:0.04 must leave room for one state of 30 bytes, got a share of 0.04 of 600 bytes"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make_published("fixed_dual:0.04", TINY, 600)

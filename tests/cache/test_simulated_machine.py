"""The simulated cache driven at random beside a naive model: prefixes with checkpoints, bytes counted one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.cache.shadow_machine import COSTS, POLICIES, ShadowMachine


@pytest.mark.parametrize("grain", [1, 8])
@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_simulated_cache_agrees_with_a_set_of_prefixes(kind, policy, grain):
    body = {"costs": COSTS[kind], "make_policy": staticmethod(POLICIES[policy]), "grain": grain}
    machine = type("Machine", (ShadowMachine,), body).TestCase
    machine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    machine("runTest").runTest()

"""`adaptive` driven at random with token history, beside the naive model of `test_simulated_machine`.

What is known outlives what is cached here, so where a prompt parts is told by all that was ever asked.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.tree.node import ARENA
from tests.cache.pools import is_stored
from tests.cache.shadow_machine import ShadowMachine, common, outputs, prompts
from tests.cache.weighed import COSTS, CheckedAdaptive

LEAST_BRANCH = 8  # prompts are short here


class AdaptiveMachine(ShadowMachine):
    """As the other one; `known` holds every sequence that was announced."""

    history = 10**6

    @initialize(capacity=st.sampled_from([30, 60, 120, 1000]))
    def start(self, capacity):
        self.policy = CheckedAdaptive(self.costs)
        self.cache = SimulatedCache(
            self.costs, capacity, self.policy, grain=self.grain, history_tokens=self.history,
            least_branch=LEAST_BRANCH,
        )  # fmt: skip
        self.policy.tree = self.cache.tree
        self.ends, self.asked, self.pinned, self.known = set(), [], [], set()

    @rule(prompt=prompts, output=outputs)
    def ask(self, prompt, output):
        whole = prompt + output
        self.asked.append(whole)
        hit, evicted = self.expected_hit(prompt), self.evictions
        known_len = max((common(prompt, k) for k in self.known), default=0)
        parts = self.branch_point(prompt, known_len)
        match = self.cache.tree.match(np.array(prompt, np.int32))
        found = self.cache.request(np.array(prompt, np.int32), np.array(whole, np.int32))
        assert found == match.hit_len == hit
        assert hit <= match.cached_len <= match.match_len <= match.num_tokens == len(prompt)
        last = whole[: self.align(len(whole))]
        self.known |= {prompt, last}
        if self.evictions != evicted or not self.remembers_all:
            self.ends = self.ends_in_the_tree()
        else:
            assert match.match_len == known_len
            stored = self.store(last)
            if self.costs.checkpoint_bytes and parts >= hit + LEAST_BRANCH and last:
                self.store(prompt[:parts])
            assert is_stored(self.cache, whole) == stored
        assert is_stored(self.cache, whole) == (last in self.ends_in_the_tree())

    @property
    def remembers_all(self):
        return self.history > 1000

    def store(self, prefix):
        if not prefix or num_bytes_alone(prefix, self.costs) > self.cache.capacity:
            return False
        self.ends.add(prefix)
        return True

    def branch_point(self, prompt, known_len):
        """Where the prompt leaves what is known, on the grain; 0 where it only goes on, or nothing is known."""
        others = (k for k in self.known if len(k) > known_len < len(prompt))
        return self.align(known_len) if any(common(prompt, k) == known_len for k in others) else 0

    def align(self, position):
        return position // self.grain * self.grain

    @invariant()
    def every_group_is_that_of_its_nodes(self):
        self.policy.check()

    @invariant()
    def every_checkpoint_is_a_point_and_every_point_a_life(self):
        for node in self.cache.tree.root.walk():
            assert node.note is not None or not node.has_checkpoint(ARENA)
            assert node.note is None or (node.note.life and node.parent is not None)

    @invariant()
    def what_is_known_but_not_cached_is_within_bounds(self):
        self.cache.tree.make_room(
            0
        )  # evicts nothing; forgets what the last request left beyond them
        assert self.cache.tree.num_known_tokens <= self.history


def num_bytes_alone(prefix, costs):
    return len(prefix) * costs.kv_bytes + costs.checkpoint_bytes


@pytest.mark.parametrize("grain", [1, 8])
@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("history", [10**6, 40])
def test_adaptive_agrees_with_a_set_of_prefixes(kind, history, grain):
    body = {"costs": COSTS[kind], "history": history, "grain": grain}
    machine = type("Machine", (AdaptiveMachine,), body).TestCase
    machine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
    machine("runTest").runTest()

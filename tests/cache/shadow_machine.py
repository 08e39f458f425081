"""A simulated cache beside the real one: both see the same prompts."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hybrid_jax.cache.policy.flop_aware import FlopAware, whole_prefix_efficiency
from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.policy.value import freed_bytes
from hybrid_jax.cache.tree.eviction import LeastRecentlyUsed
from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.costs import Costs
from tests.cache.pools import evict, is_stored

COSTS = {
    "hybrid": Costs(flops_per_token=10, flops_per_key=2, kv_bytes=1, checkpoint_bytes=10),
    "attention": Costs(flops_per_token=10, flops_per_key=2, kv_bytes=1, checkpoint_bytes=0),
    "recurrent": Costs(flops_per_token=10, flops_per_key=2, kv_bytes=0, checkpoint_bytes=10),
}

POLICIES = {
    "lru": lambda costs: LeastRecentlyUsed(),
    "lru of ends": lambda costs: LeastRecentlyUsed(leaves_only=True),
    "flops": lambda costs: FlopAware(1.0, costs),
    "flops of the whole prefix": lambda costs: FlopAware(
        0.5, costs, efficiency=whole_prefix_efficiency
    ),
}

# Blocks of few symbols and a tail that may look like a block's beginning: paths part and meet often, off the
# grain too.
blocks = st.lists(st.sampled_from([3, 5]), max_size=4)
prompts = st.builds(
    lambda blocks, tail, count: (
        tuple(t for block in blocks for t in (block,) * 8) + (tail,) * count
    ),
    blocks,
    st.sampled_from([3, 5, 7]),
    st.integers(1, 10),
)

outputs = st.one_of(st.just(()), st.tuples(st.sampled_from([3, 9])).map(lambda t: t * 5))


class ShadowMachine(RuleBasedStateMachine):
    """The model: `ends`, every prefix that ends in a checkpoint, or was stored where a model needs none.

    Its bytes are those of all their distinct prefixes and of the checkpoints. After an eviction the model asks the
    tree what is left; until then it says what every request hits, stores and takes.
    """

    costs, make_policy, grain = COSTS["hybrid"], POLICIES["lru"], 1

    @initialize(capacity=st.sampled_from([30, 60, 120, 1000]))
    def start(self, capacity):
        self.policy = type(self).make_policy(self.costs)
        self.cache = SimulatedCache(self.costs, capacity, self.policy, grain=self.grain)
        self.ends = set()
        self.asked = []  # prompts with their outputs
        self.pinned = []  # (prefix, node)

    # --- rules ----------------------------------------------------------------------------------

    @rule(prompt=prompts, output=outputs)
    def ask(self, prompt, output):
        self.asked.append(prompt + output)
        hit = self.expected_hit(prompt)
        evicted = self.evictions
        match = self.cache.tree.match(np.array(prompt, np.int32))
        found = self.cache.request(np.array(prompt, np.int32), np.array(prompt + output, np.int32))
        assert found == match.hit_len == hit
        assert hit <= match.cached_len <= match.match_len <= match.num_tokens == len(prompt)
        if self.evictions != evicted:
            self.ends = self.ends_in_the_tree()
            return
        stored = False
        for prefix in [*self.branches(prompt, hit), prompt + output]:
            stored = self.store(prefix[: len(prefix) // self.grain * self.grain])
        assert is_stored(self.cache, prompt + output) == stored
        assert self.checkpoints() == (self.ends if self.costs.checkpoint_bytes else set())

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), more=st.sampled_from([(), (3,), (3,) * 8, (7, 5)]), output=outputs)
    def go_on(self, data, more, output):
        """A conversation's next turn, or the same once more."""
        self.ask(data.draw(st.sampled_from(self.asked)) + more, output)

    @rule(prompt=prompts)
    def pin(self, prompt):
        match = self.cache.tree.match(np.array(prompt, np.int32))
        if match.hit_len:
            self.cache.tree.pin(match.node)
            self.pinned.append((prompt[: match.hit_len], match.node))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        index = data.draw(st.integers(0, len(self.pinned) - 1))
        self.cache.tree.unpin(self.pinned.pop(index)[1])

    @rule()
    def evict_one(self):
        """The bytes that go are those that the policies reckon with."""
        noted, pop = [], self.policy.pop
        self.policy.pop = lambda: noted.append(pop()) or self.price(noted)
        freed = evict(self.cache.tree, 1)
        del self.policy.pop
        assert freed == (noted[-1] if noted else 0)
        self.ends = self.ends_in_the_tree()

    def price(self, noted):
        node = noted.pop()
        if node is not None:
            noted.append(freed_bytes(node, self.costs))
        return node

    @rule()
    def evict_everything(self):
        self.cache.tree.make_room(self.cache.capacity)
        self.ends = self.ends_in_the_tree()
        if not self.pinned:
            assert self.cache.budget.used == 0 and self.ends == set()

    # --- the naive model ------------------------------------------------------------------------

    @property
    def evictions(self):
        counters = self.cache.tree.counters
        return counters.leaf_evictions + counters.tombstone_evictions

    def expected_hit(self, prompt):
        if self.costs.checkpoint_bytes:
            fitting = (len(p) for p in self.ends if len(p) < len(prompt) and begins(prompt, p))
            return max(fitting, default=0)
        longest = max((common(prompt, p) for p in self.ends), default=0)
        return min(longest, len(prompt) - 1) // self.grain * self.grain

    def branches(self, prompt, hit):
        """What the prompt shares with others that go on another way, and no checkpoint stands for."""
        if not self.costs.checkpoint_bytes:
            return []
        known, found = [*self.ends, prompt], set()
        for position in range(1, len(prompt)):
            here = [p for p in known if len(p) > position and begins(p, prompt[:position])]
            if len({p[position] for p in here}) > 1 and position // self.grain * self.grain > hit:
                found.add(position // self.grain * self.grain)
        return [prompt[:position] for position in sorted(found)]

    def store(self, prefix):
        """Without an eviction; False where it does not fit."""
        if not prefix:
            return False
        if num_bytes({*self.ends, prefix}, self.costs) > self.cache.capacity:
            return False
        self.ends.add(prefix)
        return True

    def ends_in_the_tree(self):
        if self.costs.checkpoint_bytes:
            return self.checkpoints()
        return {text(n) for n in self.cache.tree.root.walk() if n.parent is not None and n.cached}

    def checkpoints(self):
        return {text(node) for node in self.cache.tree.root.walk() if node.has_checkpoint(ARENA)}

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def counts_agree_and_the_budget_holds(self):
        self.cache.check_invariants()
        assert self.cache.budget.used == num_bytes(self.ends, self.costs)
        assert self.cache.budget.peak <= self.cache.capacity

    @invariant()
    def every_checkpoint_has_its_pages(self):
        for node in self.cache.tree.root.walk():
            if node.has_checkpoint(ARENA):
                assert all(part.cached for part in node.path())
                if self.costs.kv_bytes:
                    assert sum(len(part.held[ARENA].pages) for part in node.path()) == node.end

    @invariant()
    def what_is_pinned_can_be_resumed_from(self):
        for prefix, _ in self.pinned:
            found = self.cache.tree.match(np.array((*prefix, 1), np.int32))
            assert found.hit_len == len(prefix)

    @invariant()
    def efficiencies_are_those_of_the_tree_as_it_is(self):
        if isinstance(self.policy, FlopAware):
            listed = dict(self.policy.candidates)
            places = self.policy._places
            assert listed == {node: places[self.policy._level(node)] for node in listed}


def text(node):
    return tuple(token for part in node.path() for token in part.tokens.tolist())


def begins(sequence, prefix):
    return sequence[: len(prefix)] == prefix


def common(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def num_bytes(ends, costs):
    prefixes = {end[:length] for end in ends for length in range(1, len(end) + 1)}
    return len(prefixes) * costs.kv_bytes + len(ends) * costs.checkpoint_bytes

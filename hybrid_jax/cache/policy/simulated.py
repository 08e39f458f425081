"""A prefix cache without memory behind it: one request after the other, bytes counted.

The tree and the eviction are those of an engine, but tokens and checkpoints are only counted. A simulator runs a trace
through one; a tuner replays a log through several, to see what each policy is worth.
"""

from __future__ import annotations

import numpy as np

from hybrid_jax.cache.policy.value import align_down
from hybrid_jax.cache.pools.counted import ByteBudget, CountedPages, CountedSlots
from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.tree.eviction import EvictionPolicy
from hybrid_jax.cache.tree.node import Match, Node, branch_point
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cache.tree.tier import Tier
from hybrid_jax.costs import Costs

LEAST_BRANCH = 32


class SimulatedCache:
    """A prefix cache in request order: a request is finished and cached before the next is looked up.

    Args:
        costs: bytes of a token and of a checkpoint. What windows read above a checkpoint, down to the next one, counts
            as a part of it.
        capacity: bytes, never exceeded.
        policy: orders what may be evicted.
        grain: tokens between resume points; 1 makes every position one.
        history_tokens: tokens known beyond those that are cached.
        least_branch: fewest tokens that a checkpoint at a branch point must spare, for policies that learn.
    """

    def __init__(
        self,
        costs: Costs,
        capacity: int,
        policy: EvictionPolicy,
        *,
        grain: int = 1,
        history_tokens: int = 0,
        least_branch: int = LEAST_BRANCH,
    ):
        self.costs, self.capacity, self.grain = costs, capacity, grain
        self._policy, self._least_branch = policy, least_branch
        self._weighs = policy.learns
        self.budget = ByteBudget(capacity)
        self._slots = CountedSlots(self.budget, costs.checkpoint_bytes)
        pages = CountedPages(self.budget, costs.kv_bytes)
        self.tree = RadixTree(
            [Tier(self.budget, self._slots, pages, policy)],
            grain=grain,
            needs_slots=costs.checkpoint_bytes > 0,
            max_known_nodes=history_tokens,
            max_known_tokens=history_tokens,
        )

    @property
    def evictions(self) -> int:
        """Entries evicted so far."""
        return self.tree.counters.evictions

    def request(self, prompt: np.ndarray, whole: np.ndarray) -> int:
        """Looks a prompt up, caches it where it parts from known paths, then with its output at its end.

        Args:
            prompt: int32[n] ids of tokens, or of blocks of tokens.
            whole: int32[m] the prompt and its output.

        Returns:
            Tokens of the prompt that were skipped.
        """
        tree = self.tree
        match = tree.match(prompt)
        tree.use(match)
        end_node = tree.announce(prompt)
        (self._weigh if self._weighs else self._insert)(end_node, match, whole)
        tree.conclude(end_node)
        return match.hit_len

    def _insert(self, end_node: Node, match: Match, whole: np.ndarray) -> None:
        """Makes room for what is new, then caches it."""
        tree, last = self.tree, align_down(len(whole), self.grain)
        branches = tree.branch_points(end_node)[0] if self.costs.checkpoint_bytes else []
        if match.hit_len:
            tree.pin(match.node)
        for branch in sorted(align_down(branch, self.grain) for branch in branches):
            if branch > match.hit_len:
                self._store(whole[:branch])
        if last:
            self._store(whole[:last])
        if match.hit_len:
            tree.unpin(match.node)

    def _store(self, tokens: np.ndarray) -> None:
        """Caches a prefix with a checkpoint at its end, if that fits."""
        if self.costs.prefix_bytes(len(tokens)) > self.capacity:
            return
        while True:
            match = self.tree.match(tokens, least=0)
            if match.hit_len == len(tokens):
                break
            missing = len(tokens) - match.cached_len
            needed = missing * self.costs.kv_bytes + self.costs.checkpoint_bytes
            needed += self.costs.windowed(len(tokens) - match.hit_len)
            if needed <= self.budget.num_free:
                break
            if not self.tree.make_room(needed):
                return
        self._fill(tokens, match)

    def _weigh(self, end_node: Node, match: Match, whole: np.ndarray) -> None:
        """Caches what is new in the request's own memory, then evicts what is worth least, old or new."""
        tree, costs = self.tree, self.costs
        parts = branch_point(end_node, match.match_len)
        branch = 0 if parts is None else align_down(parts.end, self.grain)
        relation = self._policy.asked(tree, end_node, match.match_len)
        last = align_down(len(whole), self.grain)
        if not last:
            return
        end = tree.announce(whole[:last])
        self._policy.ended(end, relation)
        wanted = self.wanted(match.hit_len, branch, last)
        ends = [n for n in wanted if costs.prefix_bytes(n) <= self.capacity]
        branch_bytes = costs.checkpoint_bytes + costs.windowed(len(whole))
        self.budget.lend(costs.prefix_bytes(len(whole)) + branch_bytes)
        for position in ends:
            self._fill(whole[:position], tree.match(whole[:position], least=0))
        tree.make_room(0)
        self.budget.settle()
        tree.conclude(end)

    def wanted(self, hit_len: int, branch: int, last: int) -> list[int]:
        """Where a request leaves checkpoints under a policy that learns, ascending; two at most.

        Args:
            hit_len: tokens that it skipped. branch: where it parted from what was known. last: the end of its
                output. Both are multiples of the grain.
        """
        parts = self.costs.checkpoint_bytes and branch >= hit_len + self._least_branch
        return [branch, last] if parts else [last]

    def _fill(self, tokens: np.ndarray, match: Match) -> None:
        """Caches a prefix that fits, or counts it as just used where it stands; `match` is of all its tokens."""
        if match.hit_len == len(tokens):
            self.tree.touch(match.node)
            return
        slot = 0
        if self.costs.checkpoint_bytes:
            slot = self._slots.allocate(self.costs.windowed(len(tokens) - match.hit_len))
        self.tree.fill(tokens, range(len(tokens)), slot)
        if slot:
            self._slots.release(slot)

    def check_invariants(self) -> None:
        """Recounts bytes from what the nodes list; raises AssertionError with both numbers when they differ."""
        self.tree.check_invariants()
        held, tokens = self._slots.num_held, self.tree.arena.pages.num_frames
        taken = tokens * self.costs.kv_bytes + self._slots.num_bytes
        used, peak = self.budget.used, self.budget.peak
        agree(
            "simulated cache",
            checkpoints=(held, len(self.tree.arena.slot_nodes)),
            bytes=(used, taken),
        )
        assert used <= peak <= self.capacity, (
            f"simulated cache: {used} bytes used, {peak} at most, of {self.capacity}"
        )

"""A prefix cache without memory behind it: one request after the other, bytes counted.

The tree, the admission and the eviction are those of an engine; only what a token and a checkpoint take is a number
here. A simulator runs one over a trace, a tuner replays a log through several, to see what each policy is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid_jax.cache.admission import align_down
from hybrid_jax.cache.counted import ByteBudget, CountedPages, CountedSlots
from hybrid_jax.cache.eviction import EvictionPolicy
from hybrid_jax.cache.radix import RadixTree
from hybrid_jax.costs import Costs


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the cache did for one request.

    Attributes:
        num_tokens: of the prompt.
        hit_len: tokens skipped.
        match_len: leading tokens that were known, cached or not.
        cached_len: leading tokens whose KV was cached.
        stored: prompt and output are cached now.
    """

    num_tokens: int
    hit_len: int
    match_len: int
    cached_len: int
    stored: bool


class ShadowCache:
    """A prefix cache in request order: a request is finished and cached before the next is looked up.

    Args:
        costs: bytes of a token and of a checkpoint.
        capacity: bytes, never exceeded.
        policy: orders what may be evicted.
        grain: tokens between resume points; 1 makes every position one.
        history_tokens: tokens known beyond those that are cached.
    """

    def __init__(
        self,
        costs: Costs,
        capacity: int,
        policy: EvictionPolicy,
        *,
        grain: int = 1,
        history_tokens: int = 0,
    ):
        self.costs, self.capacity, self.grain = costs, capacity, grain
        self.budget = ByteBudget(capacity)
        self._slots = CountedSlots(self.budget, costs.checkpoint_bytes)
        self.tree = RadixTree(
            self.budget,
            self._slots,
            grain=grain,
            page_tokens=1 if costs.kv_bytes else 0,
            needs_slots=costs.checkpoint_bytes > 0,
            page_holds=CountedPages(self.budget, costs.kv_bytes),
            policy=policy,
            max_known_nodes=history_tokens,
            max_known_tokens=history_tokens,
        )

    def request(self, prompt: np.ndarray, output: np.ndarray) -> Outcome:
        """Looks a prompt up, caches it where it parts from known paths, then with its output at its end."""
        tree = self.tree
        match = tree.match(prompt)
        tree.use(match)
        whole = np.concatenate((prompt, output)) if len(output) else prompt
        held = match.node if match.hit_len else None
        if held is not None:
            tree.pin(held)
        anchor = tree.announce(prompt)
        if self.costs.checkpoint_bytes:
            branches, _ = tree.partings(anchor)
            for branch in sorted(align_down(branch, self.grain) for branch in branches):
                if branch > match.hit_len:
                    self._store(prompt[:branch])
        stored = self._store(whole[: align_down(len(whole), self.grain)])
        if held is not None:
            tree.unpin(held)
        tree.conclude(anchor)
        return Outcome(
            num_tokens=match.num_tokens,
            hit_len=match.hit_len,
            match_len=match.match_len,
            cached_len=match.cached_len,
            stored=stored,
        )

    def _store(self, tokens: np.ndarray) -> bool:
        """Caches a prefix with a checkpoint at its end; False where that does not fit."""
        if not len(tokens):
            return False
        tree, costs = self.tree, self.costs
        if len(tokens) * costs.kv_bytes + costs.checkpoint_bytes > self.capacity:
            return False
        while True:
            cached_len, end = tree.coverage(tokens)
            if end is not None:
                tree.touch(end)
                return True
            needed = (len(tokens) - cached_len) * costs.kv_bytes + costs.checkpoint_bytes
            if needed <= self.budget.num_free:
                break
            if not tree.make_room(needed):
                return False
        slot = self._slots.allocate() if costs.checkpoint_bytes else 0
        tree.fill(tokens, range(len(tokens)), slot)
        if slot:
            self._slots.release(slot)
        return True

    def check_invariants(self) -> None:
        """Recounts bytes from what the nodes list; raises AssertionError with both numbers when they differ."""
        self.tree.check_invariants()
        listed, held = self.tree.slot_holds(), self._slots.num_held
        assert held == len(listed), f"shadow: {held} checkpoints held, nodes list {len(listed)}"
        costs, tokens = self.costs, self.tree.num_page_frames
        num_bytes = tokens * costs.kv_bytes + held * costs.checkpoint_bytes
        used, peak = self.budget.used, self.budget.peak
        assert used == num_bytes, f"shadow: counts {used} bytes, nodes take {num_bytes}"
        assert used <= peak <= self.capacity, (
            f"shadow: {used} bytes used, {peak} at most, of {self.capacity}"
        )

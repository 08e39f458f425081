"""What the prefix cache learns from: prompts as they arrive, sequences as they end, and a log of both."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

from hybrid_jax.byte_sizes import at_least
from hybrid_jax.cache.policy.flop_aware import FlopAware
from hybrid_jax.cache.policy.request_log import RequestLog
from hybrid_jax.cache.policy.simulated import LEAST_BRANCH, SimulatedCache
from hybrid_jax.cache.policy.table import TUNED, make_policy
from hybrid_jax.cache.policy.tuner import AlphaTuner
from hybrid_jax.cache.tree.eviction import EvictionPolicy
from hybrid_jax.cache.tree.node import LookUp, Match, Node, Why, look_up_result
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.costs import Costs
from hybrid_jax.schedule.sequence import Known, Sequence

REPLAYED_PER_REQUEST = 21  # requests that the tuner replays for each new one: one for every alpha
TUNED_ON = 1024  # requests kept before the first eviction, which a large cache may never see
HISTORY_BLOCKS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class PastRequests:
    """The latest requests of an engine, to be replayed elsewhere.

    Attributes:
        log: the requests.
        blocks: what a block between two resume points costs.
        capacity: bytes of the arena that they ran on.
        others: those of the engine's replicas, each of which has an arena of this size.
    """

    log: RequestLog
    blocks: Costs
    capacity: int
    others: tuple[PastRequests, ...] = ()

    @property
    def num_requests(self) -> int:
        """How many there are."""
        return sum(len(past.log) for past in (self, *self.others))

    @property
    def hit_rate(self) -> float:
        """Tokens that were skipped per token of the prompts."""
        return self._mean(lambda past: past.log.hit_rate)

    def replay(self, policy: str, capacity: int) -> float:
        """Token hit rate of the requests under a policy, with a cache of `capacity` bytes.

        Requests of replicas are replayed each on a cache of its own.

        Raises:
            ValueError: the capacity is less than a checkpoint and its pages.
        """
        return self._mean(lambda past: past._replay(policy, capacity))

    def _mean(self, rate: Callable[[PastRequests], float]) -> float:
        """A rate of all requests, by the tokens of their prompts."""
        if not self.others:
            return rate(self)
        parts = (self, *self.others)
        tokens = [sum(request.num_tokens for request in past.log) for past in parts]
        found = sum(count * rate(past) for count, past in zip(tokens, parts, strict=True))
        return found / max(1, sum(tokens))

    def _replay(self, policy: str, capacity: int) -> float:
        grain, costs = self.log.grain, self.blocks
        least = costs.prefix_bytes(1)
        if capacity < least:
            raise ValueError(
                f"replay: memory must hold a checkpoint and its pages, {at_least(least, capacity)}"
            )
        order = make_policy(policy, costs)
        cache = SimulatedCache(
            costs,
            capacity,
            order,
            history_tokens=HISTORY_BLOCKS,
            least_branch=max(1, LEAST_BRANCH // grain),
        )
        tuner = _tuner(costs, order, capacity, pace=None) if policy in TUNED else None
        hit = 0
        for request in self.log:
            hit += cache.request(request.prompt, request.whole) * grain
            if tuner is not None:
                tuner.observe(request.prompt, request.whole, evictions=cache.evictions)
        return hit / max(1, sum(request.num_tokens for request in self.log))


def _tuner(blocks: Costs, order: EvictionPolicy, capacity: int, pace: int | None) -> AlphaTuner:
    assert isinstance(order, FlopAware), f"history: {order} has no alpha to tune"
    replay = lambda other: SimulatedCache(blocks, capacity, other)
    return AlphaTuner(order, replay, pace=pace, max_before=TUNED_ON)


class History:
    """Tells a tree's policy what happens, and keeps a log for replays.

    Args:
        tree: the engine's prefix tree.
        policy: name of the tree's policy.
        grain: tokens between resume points.
        costs: the model's costs.
        capacity: bytes of the arena.

    Attributes:
        capacity: bytes of the arena.
        log: the latest finished requests.
        tuner: tunes alpha, for policies that need it; None for others.
    """

    def __init__(self, tree: RadixTree, policy: str, *, grain: int, costs: Costs, capacity: int):
        self._tree, self._policy = tree, policy
        self._learns = tree.policy.learns
        self.log = RequestLog(grain)
        self.tuner: AlphaTuner | None = None
        self.capacity, self._blocks = capacity, costs.per_block(grain)
        if policy in TUNED:
            order = make_policy(policy, self._blocks)
            self.tuner = _tuner(self._blocks, order, capacity, pace=REPLAYED_PER_REQUEST)

    def announce(self, sequence: Sequence) -> Node:
        """Makes a prompt known. A policy that learns is told once, and for one of several siblings only."""
        tree, request = self._tree, sequence.request
        if sequence.known is not None:
            return tree.announce(sequence.prompt)
        (_, length), relation = tree.reach(sequence.prompt), None
        end_node = tree.announce(sequence.prompt)
        if self._learns and request.sample_index == 0:
            relation = tree.policy.asked(tree, end_node, length, request.cache_breakpoints)
        sequence.known = Known(length, relation)
        return end_node

    def explain(
        self,
        sequence: Sequence,
        match: Match | None,
        hit_len: int,
        *,
        loaded: int = 0,
        loaded_from: str = "",
    ) -> LookUp:
        """What was known of the prompt of a sequence that starts after a prefix, and why it hit no further.

        Args:
            match: its look-up, or None. hit_len, loaded, loaded_from: as in `LookUp`.
        """
        known_len = sequence.known.length if sequence.known is not None else 0
        if match is None:
            return LookUp(match_len=known_len, hit_len=hit_len, why=Why.ASKED_FOR)
        found = look_up_result(
            match,
            hit_len,
            loaded=loaded,
            loaded_from=loaded_from,
            slower=sequence.queued.slower,
            prompt=sequence.prompt,
            known_len=known_len,
            grain=self.log.grain,
            needs_slots=self._tree.needs_slots,
            look_ups=self._tree.counters.lookups,
            policy=self._policy,
        )
        if found.why is Why.COMPLETE and sequence.request.first_read is not None:
            return replace(found, why=Why.ASKED_FOR)  # it resumed where it may at most
        return found

    def so_far(self) -> PastRequests:
        """The log as it is now, whatever the engine does meanwhile."""
        return PastRequests(log=copy(self.log), blocks=self._blocks, capacity=self.capacity)

    def ended(self, sequence: Sequence, node: Node | None, *, saved: int | None) -> None:
        """Notes that a sequence ended for good; what it computed is cached down to `node`, its first `saved` tokens.

        Args:
            saved: None if nothing of it is to be reused.

        Of several siblings only the first is logged: they forked from one prompt, which was computed or hit once.
        """
        request, tree = sequence.request, self._tree
        if sequence.real_position < sequence.goal:
            return  # aborted before its prompt was computed, so there is no end to go on from
        if saved is not None:
            tree.ended(sequence.first_tokens(len(sequence.tokens)), saved)
        if node is not None and sequence.known is not None and sequence.known.relation is not None:
            tree.policy.ended(node, sequence.known.relation)
        if request.sample_index:
            return
        computed = sequence.first_tokens(sequence.real_position)
        logged = self.log.note(computed, len(request.prompt), request.hit.num_tokens)
        if self.tuner is not None and not self.tuner.tuned:
            evictions = tree.counters.evictions
            self.tuner.observe(logged.prompt, logged.whole, evictions=evictions)
            for tier in tree.tiers:
                assert isinstance(tier.policy, FlopAware), f"history: {tier.policy} has no alpha"
                tier.policy.alpha = self.tuner.policy.alpha

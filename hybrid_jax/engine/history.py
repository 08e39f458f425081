"""What the prefix cache learns from: prompts as they come, sequences as they end, and a log of both."""

from __future__ import annotations

import numpy as np

from hybrid_jax.cache.flop_aware import FlopAware
from hybrid_jax.cache.node import Node
from hybrid_jax.cache.radix import RadixTree
from hybrid_jax.cache.request_log import RequestLog
from hybrid_jax.cache.shadow import ShadowCache
from hybrid_jax.cache.tuner import AlphaTuner
from hybrid_jax.costs import Costs
from hybrid_jax.engine.sequence import Sequence

REPLAYED_PER_REQUEST = 21  # by the tuner: one for every alpha


class History:
    """Tells a tree's policy what happens, and keeps a log for replays.

    Args:
        tree: of the engine.
        policy: its name.
        grain: tokens between resume points.
        costs: of the model.
        capacity: bytes of the arena.

    Attributes:
        log: the latest finished requests.
        tuner: of alpha, for the policies that have it tuned; None otherwise.
    """

    def __init__(self, tree: RadixTree, policy: str, *, grain: int, costs: Costs, capacity: int):
        self._tree = tree
        self._learns = hasattr(tree.policy, "asked")
        self.log = RequestLog(grain)
        self.tuner: AlphaTuner | None = None
        if policy in ("marconi", "marconi-code"):
            blocks = costs.per_block(grain)
            replay = lambda order: ShadowCache(blocks, capacity, order)
            order: FlopAware = tree.policy
            per_block = FlopAware(0.0, blocks, efficiency=order.efficiency)
            self.tuner = AlphaTuner(per_block, replay, pace=REPLAYED_PER_REQUEST)

    def announce(self, sequence: Sequence) -> Node:
        """Makes a prompt known; a policy that learns hears of it once, and of one sibling alone."""
        tree = self._tree
        first = sequence.relation is None and sequence.request.sample_index == 0
        if not (self._learns and first):
            return tree.announce(sequence.prompt)
        known_len = tree.match(sequence.prompt).match_len
        anchor = tree.announce(sequence.prompt)
        sequence.relation = tree.policy.asked(tree, anchor, known_len)
        return anchor

    def ended(self, sequence: Sequence, node: Node | None) -> None:
        """A sequence ended for good; what it computed is cached down to `node`."""
        request, tree = sequence.request, self._tree
        if node is not None and sequence.relation is not None:
            tree.policy.ended(node, sequence.relation)
        output = sequence.tokens[sequence.goal : max(sequence.goal, sequence.real_position)]
        computed = np.concatenate((sequence.prompt, np.array(output, np.int32)))
        logged = self.log.note(computed, len(request.prompt), request.num_cached_tokens)
        if self.tuner is not None and not self.tuner.tuned:
            counters = tree.counters
            evictions = counters.leaf_evictions + counters.tombstone_evictions
            self.tuner.observe(logged.prompt, logged.whole, evictions=evictions)
            tree.policy.alpha = self.tuner.policy.alpha

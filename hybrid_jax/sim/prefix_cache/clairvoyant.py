"""Eviction that knows the future: a lower bound of what the best possible policy would hit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.policy.value import freed_bytes, saved_tokens
from hybrid_jax.cache.tree.eviction import EvictionPolicy, LeastRecentlyUsed
from hybrid_jax.cache.tree.node import Node
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.traces import TraceRequest

LOOK_AHEAD = 12  # uses that may fall to a deeper checkpoint before a node counts as unused


class Future:
    """Which requests will pass which positions of a trace's sequences.

    All prompts and sequences are laid into one tree first; `uses` of a node of it are the requests, in order, that
    could resume there.
    """

    def __init__(self, trace: Sequence[TraceRequest]):
        states = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=0, checkpoint_bytes=1)
        tree = SimulatedCache(states, 0, LeastRecentlyUsed(), history_tokens=1 << 62).tree
        prompts = [tree.announce(request.prompt) for request in trace]
        wholes = [tree.announce(request.whole) for request in trace]
        self._root = tree.root
        self.uses: dict[Node, list[int]] = {}
        self.paths: list[list[Node]] = []
        for number, (prompt, whole) in enumerate(zip(prompts, wholes, strict=True)):
            for node in prompt.path():
                if node.end < prompt.end:
                    self.uses.setdefault(node, []).append(number)
            self.paths.append(whole.path())
        self.prompt_ends = [prompt.end for prompt in prompts]

    def place(self, node: Node) -> Node:
        """The node of the whole tree that a cache's node ends in, on whichever path."""
        place = self._root
        for part in node.path():
            while place.end < part.end:
                place = place.children[int(part.tokens[place.end - part.start])]
        return place


class Clairvoyant(EvictionPolicy):
    """Evicts what spares least per byte and wait: (tokens spared / bytes freed) / wait.

    The wait is the time until the first request that would resume at the node, given the deeper checkpoints that are
    cached now. Every victim is chosen among all candidates. The choice is greedy, so this is a bound from below.

    Args:
        trace: the requests to come, in order.
        costs: of the model.
    """

    learns = True

    def __init__(self, trace: Sequence[TraceRequest], costs: Costs):
        self.costs, self._future = costs, Future(trace)
        self._now = -1
        self.candidates: dict[Node, float] = {}  # tokens spared per byte
        self._place: dict[Node, Node] = {}  # in the tree of the whole trace
        self._here: dict[Node, Node] = {}  # the other way round
        self._next: dict[Node, tuple[int, float]] = {}  # as of which request, the next use

    def asked(
        self, tree: RadixTree, end_node: Node, known_len: int, declared: Iterable[int] = ()
    ) -> None:
        """The next request of the trace is at hand."""
        self._now += 1

    def add(self, node: Node) -> None:
        if node not in self._place:
            place = self._place[node] = self._future.place(node)
            self._here[place] = node
        self.candidates[node] = saved_tokens(node, self.tier) / max(
            1, freed_bytes(node, self.costs, self.tier)
        )

    def discard(self, node: Node) -> None:
        self.candidates.pop(node, None)

    def forget(self, node: Node) -> None:
        """The node left the tree for good."""
        self._next.pop(node, None)
        place = self._place.pop(node, None)
        if place is not None and self._here.get(place) is node:
            del self._here[place]

    def pop(self) -> Node | None:
        if not self.candidates:
            return None
        nodes = list(self.candidates)
        ratios = np.array([self.candidates[node] for node in nodes])
        waits = np.array([self._next_use(node) for node in nodes]) - self._now
        victim = nodes[int(np.argmin(ratios / waits))]
        self.discard(victim)
        above = victim.above
        while above.parent is not None:  # they have its uses now
            self._next.pop(above, None)
            above = above.above
        return victim

    def _next_use(self, node: Node) -> float:
        known = self._next.get(node)
        if known is None or known[0] != self._now:
            known = self._next[node] = self._now, self._find(node)
        return known[1]

    def _find(self, node: Node) -> float:
        place = self._place[node]
        if self.costs.checkpoint_bytes:
            return self._first_use(place)
        wait = np.inf
        while place.end > node.start:  # without checkpoints a path may be left anywhere inside
            wait, place = min(wait, self._first_use(place)), place.above
        return wait

    def _first_use(self, place: Node) -> float:
        uses = self._future.uses.get(place, [])
        first = bisect_right(uses, self._now)
        for number in uses[first : first + LOOK_AHEAD]:
            if not self._deeper(number, place):
                return number
        return np.inf

    def _deeper(self, number: int, place: Node) -> bool:
        """A checkpoint below `place` serves this request now."""
        path, limit = self._future.paths[number], self._future.prompt_ends[number]
        shorter = bisect_left(path, limit, key=lambda node: node.end)
        for node in reversed(path[:shorter]):  # what ends before the prompt does
            if node is place:
                return False
            here = self._here.get(node)
            if here is None:
                continue
            if here.has_checkpoint(self.tier) if self.costs.checkpoint_bytes else here.cached:
                return True
        return False

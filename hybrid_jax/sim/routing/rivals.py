"""Published ways to choose a replica, to compare with, each as its authors describe it.

What they see of caches: nothing, a history of their own, or what engines report. Published engines report KV blocks. A
hybrid model can only resume where its recurrent state was kept too, of which these reports say nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import numpy as np

from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cluster.names import prefix_names
from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.timing import DeviceModel

GRAIN = 32


class Replica(Protocol):
    """As much of a replica as a router may look at."""

    @property
    def tree(self) -> RadixTree | None:
        """Its prefix tree; None if the cache is off."""


class Rival:
    """Keeps the number of live requests of each replica.

    Attributes:
        live: how many. at: the replica of each.
    """

    def begin(self, engines: Sequence[Replica]) -> None:
        """As in `Routing`."""
        self.engines = engines
        self.live = [0] * len(engines)
        self.at: dict[str, int] = {}

    def choose(self, name: str, prompt: np.ndarray, now: float) -> int:
        """As in `Routing`."""
        replica = self.pick(prompt, now)
        self.at[name] = replica
        self.live[replica] += 1
        self.sent(name, prompt, replica, now)
        return replica

    def pick(self, prompt: np.ndarray, now: float) -> int:
        """The replica of a prompt."""
        raise NotImplementedError

    def sent(self, name: str, prompt: np.ndarray, replica: int, now: float) -> None:
        """A request goes to a replica."""

    def computed(self, name: str) -> None:
        """As in `Routing`."""

    def ended(self, name: str, num_tokens: int) -> None:
        """As in `Routing`."""
        self.live[self.at.pop(name)] -= 1

    def least_loaded(self) -> int:
        """The replica with the fewest live requests."""
        return min(range(len(self.live)), key=lambda r: (self.live[r], r))


class RoundRobin(Rival):
    """One after the other."""

    _next = -1

    def pick(self, prompt: np.ndarray, now: float) -> int:
        self._next = (self._next + 1) % len(self.live)
        return self._next


class LeastLoaded(Rival):
    """The fewest live requests."""

    def pick(self, prompt: np.ndarray, now: float) -> int:
        return self.least_loaded()


class PrefixHash(Rival):
    """By a hash of the first tokens, on to the next replica where that has too much (consistent hashing with bounded
    loads, Mirrokni et al. 2018).

    Args:
        tokens: how many of the first tokens count. bound: live requests of a replica, over the mean, at most.
        grain: tokens that count together.
    """

    def __init__(self, tokens: int = 1024, bound: float = 1.25, grain: int = GRAIN) -> None:
        self._tokens, self._bound, self._grain = tokens, bound, grain

    def pick(self, prompt: np.ndarray, now: float) -> int:
        names, count = prefix_names(prompt[: self._tokens], self._grain), len(self.live)
        first = int(names[-1]) % count if len(names) else 0
        most = self._bound * (sum(self.live) + 1) / count
        turns = [(first + step) % count for step in range(count)]
        return next((r for r in turns if self.live[r] + 1 <= most), self.least_loaded())


def longest_known(names: Sequence[int], known: Container[int]) -> int:
    """How many of a prompt's prefixes, by their names, are known. Whoever has one has all that are shorter."""
    low, high = 0, len(names)
    while low < high:
        middle = (low + high + 1) // 2
        if names[middle - 1] in known:
            low = middle
        else:
            high = middle - 1
    return low


class History:
    """Which prefixes were sent to which replica lately: what a router knows that asks nobody.

    Args:
        tokens: how many it remembers of each replica; the oldest prefixes are forgotten. grain: as in `PrefixHash`.
    """

    def __init__(self, count: int, tokens: int, grain: int) -> None:
        self._most, self._grain = tokens // grain, grain
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]

    def size(self, replica: int) -> int:
        """Blocks that are remembered of a replica."""
        return len(self._known[replica])

    def match(self, names: Sequence[int], replica: int) -> int:
        """Tokens of a prompt that a replica is thought to have."""
        return longest_known(names, self._known[replica]) * self._grain

    def add(self, names: Sequence[int], replica: int) -> None:
        """A prompt was sent."""
        known = self._known[replica]
        for name in reversed(names):  # the longest prefix is the first to be forgotten
            known.pop(name, None)
            known[name] = None
        while len(known) > self._most:
            known.popitem(last=False)


class ApproximateTree(Rival):
    """SGLang's: the best match in a history of what was sent, unless loads differ too much.

    Args:
        threshold: share of a prompt that must match; else the replica with the smallest history.
        absolute, relative: loads differ too much if the most are so many more than the fewest, and so many times as
            many.
        tokens: of each replica's history. grain: as in `PrefixHash`.
    """

    def __init__(
        self,
        threshold: float = 0.3,
        absolute: int = 64,
        relative: float = 1.5,
        tokens: int = 1 << 26,
        grain: int = GRAIN,
    ) -> None:
        self._threshold, self._absolute, self._relative = threshold, absolute, relative
        self._tokens, self._grain = tokens, grain

    def begin(self, engines: Sequence[Replica]) -> None:
        super().begin(engines)
        self._history = History(len(engines), self._tokens, self._grain)

    def pick(self, prompt: np.ndarray, now: float) -> int:
        names, count = prefix_names(prompt, self._grain).tolist(), range(len(self.live))
        most, least = max(self.live), min(self.live)
        if most - least > self._absolute and most > self._relative * least:
            replica = self.least_loaded()
        else:
            matches = [self._history.match(names, r) for r in count]
            best = max(count, key=lambda r: matches[r])
            replica = min(count, key=self._history.size)
            if matches[best] > self._threshold * len(prompt):
                replica = best
        self._history.add(names, replica)
        return replica


Seen = Callable[[Replica, np.ndarray], int]


def pages_seen(replica: Replica, prompt: np.ndarray) -> int:
    """Tokens whose keys and values a replica has, as published engines report them."""
    return 0 if replica.tree is None else replica.tree.match(prompt).cached_len


def joint_seen(replica: Replica, prompt: np.ndarray) -> int:
    """Tokens after which a replica can resume."""
    return 0 if replica.tree is None else replica.tree.match(prompt).hit_len


class BlocksAndLoad(Rival):
    """Dynamo's: the least sum of blocks to prefill, those that wait there included, and of blocks of live requests.

    Blocks that several live requests of a replica share count once.

    Args:
        seen: what a replica is known to have. weight: of blocks to prefill.
    """

    def __init__(self, seen: Seen = pages_seen, weight: float = 1.0) -> None:
        self._seen, self._weight = seen, weight

    def begin(self, engines: Sequence[Replica]) -> None:
        super().begin(engines)
        self._active: list[Counter[int]] = [Counter() for _ in engines]  # live requests by block
        self._prefill = [0] * len(engines)
        self._blocks: dict[str, tuple[list[int], int]] = {}  # all, and how many to prefill

    def pick(self, prompt: np.ndarray, now: float) -> int:
        self._names = names = prefix_names(prompt, GRAIN).tolist()
        self._new = [len(names) - self._seen(engine, prompt) // GRAIN for engine in self.engines]

        def cost(r: int) -> float:
            active = self._active[r]
            added = len(names) - longest_known(names, active)
            return self._weight * (self._new[r] + self._prefill[r]) + len(active) + added

        return min(range(len(self.live)), key=lambda r: (cost(r), r))

    def sent(self, name: str, prompt: np.ndarray, replica: int, now: float) -> None:
        self._blocks[name] = self._names, self._new[replica]
        self._active[replica].update(self._names)
        self._prefill[replica] += self._new[replica]

    def computed(self, name: str) -> None:
        names, new = self._blocks[name]
        self._prefill[self.at[name]] -= new
        self._blocks[name] = names, 0

    def ended(self, name: str, num_tokens: int) -> None:
        names, new = self._blocks.pop(name)
        active = self._active[self.at[name]]
        for block in names:
            active[block] -= 1
            if not active[block]:
                del active[block]
        self._prefill[self.at[name]] -= new
        super().ended(name, num_tokens)


class ExploitOrExplore(Rival):
    """Preble's E2 (arXiv 2407.00023): the replica with the longest cached prefix if that is more than what is left to
    compute, else the least cost of load, of what would be evicted, and of the prompt; loads are sums over a window.

    Args:
        costs, device: of a replica. seen: what a replica is known to have.
        window_s: seconds over which load is counted. imbalance: the heaviest over the lightest load at which
            exploiting goes to the lightest of those that have the prefix, or to the lightest of all.
    """

    def __init__(
        self,
        costs: Costs,
        device: DeviceModel | None = None,
        *,
        seen: Seen = pages_seen,
        window_s: float = 180.0,
        imbalance: float = 1.5,
    ) -> None:
        self._costs, self._device = costs, device or DeviceModel()
        self._seen, self._window_s, self._imbalance = seen, window_s, imbalance

    def begin(self, engines: Sequence[Replica]) -> None:
        super().begin(engines)
        self._recent: list[deque[tuple[float, float]]] = [deque() for _ in engines]
        self._load = [0.0] * len(engines)
        self._output, self._hits = 100.0, dict[int, int]()

    def pick(self, prompt: np.ndarray, now: float) -> int:
        for replica, recent in enumerate(self._recent):
            while recent and recent[0][0] < now - self._window_s:
                self._load[replica] -= recent.popleft()[1]
        replicas = range(len(self.engines))
        hits = [self._seen(engine, prompt) for engine in self.engines]
        best = max(hits)
        chosen = min(replicas, key=lambda r: (self._load[r] + self._prefill_s(prompt, hits[r]), r))
        if best > len(prompt) - best:
            owner = min((r for r in replicas if hits[r] == best), key=lambda r: (self._load[r], r))
            if self._load[owner] <= self._imbalance * min(self._load) + self._prefill_s(prompt, 0):
                chosen = owner
        self._taken = self._prefill_s(prompt, hits[chosen]) + self._output * self._step_s()
        return chosen

    def _prefill_s(self, prompt: np.ndarray, hit: int) -> float:
        return self._costs.flops(len(prompt), start=hit) / self._device.flops_per_second

    def _step_s(self) -> float:
        """A row's share of a step, with eight rows."""
        return self._costs.flops_per_token / self._device.bytes_per_second / 8

    def sent(self, name: str, prompt: np.ndarray, replica: int, now: float) -> None:
        self._recent[replica].append((now, self._taken))
        self._load[replica] += self._taken

    def ended(self, name: str, num_tokens: int) -> None:
        self._output += (num_tokens - self._output) / 64
        super().ended(name, num_tokens)

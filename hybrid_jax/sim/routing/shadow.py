"""Large fleets, quickly: of each replica only its cache and a queue of prompts, in place of a scheduler.

A request is cached as it comes, and its prompt waits until those before it are computed. Decoding takes a fixed time a
token and holds up nobody.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.tree.eviction import LeastRecentlyUsed
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.timing import summary
from hybrid_jax.sim.routing.fleet import Routing


class ShadowRequest(NamedTuple):
    """A request in blocks of tokens.

    Attributes:
        arrival_s: when it comes. prompt, whole: int32 ids of blocks, of the prompt, and with its output.
    """

    arrival_s: float
    prompt: np.ndarray
    whole: np.ndarray


class ShadowReplica:
    """The cache of a replica, and when its prompts are computed.

    Args:
        costs: of a block. capacity: bytes of the cache.
        flops_per_second: of prompts. step_s: seconds from one token to the next.
    """

    def __init__(
        self, costs: Costs, capacity: int, *, flops_per_second: float, step_s: float, grain: int = 2
    ) -> None:
        self.costs, self._rate, self._step_s = costs, flops_per_second, step_s
        self._cache = SimulatedCache(costs, capacity, LeastRecentlyUsed(), grain=grain)
        self._free_at = self.worked_s = 0.0
        self.asked = self.hit = 0

    @property
    def tree(self) -> RadixTree:
        """Its prefix tree."""
        return self._cache.tree

    def add(self, request: ShadowRequest, now: float, block_tokens: int) -> tuple[float, float]:
        """Takes a request; returns when its first and its last token come."""
        hit = self._cache.request(request.prompt, request.whole)
        self.asked += len(request.prompt)
        self.hit += hit
        takes = self.costs.flops(len(request.prompt), start=hit) / self._rate
        self.worked_s += takes
        self._free_at = max(self._free_at, now) + takes
        tokens = block_tokens * (len(request.whole) - len(request.prompt))
        return self._free_at, self._free_at + tokens * self._step_s


@dataclass(frozen=True, kw_only=True)
class ShadowResult:
    """What a router did.

    Attributes:
        requests: how many. ttft_s, hit_rate, imbalance: as in `FleetResult`; the last one of work on prompts.
        busy: share of their time in which replicas computed prompts.
        decision_us: {"p50", "p95", "mean"} of a decision, on the machine that ran this.
    """

    requests: int
    ttft_s: dict[str, float]
    hit_rate: float
    imbalance: float
    busy: float
    decision_us: dict[str, float]


def run_shadow(
    requests: Iterable[ShadowRequest],
    routing: Routing,
    replicas: Sequence[ShadowReplica],
    *,
    block_tokens: int,
) -> ShadowResult:
    """Sends requests, in the order of their times, through replicas.

    Args:
        block_tokens: tokens of a block.
    """
    routing.begin(replicas)
    events: list[
        tuple[float, int, str, int]
    ] = []  # time, order, name, tokens; -1 for the first token
    ttft: list[float] = []
    deciding: list[float] = []
    now, order = 0.0, 0
    first: float | None = None
    for number, request in enumerate(requests):
        name, now = str(number), request.arrival_s
        first = now if first is None else first
        for _, _, ended, tokens in _due(events, now):
            routing.computed(ended) if tokens < 0 else routing.ended(ended, tokens)
        begun = time.perf_counter()
        replica = routing.choose(name, request.prompt, now)
        deciding.append(time.perf_counter() - begun)
        begins, ends = replicas[replica].add(request, now, block_tokens)
        ttft.append(begins - now)
        tokens = block_tokens * (len(request.whole) - len(request.prompt))
        heapq.heappush(events, (begins, order, name, -1))
        heapq.heappush(events, (ends, order + 1, name, tokens))
        order += 2
    worked = np.array([replica.worked_s for replica in replicas])
    asked = sum(replica.asked for replica in replicas)
    micro = 1e6 * np.array(deciding)
    return ShadowResult(
        requests=len(ttft),
        ttft_s=summary(ttft),
        hit_rate=sum(replica.hit for replica in replicas) / max(1, asked),
        imbalance=float(worked.max() / max(worked.mean(), 1e-9)),
        busy=float(worked.mean() / max(now - (first or 0.0), 1e-9)),
        decision_us={
            "p50": float(np.median(micro)),
            "p95": float(np.percentile(micro, 95)),
            "mean": float(micro.mean()),
        },
    )


def _due(
    events: list[tuple[float, int, str, int]], now: float
) -> Iterator[tuple[float, int, str, int]]:
    while events and events[0][0] <= now:
        yield heapq.heappop(events)

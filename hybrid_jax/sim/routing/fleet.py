"""Several engines on one virtual clock, behind a router."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybrid_jax.config import EngineConfig
from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.timing import DeviceModel, summary
from hybrid_jax.sim.prefix_cache.traces import TraceRequest
from hybrid_jax.sim.prefix_cache.virtual_engine import Turns, VirtualEngine
from hybrid_jax.sim.routing.rivals import Replica


class Routing(Protocol):
    """Chooses between the replicas of a fleet, and is told what becomes of requests."""

    def begin(self, engines: Sequence[Replica]) -> None:
        """Sees the replicas before the first request."""

    def choose(self, name: str, prompt: np.ndarray, now: float) -> int:
        """The replica of a request, by its name and its prompt int32[n]."""

    def computed(self, name: str) -> None:
        """A request has its first token."""

    def ended(self, name: str, num_tokens: int) -> None:
        """A request has its last token, the so-many-th."""


@dataclass(frozen=True, kw_only=True)
class FleetResult:
    """What a router did with a trace.

    Attributes:
        ttft_s, latency_s: {"p5", "p50", "p95", "mean"} of seconds to the first and to the last token.
        token_hit_rate: tokens of prompts that were skipped, of all.
        busy: share of the replicas' time in which they had a plan. imbalance: that of the busiest, over the mean.
        span_s: from the first arrival to the last token. infeasible: requests that fit no replica.
        decision_us: mean time of a decision on the machine that ran this. seconds: of the whole run.
    """

    ttft_s: dict[str, float]
    latency_s: dict[str, float]
    token_hit_rate: float
    busy: float
    imbalance: float
    span_s: float
    infeasible: int
    decision_us: float
    seconds: float


def run_fleet(
    trace: Sequence[TraceRequest],
    routing: Routing,
    *,
    replicas: int,
    costs: Costs,
    decode: Costs | None = None,
    engine: EngineConfig,
    capacity: int,
    device: DeviceModel | None = None,
    host_capacity: int = 0,
) -> FleetResult:
    """Runs a trace through replicas that are alike.

    Args:
        trace: requests with arrival times; a turn of a session comes after the turn before it has ended.
        routing: chooses between the replicas.
        costs, decode, engine, capacity, device, host_capacity: of each replica, as for `VirtualEngine`.
    """
    begun = time.perf_counter()
    engines = [
        VirtualEngine(costs, decode or costs, engine, capacity, device, host_capacity=host_capacity)
        for _ in range(replicas)
    ]
    fleet = _Fleet(trace, engines, routing)
    fleet.go()
    asked = sum(len(trace[number].prompt) for number in fleet.hits)
    span = fleet.now - trace[0].arrival_s
    busy = np.array(fleet.busy_s)
    return FleetResult(
        ttft_s=summary([fleet.first[i] - fleet.arrived[i] for i in fleet.first] or [0.0]),
        latency_s=summary([fleet.last[i] - fleet.arrived[i] for i in fleet.last] or [0.0]),
        token_hit_rate=sum(fleet.hits.values()) / max(1, asked),
        busy=float(busy.mean() / max(span, 1e-9)),
        imbalance=float(busy.max() / max(busy.mean(), 1e-9)),
        span_s=span,
        infeasible=fleet.infeasible,
        decision_us=1e6 * fleet.deciding_s / max(1, len(trace)),
        seconds=time.perf_counter() - begun,
    )


class _Fleet:
    """One trace on its way through the engines."""

    def __init__(
        self, trace: Sequence[TraceRequest], engines: Sequence[VirtualEngine], routing: Routing
    ) -> None:
        self.trace, self.engines, self.routing = trace, engines, routing
        self.now, self.deciding_s, self.infeasible = trace[0].arrival_s, 0.0, 0
        self.busy_s = [0.0] * len(engines)
        self.arrived: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.hits: dict[int, int] = {}
        self._turns, self._ends = Turns(trace), list[tuple[float, int]]()
        routing.begin(engines)

    def go(self) -> None:
        """Runs until every request has ended or was refused."""
        while len(self.last) + self.infeasible < len(self.trace):
            arrival = self._turns.next_s
            if self._ends and (arrival is None or self._ends[0][0] <= arrival):
                self.now, replica = heapq.heappop(self._ends)
                self._end(replica)
            else:
                assert arrival is not None, "fleet: requests are left, and nothing is to come"
                self.now = max(self.now, arrival)
                for when, number in self._turns.due(self.now):
                    self._arrive(when, number)

    def _arrive(self, when: float, number: int) -> None:
        self.arrived[number] = when
        begun = time.perf_counter()
        replica = self.routing.choose(str(number), self.trace[number].prompt, self.now)
        self.deciding_s += time.perf_counter() - begun
        engine = self.engines[replica]
        try:
            engine.add(str(number), self.trace[number])
        except ValueError as error:
            raise ValueError(f"fleet: request {number} fits no replica") from error
        if not engine.busy:
            self._begin(replica)

    def _begin(self, replica: int) -> None:
        engine = self.engines[replica]
        engine.go_on_to(self.now)
        ends = engine.begin()
        if ends is not None:
            heapq.heappush(self._ends, (ends, replica))
            self.busy_s[replica] += ends - self.now

    def _end(self, replica: int) -> None:
        engine = self.engines[replica]
        engine.go_on_to(self.now)
        for new in engine.end():
            name = new.request.request_id
            number = int(name)
            if new.new_token_ids and number not in self.first:
                self.first[number], self.hits[number] = self.now, new.request.hit.num_tokens
                self.routing.computed(name)
            if new.finished:
                self.last[number] = self.now
                self.routing.ended(name, len(new.request.output.token_ids))
                self._turns.ended(number, self.now)
        self._begin(replica)

"""Runs in ticks: a running request takes a token a tick, and keeps its memory until it ends or is preempted."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.pools.loads import PoolLoad, PoolResult
from benchmarks.pools.model_sizes import ModelSizes
from benchmarks.pools.published import Counters

DEPARTURE, DECODE, GROWTH, ARRIVAL = 0, 1, 2, 3  # in this order within a tick
# Fields of a result that a run and an allocator count by the same names.
OF_RUN = ("completed", "infeasible", "hollow", "preempted", "most_running", "makespan")
OF_ALLOCATOR = (
    *("allocate_calls", "folds_in_place", "folds_to_new", "migrated_bytes", "copied_bytes"),
    *("wasted_bytes", "rebalances_refused"),
)


class PoolSizes:
    """What a result says of a pool.

    Attributes:
        counters: what happened so far.
        step_tokens: KV grows by so many tokens at once.
        prefix_tokens: a shared prefix can end at multiples of this.
        slot_bytes: what one request's state takes, padding included.
        reserved_bytes: taken from the device at the start.
    """

    counters: Counters
    step_tokens: int
    prefix_tokens: int
    slot_bytes: int
    reserved_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes that are not free."""
        raise NotImplementedError

    def row_bytes(self, num_rows: int) -> int:
        """Memory beside the pool while so many requests run."""
        return 0

    def check_invariants(self) -> None:
        """Recounts what is held; raises AssertionError with both numbers."""


@dataclass(frozen=True, kw_only=True)
class TickResult(PoolResult):
    """What came of a load under one allocator.

    Attributes:
        oom_count: infeasible and preempted requests. A request that waits is not counted.
        infeasible: requests that were refused, as the empty pool cannot hold them.
        hollow: completed requests whose KV or state was gone at the end. evictions: always 0, by the rules.
        preempted: times that a request lost all it had, and began again. recomputed_tokens: computed for nothing.
        tokens_per_tick: of completed requests, prompts included, until the last one departs.
        of_ideal: the same over that of the byte-fluid ideal; None until it is known.
        ideal_infeasible: requests that the ideal refuses.
        utilisation: mean share of the budget that holds KV and states of running requests, padding left out, while
            others wait; 0 where none ever waits.
        mean_running, most_running: requests that run at once.
        mean_latency, p95_latency: ticks from arrival to the end, of completed requests.
        makespan: ticks.
        peak_bytes: most that the allocator needs at once with everything beside its pool. peak_footprint: the same over
            the budget.
        slot_padding: share of a state's memory that holds nothing.
        migrated_bytes, copied_bytes: bytes that changed their kind, and bytes that were moved.
        wasted_bytes: capacity lost for ever. leaked_bytes: in use when all requests have gone.
        rebalance_count, rebalances_refused: of AVMP.
        folds_in_place, folds_to_new: of frames.
        prefix_tokens: shared prefixes can end at multiples of this.
        allocate_calls: by the allocator's own count. cpu_seconds: of the run, allocator included.
    """

    mode: str = "honest"
    evictions: int = 0
    infeasible: int
    preempted: int
    recomputed_tokens: int
    tokens_per_tick: float
    of_ideal: float | None
    ideal_infeasible: int | None
    utilisation: float
    mean_running: float
    most_running: int
    mean_latency: float
    p95_latency: float
    makespan: int
    peak_footprint: float
    slot_padding: float
    copied_bytes: int
    wasted_bytes: int
    leaked_bytes: int
    rebalances_refused: int
    folds_in_place: int
    folds_to_new: int
    prefix_tokens: int


class TickRun:
    """One load on its way: the clock, who runs since when, and what is counted. Subclasses decide who runs.

    A token a tick is prefilled, then generated. Within a tick departures come first, then growth, then arrivals, then
    admissions. The last token of a request is never fed, so it needs no memory.

    Args:
        load: the requests.
        pool: sizes and counters of the allocator.
        model: sizes, for the share of the budget that is in use.
    """

    def __init__(self, load: PoolLoad, pool: PoolSizes, model: ModelSizes):
        self.load, self.pool, self.model = load, pool, model
        self.prompts, self.gens = load.prompt_lens.tolist(), load.gen_lens.tolist()
        self.arrivals = load.arrivals.tolist()
        self.since: dict[int, int] = {}  # request -> tick of its admission, the last one last
        self.known: dict[int, int] = {}  # request -> tokens that it was admitted with
        self.decoding: set[int] = set()
        self.lives = [0] * len(load)  # events of a life that is over count no more
        self.events = [(tick, ARRIVAL, request, 0) for request, tick in enumerate(self.arrivals)]
        heapq.heapify(self.events)
        self.tick = self.makespan = 0
        self.completed = self.infeasible = self.hollow = self.preempted = 0
        self.recomputed = self.tokens = self.most_running = 0
        self.latencies: list[int] = []
        self.content = 0  # bytes of KV and states of running requests
        self.running_ticks = self.waiting_ticks = 0
        self.content_ticks = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and do not run."""
        raise NotImplementedError

    def turn(self, departing: list[int], growing: list[int], arriving: list[int]) -> None:
        """Does what is due in this tick: departures, growth by a step, arrivals, and then admissions."""
        raise NotImplementedError

    def run(self, *, name: str, pool_bytes: int, ideal: TickResult | None = None) -> TickResult:
        """Runs until no request is left, and counts.

        Args:
            name, pool_bytes: of the allocator, for the result.
            ideal: what came of the same load under the byte-fluid ideal.
        """
        start = time.process_time()
        while self.events:
            self._pass_time(self.events[0][0])
            due: dict[int, list[int]] = {DEPARTURE: [], DECODE: [], GROWTH: [], ARRIVAL: []}
            while self.events and self.events[0][0] == self.tick:
                _, kind, request, life = heapq.heappop(self.events)
                if life == self.lives[request]:
                    due[kind].append(request)
            self.decoding.update(due.pop(DECODE))
            self.turn(due[DEPARTURE], due[GROWTH], due[ARRIVAL])
        return self._result(time.process_time() - start, name, pool_bytes, ideal)

    def most_tokens(self, request: int) -> int:
        """Tokens of a request that need memory."""
        return self.prompts[request] + self.gens[request] - 1

    def start(self, request: int, num_tokens: int) -> None:
        """A request runs from now on, with memory for so many tokens."""
        self.since[request], self.known[request] = self.tick, num_tokens
        self.content += self.model.state_bytes + num_tokens * self.model.token_bytes
        self.most_running = max(self.most_running, len(self.since))
        self._at(self.tick + num_tokens, DECODE, request)
        self._at(self.tick + self.most_tokens(request) + 1, DEPARTURE, request)
        step = self.pool.step_tokens
        self.plan_growth(request, -(-num_tokens // step) * step + 1)

    def plan_growth(self, request: int, num_tokens: int) -> None:
        """A request needs memory with this token, unless that comes after its end."""
        if num_tokens <= self.most_tokens(request):
            self._at(self.since[request] + num_tokens, GROWTH, request)

    def preempt(self, request: int) -> None:
        """A request has lost all it had and waits again."""
        self.preempted += 1
        self.recomputed += self.tick - self.since[request]
        self._leave(request)

    def complete(self, request: int, *, intact: bool) -> None:
        """A request departs, with or without the memory that it should have."""
        self.hollow += not intact
        self._leave(request)
        self.completed += 1
        self.makespan = self.tick
        self.tokens += self.prompts[request] + self.gens[request]
        self.latencies.append(self.tick - self.arrivals[request])

    def _at(self, tick: int, kind: int, request: int) -> None:
        heapq.heappush(self.events, (tick, kind, request, self.lives[request]))

    def _pass_time(self, tick: int) -> None:
        ticks = tick - self.tick
        self.running_ticks += ticks * len(self.since)
        if self.num_waiting:
            self.waiting_ticks += ticks
            grown = self.model.token_bytes * len(self.decoding) * (ticks - 1)
            self.content_ticks += ticks * (self.content + grown / 2)
        self.content += self.model.token_bytes * len(self.decoding) * ticks
        self.tick = tick

    def _leave(self, request: int) -> None:
        num_tokens = max(self.known.pop(request), self.tick - self.since.pop(request))
        self.content -= self.model.state_bytes + num_tokens * self.model.token_bytes
        self.decoding.discard(request)
        self.lives[request] += 1

    def _result(
        self, seconds: float, name: str, pool_bytes: int, ideal: TickResult | None
    ) -> TickResult:
        pool, counters, makespan = self.pool, self.pool.counters, self.makespan
        peak = pool.reserved_bytes + pool.row_bytes(self.most_running) if self.most_running else 0
        speed = self.tokens / makespan if makespan else 0.0
        share = self.content_ticks / self.waiting_ticks / pool_bytes if self.waiting_ticks else 0.0
        of_ideal = None
        if ideal is not None:
            of_ideal = speed / ideal.tokens_per_tick if ideal.tokens_per_tick else 1.0
        return TickResult(
            **self.load.asked(name, self.model.name, pool_bytes),
            oom_count=self.infeasible + self.preempted,
            **{name: getattr(self, name) for name in OF_RUN},
            **{name: getattr(counters, name) for name in OF_ALLOCATOR},
            recomputed_tokens=self.recomputed,
            tokens_per_tick=speed,
            of_ideal=of_ideal,
            ideal_infeasible=None if ideal is None else ideal.infeasible,
            utilisation=share,
            mean_running=self.running_ticks / makespan if makespan else 0.0,
            mean_latency=float(np.mean(self.latencies or 0)),
            p95_latency=float(np.percentile(self.latencies or 0, 95)),
            peak_bytes=peak,
            peak_footprint=peak / pool_bytes,
            slot_padding=1 - self.model.state_bytes / pool.slot_bytes,
            leaked_bytes=pool.used_bytes,
            rebalance_count=counters.rebalances,
            prefix_tokens=pool.prefix_tokens,
            cpu_seconds=seconds,
        )

"""A harness in which a running request keeps its memory, or knows that it lost it: admission, growth, preemption."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hybrid_jax.sim.allocators.honest_memory import HonestMemory
from hybrid_jax.sim.allocators.honest_models import HonestModel
from hybrid_jax.sim.allocators.pool_loads import PoolLoad
from hybrid_jax.sim.allocators.pools import PoolResult

DEPARTURE, DECODE, GROWTH, ARRIVAL = 0, 1, 2, 3  # in this order within a tick


@dataclass(frozen=True, kw_only=True)
class HonestResult(PoolResult):
    """What came of a load under one allocator.

    Attributes:
        oom_count: infeasible and preempted; to wait is none.
        infeasible: refused, as the empty pool cannot hold them.
        hollow: completed, though their KV or state was gone at the end. evictions: none, by the rules.
        preempted: times that a request lost all it had, and began again. recomputed_tokens: computed for nothing.
        tokens_per_tick: of completed requests, prompts included, until the last one departs.
        of_ideal: the same over that of the byte-fluid ideal; None until it is known.
        ideal_infeasible: refused by the ideal.
        utilisation: mean share of the budget that holds KV and states of running requests, padding left out, while
            others wait; 0 where none ever waits.
        mean_running, most_running: requests at once.
        mean_latency, p95_latency: ticks from arrival to the end, of completed requests.
        makespan: ticks.
        peak_bytes: most that the allocator needs at once with everything beside its pool. peak_footprint: the same over
            the budget.
        slot_padding: share of a state's memory that holds nothing.
        migrated_bytes, copied_bytes: that changed their kind; that were moved.
        wasted_bytes: capacity lost for ever. leaked_bytes: in use when all requests have gone.
        rebalance_count, rebalances_refused: of AVMP.
        folds_in_place, folds_to_new: of frames.
        prefix_tokens: shared prefixes can end at multiples of this.
        allocate_calls: made by the allocator's own count. cpu_seconds: of harness and allocator.
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


class HonestRun:
    """One load through one allocator.

    Requests wait in one line, first come first served: who does not fit holds up those behind. One is admitted when
    memory for its prompt and its state is free. A token a tick is prefilled, then generated; a token that begins a new
    step needs memory before it runs. Where there is none, the request admitted last is preempted: it gives back all
    it has, goes to the head of the line, and later begins again with its first token. That may be the one that asked.

    Args:
        load: the requests.
        memory: an allocator, empty.
        model: sizes, for the share of the budget that is in use.
    """

    def __init__(self, load: PoolLoad, memory: HonestMemory, model: HonestModel):
        self.memory, self.model = memory, model
        self.prompts, self.gens = load.prompt_lens.tolist(), load.gen_lens.tolist()
        self.arrivals = load.arrivals.tolist()
        self.waiting: deque[int] = deque()
        self.running: dict[int, int] = {}  # request -> tick of its admission, the last one last
        self.decoding: set[int] = set()
        self.lives = [0] * len(load)  # events of a life that is over count no more
        self.events = [(tick, ARRIVAL, request, 0) for request, tick in enumerate(self.arrivals)]
        heapq.heapify(self.events)
        self.tick = self.last_departure = 0
        self.completed = self.infeasible = self.hollow = self.preempted = 0
        self.recomputed = self.tokens = self.most_running = self.peak_bytes = 0
        self.latencies: list[int] = []
        self.content = 0  # bytes of KV and states of running requests
        self.running_ticks = self.waiting_ticks = 0
        self.content_ticks = 0.0

    def run(self) -> None:
        """Until no request is left."""
        act = {
            DEPARTURE: self._depart,
            DECODE: self._decode,
            GROWTH: self._grow,
            ARRIVAL: self._arrive,
        }
        events = self.events
        while events:
            self._pass_time(events[0][0])
            while events and events[0][0] == self.tick:
                _, kind, request, life = heapq.heappop(events)
                if life == self.lives[request]:
                    act[kind](request)
            self._admit()

    def _pass_time(self, tick: int) -> None:
        ticks = tick - self.tick
        self.running_ticks += ticks * len(self.running)
        if self.waiting:
            self.waiting_ticks += ticks
            grown = self.model.token_bytes * len(self.decoding) * (ticks - 1)
            self.content_ticks += ticks * (self.content + grown / 2)
        self.content += self.model.token_bytes * len(self.decoding) * ticks
        self.tick = tick

    def _arrive(self, request: int) -> None:
        if self.memory.fits_alone(self._most_tokens(request)):
            self.waiting.append(request)
        else:
            self.infeasible += 1

    def _most_tokens(self, request: int) -> int:
        """The last token is never fed, so it needs no memory."""
        return self.prompts[request] + self.gens[request] - 1

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            if not self.memory.admit(request, self.prompts[request]):
                if self.running:
                    return
                self._give_up(request)
                continue
            self.waiting.popleft()
            self._start(request)

    def _give_up(self, request: int) -> None:
        """Nobody else holds anything, and it does not fit: what the allocator lost is never to come back."""
        self.waiting.popleft()
        self.infeasible += 1

    def _start(self, request: int) -> None:
        tick, life, prompt = self.tick, self.lives[request], self.prompts[request]
        self.running[request] = tick
        self.content += self.model.state_bytes + prompt * self.model.token_bytes
        self.most_running = max(self.most_running, len(self.running))
        self._note_peak()
        push = heapq.heappush
        push(self.events, (tick + prompt, DECODE, request, life))
        push(self.events, (tick + prompt + self.gens[request], DEPARTURE, request, life))
        step = self.memory.step_tokens
        self._plan_growth(request, -(-prompt // step) * step + 1)

    def _plan_growth(self, request: int, num_tokens: int) -> None:
        """The next token that begins a step, if there is one."""
        if num_tokens <= self._most_tokens(request):
            tick = self.running[request] + num_tokens
            heapq.heappush(self.events, (tick, GROWTH, request, self.lives[request]))

    def _decode(self, request: int) -> None:
        self.decoding.add(request)

    def _grow(self, request: int) -> None:
        num_tokens = self.tick - self.running[request]
        while not self.memory.grow(request, num_tokens):
            youngest = next(reversed(self.running))
            alone = len(self.running) == 1
            self._preempt(youngest)
            if youngest == request:
                if alone:
                    self._give_up(request)
                return
        self._note_peak()
        self._plan_growth(request, num_tokens + self.memory.step_tokens)

    def _preempt(self, request: int) -> None:
        self.preempted += 1
        self.recomputed += self.tick - self.running[request]
        self._leave(request)
        self.waiting.appendleft(request)

    def _depart(self, request: int) -> None:
        tokens, has_state = self.memory.holds(request)
        self.hollow += not has_state or tokens < self._most_tokens(request)
        self._leave(request)
        self.completed += 1
        self.last_departure = self.tick
        self.tokens += self.prompts[request] + self.gens[request]
        self.latencies.append(self.tick - self.arrivals[request])

    def _leave(self, request: int) -> None:
        since = self.running.pop(request)
        num_tokens = max(self.prompts[request], self.tick - since)
        self.content -= self.model.state_bytes + num_tokens * self.model.token_bytes
        self.decoding.discard(request)
        self.lives[request] += 1
        self.memory.release(request)

    def _note_peak(self) -> None:
        taken = self.memory.reserved_bytes + self.memory.row_bytes(len(self.running))
        self.peak_bytes = max(self.peak_bytes, taken)


def run_honest(
    load: PoolLoad,
    memory: HonestMemory,
    model: HonestModel,
    *,
    name: str,
    pool_bytes: int,
    ideal: HonestResult | None = None,
) -> HonestResult:
    """Runs a load through an allocator and counts.

    Args:
        load: the requests.
        memory: an allocator, empty.
        model: its sizes.
        name, pool_bytes: of the allocator, for the result.
        ideal: what came of the same load under the byte-fluid ideal.
    """
    run = HonestRun(load, memory, model)
    start = time.process_time()
    run.run()
    seconds = time.process_time() - start
    counters = memory.counters
    makespan = run.last_departure
    speed = run.tokens / makespan if makespan else 0.0
    return HonestResult(
        workload=load.workload,
        allocator=name,
        model_spec=model.name,
        pool_bytes=pool_bytes,
        seed=load.seed,
        requests=len(load),
        oom_count=run.infeasible + run.preempted,
        completed=run.completed,
        infeasible=run.infeasible,
        hollow=run.hollow,
        preempted=run.preempted,
        recomputed_tokens=run.recomputed,
        tokens_per_tick=speed,
        of_ideal=_ratio(speed, ideal.tokens_per_tick) if ideal is not None else None,
        ideal_infeasible=None if ideal is None else ideal.infeasible,
        utilisation=run.content_ticks / run.waiting_ticks / pool_bytes
        if run.waiting_ticks
        else 0.0,
        mean_running=run.running_ticks / makespan if makespan else 0.0,
        most_running=run.most_running,
        mean_latency=float(np.mean(run.latencies or 0)),
        p95_latency=float(np.percentile(run.latencies or 0, 95)),
        makespan=makespan,
        peak_bytes=run.peak_bytes,
        peak_footprint=run.peak_bytes / pool_bytes,
        slot_padding=1 - model.state_bytes / memory.slot_bytes,
        migrated_bytes=counters.migrated_bytes,
        copied_bytes=counters.copied_bytes,
        wasted_bytes=counters.wasted_bytes,
        leaked_bytes=memory.used_bytes,
        rebalance_count=counters.rebalances,
        rebalances_refused=counters.rebalances_refused,
        folds_in_place=counters.folds_in_place,
        folds_to_new=counters.folds_to_new,
        prefix_tokens=memory.prefix_tokens,
        allocate_calls=counters.allocate_calls,
        cpu_seconds=seconds,
    )


def run_beside_ideal(
    load: PoolLoad,
    make: Callable[[str], HonestMemory],
    model: HonestModel,
    *,
    name: str,
    pool_bytes: int,
) -> HonestResult:
    """The same, with the ideal run first; `make` gives an empty allocator of a name."""
    sizes = {"pool_bytes": pool_bytes}
    ideal = run_honest(load, make("ideal"), model, name="ideal", **sizes)
    return run_honest(load, make(name), model, name=name, ideal=ideal, **sizes)


def _ratio(value: float, reference: float) -> float:
    return value / reference if reference else 1.0

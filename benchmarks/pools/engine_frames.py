"""The engine's own memory in a study: its scheduler, with its pools and its rules, at a token a tick."""

from __future__ import annotations

from typing import Any

from benchmarks.pools.loads import PoolLoad
from benchmarks.pools.model_sizes import ModelSizes
from benchmarks.pools.published import Counters
from benchmarks.pools.ticks import PoolSizes, TickResult, TickRun
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.config.arrays import ITEM_BYTES
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.geometry import (
    Geometry,
)
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.scheduler import Scheduler
from hybrid_jax.schedule.sequence import Sequence
from hybrid_jax.schedule.turn import Turn
from hybrid_jax.sizing.budget import MAX_SLOTS

ENTRY_BYTES = ITEM_BYTES["int32"]  # of the slot table on the device, a frame id
ENDLESS = 1 << 30  # tokens of a model whose length does not matter


def require_frames(
    geometry: Geometry, num_frames: int, pool_bytes: int, beside: int, ring_frames: int = 0
) -> None:
    """Refuses a pool whose frames are not enough for one request; `beside` are bytes of rings and tables."""
    least = geometry.state_frames + geometry.frames_per_page + ring_frames
    if num_frames < least:
        raise ValueError(
            f"pool-sim: frames: {pool_bytes} bytes must hold {least} frames of {geometry.frame_bytes} bytes, "
            f"as one request takes, beside {beside} bytes of rings and tables"
        )


class EngineFrames(PoolSizes):
    """Sizes of the engine's memory: the pool is the arena, with its frame 0 beside it.

    Args:
        model, pool_bytes: sizes.
        rows: requests that the pool has to leave memory for in rings and tables, and the most that run at once; None
            for as many as come, with rings beside the pool.
    """

    def __init__(self, model: ModelSizes, pool_bytes: int, *, rows: int | None = None):
        self.geometry = geometry = model.frames
        self.model, self.rows = model, rows
        beside = 0 if rows is None else self.row_bytes(rows)
        entry = 0 if rows is None else ENTRY_BYTES
        self.num_frames = num_frames = (pool_bytes - beside) // (geometry.frame_bytes + entry)
        require_frames(geometry, num_frames, pool_bytes, beside)
        self.max_slots = min(1 + num_frames // geometry.state_frames, MAX_SLOTS)
        # A page begins or a fold is due after so many tokens; both are powers of two.
        self.step_tokens = min(geometry.page_tokens, geometry.grain)
        self.prefix_tokens = geometry.grain  # a hit inside a page copies the page
        self.slot_bytes = model.slot_bytes
        table = ENTRY_BYTES * self.max_slots * geometry.state_frames
        self.reserved_bytes = (num_frames + 1) * geometry.frame_bytes + table
        self.counters, self.num_held = Counters(), 0  # of a run

    @property
    def used_bytes(self) -> int:
        return self.num_held * self.geometry.frame_bytes

    def row_bytes(self, num_rows: int) -> int:
        """Rings are made once: for all rows that were asked for, or else for the most that ever ran."""
        rows = num_rows if self.rows is None else self.rows
        return (rows + 1) * self.model.ring_bytes  # and the row that padding writes to


class SchedulerRun(TickRun):
    """`Scheduler` decides who runs. It computes prompts in one chunk, without a prefix cache, and plans when a row
    needs memory or departs, rather than for every token.

    Against `QueueRun`, a request is admitted only if one page more than it needs is free, unless it is alone. One that
    was preempted keeps the tokens that it had generated, and needs memory for them when it comes back.

    Args:
        load, model: see `TickRun`.
        pool: sizes of the engine's memory.
    """

    def __init__(self, load: PoolLoad, pool: EngineFrames, model: ModelSizes):
        super().__init__(load, pool, model)
        self.frames = pool
        self.scheduler = _Scheduler(self, max_rows=pool.rows or len(load))
        self.due: set[int] = set()  # requests whose rows go on in the next plan
        self.leaving = False  # to their ends
        self.rows: dict[int, Sequence] = {}  # of running requests

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.admission.waiting)

    def turn(self, departing: list[int], growing: list[int], arriving: list[int]) -> None:
        intact = [self._holds_all(request) for request in departing]
        if departing:
            self.leaving = True
            self._plan(departing)
            self.leaving = False
        for request, holds_all in zip(departing, intact, strict=True):
            self.complete(request, intact=holds_all)
        for request in arriving:
            self._add(request)
        if departing or growing or arriving:
            self._plan_until_fed(growing)

    def needed(self, request: int) -> int:
        """Tokens that a running request has memory for in this tick."""
        return min(self.tick - self.since[request], self.most_tokens(request))

    def fed(self, request: int) -> int:
        """Tokens that a running request is fed by then. It ends with the last, so that one waits for its departure."""
        return min(self.needed(request), self.most_tokens(request) - (not self.leaving))

    def preempted_row(self, sequence: Sequence) -> None:
        """The scheduler takes a row away. The tokens of ticks without a plan count as generated."""
        request = int(sequence.owner)
        known = max(sequence.goal, self.needed(request))
        sequence.request.output.token_ids += [0] * (known - len(sequence.tokens))
        del self.rows[request]
        self.preempt(request)

    def _add(self, request: int) -> None:
        gen = self.gens[request]
        asked = Request(
            request_id=str(request),
            prompt=[0] * self.prompts[request],
            params=SamplingParams(max_tokens=gen),
            seed=0,
            max_tokens=gen,
        )
        try:
            self.scheduler.add(asked)
        except ValueError:
            self.infeasible += 1

    def _plan_until_fed(self, growing: list[int]) -> None:
        """Rows that grow get their memory, or preempt others for it; then requests are admitted."""
        before = None
        while before != self.preempted or any(self._is_behind(request) for request in growing):
            before = self.preempted
            self._plan(growing)
        for request in growing:
            if request in self.rows:
                self.plan_growth(request, self.needed(request) + self.frames.step_tokens)

    def _is_behind(self, request: int) -> bool:
        if request not in self.rows:  # preempted
            return False
        sequence, page_tokens = self.rows[request], self.frames.geometry.page_tokens
        has_pages = len(sequence.held.pages) * page_tokens >= self.needed(request)
        return sequence.position < self.fed(request) or not has_pages

    def _plan(self, due: list[int]) -> None:
        """One plan, in which these requests take the tokens of the ticks since they last did."""
        self.due = set(due)
        plan = self.scheduler.plan()
        assert plan, "pool-sim: the scheduler has no plan"
        self.pool.counters.allocate_calls += len(plan.decode)
        for sequence in self.scheduler.seats.running:
            request = int(sequence.owner)
            if request not in self.rows:
                self.rows[request] = sequence
                self.pool.counters.allocate_calls += 2
                self.start(request, sequence.goal)
        for row in plan.rows:
            row.new_tokens = [0] * row.most_tokens
        for new in self.scheduler.receive(plan):
            if new.finished:
                del self.rows[int(new.request.request_id)]

    def _holds_all(self, request: int) -> bool:
        """A request has the pages of its tokens, and a checkpoint or memory for it if it is longer than a grain."""
        sequence, tokens = self.rows[request], self.most_tokens(request)
        memory, geometry = self.scheduler.memory, self.frames.geometry
        slot = memory.slots.resolve(sequence.held.slot or sequence.held.reserved_slot)
        held = memory.frames.holders_of(sequence.held.pages.ravel())
        has_pages = len(sequence.held.pages) == geometry.num_pages(tokens) and bool(held.all())
        return has_pages and (slot > 0 or tokens <= geometry.grain)

    def _result(self, *told: Any) -> TickResult:
        memory = self.scheduler.memory
        counters = memory.holds.counters
        self.frames.num_held = memory.frames.num_held
        self.pool.counters.folds_in_place = counters.folds_in_place
        self.pool.counters.folds_to_new = counters.folds_to_new
        return super()._result(*told)


class _Scheduler(Scheduler):
    """The engine's scheduler, which tells a run of the rows that it takes away, and plans at the run's pace."""

    def __init__(self, run: SchedulerRun, *, max_rows: int):
        # Exact: rows stay where they are. The run sets the pace, so no limit on tokens or steps holds.
        engine = EngineConfig(cache=CacheConfig(policy="off"), max_rows=max_rows, exact=True)
        super().__init__(
            run.frames.geometry,
            engine,
            num_frames=run.frames.num_frames + 1,
            max_slots=run.frames.max_slots,
            max_model_len=ENDLESS,
        )
        self._run = run

    def _begin_turn(self) -> Turn:
        return _Turn(self, self._run)

    def _preempt(self, sequence: Sequence) -> None:
        self._run.preempted_row(sequence)
        super()._preempt(sequence)


class _Turn(Turn):
    """A turn in which only rows that are due go on, each by the tokens of the ticks since it last did."""

    full = empty = False  # every plan counts, and a dispatch has no limits

    def __init__(self, scheduler: Scheduler, run: SchedulerRun):
        running = scheduler.seats.running
        super().__init__(scheduler.memory, scheduler.engine, scheduler.counters, running)
        self._run = run
        self.preempted = run.leaving  # nobody is admitted before others have grown

    def chunk(self, sequence: Sequence) -> bool:
        return int(sequence.owner) not in self._run.due or super().chunk(sequence)

    def _chunk_tokens(self, num_tokens: int) -> int:
        return num_tokens

    def _set_budget(self, num_tokens: int) -> None:
        """Nothing limits a dispatch."""

    def decode(self, sequence: Sequence) -> bool:
        request = int(sequence.owner)
        if request not in self._run.due:
            return True
        fed, needed = self._run.fed(request), self._run.needed(request)
        if fed < needed and self.memory.grow(sequence, needed) < needed:
            return False
        self._num_steps = fed - sequence.position
        return super().decode(sequence)

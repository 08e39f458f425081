"""A trace through the engine's own scheduler on virtual time: arrivals, chunks, decode steps, requests side by side."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from hybrid_jax.byte_sizes import at_least
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.costs import Costs
from hybrid_jax.geometry import Geometry, sized_geometry
from hybrid_jax.schedule.bucket import shapes_of
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.scheduler import Scheduler
from hybrid_jax.sim.prefix_cache.request_order import CacheResult, asked_and_hit
from hybrid_jax.sim.prefix_cache.timing import DeviceModel, summary
from hybrid_jax.sim.prefix_cache.traces import TraceRequest

FRAME_BYTES = 256 * 1024  # at least; a frame is a page


@dataclass(frozen=True, kw_only=True)
class InFlightResult(CacheResult):
    """What one policy did on one trace, with requests in flight.

    What `CacheResult` has is of the requests that ran; `capacity` and `used_max` cover running requests too.

    Attributes:
        infeasible: how many requests can never fit.
        prefill_tokens, padded_tokens: prompt tokens that were computed, and padding that was computed with them for the
            shapes of the engine.
        prefill_dispatches: plans that computed tokens of prompts.
        padded_s: seconds that the padding took, in all.
        latency_s: {"p5", "p50", "p95", "mean"} from arrival to the last token, as `ttft_s` is to the first.
        span_s: virtual seconds from the first arrival to the last token.
        preemptions, waits: requests sent back for want of memory, and requests that waited for a checkpoint that
            another one computed.
        memory: `MemoryCounters`, in frames.
        host: `TierCounters` of the host's memory; empty without one. copied_s: seconds that its copies took, in all.
    """

    infeasible: int
    prefill_tokens: int
    padded_tokens: int
    prefill_dispatches: int
    padded_s: float
    latency_s: dict[str, float]
    span_s: float
    preemptions: int
    waits: int
    memory: dict[str, int]
    host: dict[str, int]
    copied_s: float


def virtual_geometry(costs: Costs, grain: int, narrow_bytes: int = 0) -> Geometry:
    """Frames for a model of which only bytes are known: a page is one frame, a checkpoint as many as it needs.

    Args:
        narrow_bytes: of a checkpoint in the cache, if these are fewer; 0 if not.
    """
    page_tokens = 16 if costs.kv_bytes else 0
    while 0 < page_tokens * costs.kv_bytes < FRAME_BYTES:
        page_tokens *= 2
    frame_bytes = page_tokens * costs.kv_bytes or FRAME_BYTES
    state_frames = -(-costs.checkpoint_bytes // frame_bytes)
    return sized_geometry(
        frame_words=frame_bytes // 4,
        page_tokens=page_tokens,
        frames_per_page=int(costs.kv_bytes > 0),
        token_words=costs.kv_bytes // 4,
        state_frames=state_frames,
        grain=grain,
        narrow_frames=-(-narrow_bytes // frame_bytes),
    )


def cache_config_of(policy: str) -> CacheConfig:
    """The cache of a policy by name; "none" keeps nothing.

    Raises:
        ValueError: there is no such policy.
    """
    return CacheConfig(policy="off" if policy == "none" else policy)


def simulate_in_flight(
    trace: Sequence[TraceRequest],
    costs: Costs,
    policy: str,
    capacity: int,
    *,
    model_spec: str = "",
    decode: Costs | None = None,
    grain: int = 32,
    max_rows: int = 64,
    prefill_tokens: int = 8192,
    shapes: Literal["fine", "coarse"] = "fine",
    device: DeviceModel | None = None,
    host_capacity: int = 0,
    narrow_bytes: int = 0,
    bounds: bool = False,
) -> InFlightResult:
    """Runs a trace through `Scheduler` as an engine would, a plan at a time, and measures.

    A turn of a session arrives when the trace says, but not before the turn before it has ended.

    Args:
        trace: requests with arrival times.
        costs: of the model. policy: of `CacheConfig`. capacity: bytes of the arena.
        model_spec: its name, for the result. decode: costs of tokens that are generated, and the bytes
            that they read, where they differ.
        grain: tokens between resume points.
        max_rows, prefill_tokens, shapes: as of `EngineConfig`.
        device: how long a plan takes; the default `DeviceModel` when None.
        host_capacity: bytes of the host's memory that keep what the arena evicts; 0 for none.
        narrow_bytes: of a checkpoint in the cache; 0 for those of `costs`, which rows have.
        bounds: also run "optimal" and "infinite".

    Raises:
        ValueError: no requests, an unknown policy or shapes, or an arena too small for two checkpoints.
    """
    if not trace:
        raise ValueError("simulate: a trace must hold at least one request, got none")
    started = time.process_time()
    cache_config = cache_config_of(policy)
    engine = EngineConfig(
        cache=cache_config,
        max_rows=max_rows,
        grain=grain,
        prefill_tokens=prefill_tokens,
        shapes=shapes,
    )
    cached = replace(costs, checkpoint_bytes=narrow_bytes) if narrow_bytes else costs
    run = _Run(trace, costs, decode or costs, engine, capacity, device, host_capacity, narrow_bytes)
    run.go()
    tree, counters = run.scheduler.memory.tree, run.scheduler.counters
    below = run.scheduler.memory.below
    seconds = time.process_time() - started
    lengths = np.array([len(trace[i].prompt) for i in run.hits], np.int64)
    skipped = np.array(list(run.hits.values()), np.int64)
    return InFlightResult(
        **asked_and_hit(
            trace, cached, policy, capacity, lengths, skipped, grain=grain, bounds=bounds
        ),
        model_spec=model_spec,
        infeasible=run.infeasible,
        used_max=run.used_max,
        used_max_over_capacity=run.used_max / capacity,
        prefill_tokens=counters.prefill_tokens,
        padded_tokens=run.padded_tokens,
        prefill_dispatches=run.prefill_dispatches,
        padded_s=run.padded_tokens * costs.flops_per_token / run.device.flops_per_second,
        ttft_s=summary([run.first_token[i] - run.arrived[i] for i in run.first_token] or [0.0]),
        latency_s=summary([run.ended[i] - run.arrived[i] for i in run.ended] or [0.0]),
        span_s=run.now - trace[0].arrival_s,
        preemptions=counters.preemptions,
        evictions=0 if tree is None else tree.counters.evictions,
        waits=counters.waits,
        memory=asdict(run.scheduler.memory.holds.counters),
        host={} if below is None else asdict(below.counters),
        copied_s=run.copied_s,
        timing=run.device.describe(),
        seconds=seconds,
    )


class _Run:
    """One trace on its way through one scheduler."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        costs: Costs,
        decode: Costs,
        engine: EngineConfig,
        capacity: int,
        device: DeviceModel | None,
        host_capacity: int = 0,
        narrow_bytes: int = 0,
    ):
        self.trace, self.costs, self.decode, self.engine = trace, costs, decode, engine
        self.device = DeviceModel() if device is None else device
        geometry = virtual_geometry(costs, engine.grain, narrow_bytes)
        if narrow_bytes:
            costs = replace(costs, checkpoint_bytes=narrow_bytes)
        frames = capacity // geometry.frame_bytes
        least = 2 * max(1, geometry.state_frames)
        if frames < least:
            told = at_least(least * geometry.frame_bytes, capacity)
            raise ValueError(f"simulate: capacity must hold two checkpoints, {told}")
        below = host_capacity // geometry.frame_bytes
        if host_capacity and below < least:
            told = at_least(least * geometry.frame_bytes, host_capacity)
            raise ValueError(f"simulate: host memory must hold two checkpoints, {told}")
        slots = 1 + frames // geometry.cached_state_frames if geometry.has_state else 2
        self.scheduler = Scheduler(
            geometry,
            engine,
            num_frames=frames + 1,
            max_slots=slots,
            max_model_len=1 << 30,
            host_frames=below + 1 if below else 0,
            costs=costs,
        )
        self.now = trace[0].arrival_s
        self.infeasible = self.used_max = self.padded_tokens = self.prefill_dispatches = 0
        self._frame_bytes, self.copied_s = geometry.frame_bytes, 0.0
        self.arrived: dict[int, float] = {}
        self.first_token: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.hits: dict[int, int] = {}
        self._due: list[tuple[float, int]] = []  # (time, request) of what may arrive
        self._after: dict[int, int] = {}  # the turn that waits for this one to end
        last: dict[int | str, int] = {}
        for number, request in enumerate(trace):
            before = last.get(request.session_id)
            if before is None:
                heapq.heappush(self._due, (request.arrival_s, number))
            else:
                self._after[before] = number
            last[request.session_id] = number

    def go(self) -> None:
        """Runs until every request has ended or was refused."""
        while self._due or self.scheduler.has_work:
            while self._due and self._due[0][0] <= self.now:
                self._arrive(*heapq.heappop(self._due))
            plan = self.scheduler.plan()
            if plan:
                self.now += self._duration(plan)
                held = self.scheduler.memory.frames.num_held * self._frame_bytes
                self.used_max = max(self.used_max, held)
                self._read(plan)
                for new in self.scheduler.receive(plan):
                    number = int(new.request.request_id)
                    if new.new_token_ids:
                        self.first_token.setdefault(number, self.now)
                        self.hits.setdefault(number, new.request.hit.num_tokens)
                    if new.finished:
                        self.ended[number] = self.now
                        self._release(number)
            elif self._due:
                self.now = max(self.now, self._due[0][0])
            else:
                assert not self.scheduler.has_work, "simulate: the scheduler has work and no plan"

    def _arrive(self, when: float, number: int) -> None:
        request, length = self.trace[number], max(1, len(self.trace[number].output))
        self.arrived[number] = when
        asked = Request(
            request_id=str(number),
            prompt=request.prompt.tolist(),
            params=SamplingParams(max_tokens=length),
            seed=0,
            max_tokens=length,
        )
        try:
            self.scheduler.add(asked)
        except ValueError:
            self.infeasible += 1
            self._release(number)

    def _release(self, number: int) -> None:
        """The session's next turn may arrive."""
        following = self._after.get(number)
        if following is not None:
            due = max(self.now, self.trace[following].arrival_s)
            heapq.heappush(self._due, (due, following))

    def _duration(self, plan: Plan) -> float:
        flops = sum(
            self.costs.flops(row.start + len(row.tokens), start=row.start) for row in plan.prefill
        )
        padded = self._padding(plan)
        self.padded_tokens += padded
        self.prefill_dispatches += bool(plan.prefill)
        flops += padded * self.costs.flops_per_token
        read = sum(
            row.position * self.decode.kv_bytes + self.decode.checkpoint_bytes
            for row in plan.decode
        )
        frames = sum(len(transfer.arena) for transfer in (*plan.saves, *plan.loads))
        copying = self.device.copy_seconds(frames * self._frame_bytes)
        self.copied_s += copying
        return copying + self.device.seconds(
            self.decode, flops=flops, num_steps=plan.num_steps, bytes_per_step=read
        )

    def _padding(self, plan: Plan) -> int:
        """Tokens that the prefill of a plan computes for its shape's sake."""
        if not plan.prefill:
            return 0
        lengths = [len(row.tokens) for row in plan.prefill]
        shape = shapes_of(self.engine).prefill_bucket(
            num_rows=len(lengths), num_tokens=max(lengths), num_pages=0, max_pages=0
        )
        return shape.rows * shape.tokens - sum(lengths)

    def _read(self, plan: Plan) -> None:
        """Gives every row the tokens that come next by the trace."""
        for row in plan.prefill:
            row.new_tokens = self._next(row.request, row.most_tokens)
        for fed in plan.decode:
            fed.new_tokens = self._next(fed.request, fed.num_tokens, fed.position)

    def _next(self, request: Request, count: int, position: int | None = None) -> list[int]:
        """The tokens after `position`, or after all that are known."""
        number = int(request.request_id)
        prompt_len, output = len(self.trace[number].prompt), self.trace[number].output
        start = len(request.output.token_ids) if position is None else position + 1 - prompt_len
        tokens = output[start : start + count].tolist()
        return tokens + [0] * (count - len(tokens))

"""An engine on virtual time: its scheduler and its cache, and plans that take as long as a `DeviceModel` says."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hybrid_jax.byte_sizes import at_least
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.config import EngineConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.costs import Costs
from hybrid_jax.geometry import Geometry, sized_geometry
from hybrid_jax.schedule.bucket import shapes_of
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.request import NewTokens, Request
from hybrid_jax.schedule.scheduler import Scheduler
from hybrid_jax.sim.prefix_cache.timing import DeviceModel
from hybrid_jax.sim.prefix_cache.traces import TraceRequest
from hybrid_jax.sim.prefix_cache.virtual_disk import NOTHING, VirtualDisk

FRAME_BYTES = 256 * 1024  # at least; a frame is a page


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


class Turns:
    """When the requests of a trace arrive: a turn of a session not before the turn before it has ended."""

    def __init__(self, trace: Sequence[TraceRequest]):
        self._trace = trace
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

    @property
    def next_s(self) -> float | None:
        """When the next one arrives; None if none may yet."""
        return self._due[0][0] if self._due else None

    def due(self, now: float) -> Iterator[tuple[float, int]]:
        """Takes out (time, request) of what has arrived by now."""
        while self._due and self._due[0][0] <= now:
            yield heapq.heappop(self._due)

    def ended(self, number: int, now: float) -> None:
        """A request has ended, so the session's next turn may arrive."""
        following = self._after.get(number)
        if following is not None:
            heapq.heappush(self._due, (max(now, self._trace[following].arrival_s), following))


class VirtualEngine:
    """One scheduler on virtual time.

    Args:
        costs: of the model. decode: of tokens that are generated.
        engine: rows, budgets, cache policy.
        capacity: bytes of the arena.
        device: how long a plan takes; the default `DeviceModel` when None.
        host_capacity, disk_capacity: bytes below the arena; 0 for none.
        narrow_bytes: of a checkpoint in the cache; 0 for those of `costs`.

    Attributes:
        now: virtual seconds.
        used_max: the most bytes that were held.
        padded_tokens: computed for the shapes' sake. prefill_dispatches: plans that computed prompts.
        copied_s: seconds of copies to and from the device.

    Raises:
        ValueError: the arena or the host's memory is too small for two checkpoints.
    """

    def __init__(
        self,
        costs: Costs,
        decode: Costs,
        engine: EngineConfig,
        capacity: int,
        device: DeviceModel | None,
        *,
        host_capacity: int = 0,
        disk_capacity: int = 0,
        narrow_bytes: int = 0,
    ):
        self.costs, self.decode, self.engine = costs, decode, engine
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
        self.disk: VirtualDisk | None = None
        if disk_capacity:
            self.disk = VirtualDisk(geometry, costs, disk_capacity, self.device)
        slots = 1 + frames // geometry.cached_state_frames if geometry.has_state else 2
        self.scheduler = Scheduler(
            geometry,
            engine,
            num_frames=frames + 1,
            max_slots=slots,
            max_model_len=1 << 30,
            host_frames=below + 1 if below else 0,
            disk=self.disk,
            costs=costs,
            speeds=self.device.speeds() if engine.cache.loads == "faster" else None,
        )
        self.now, self.copied_s, self.frame_bytes = 0.0, 0.0, geometry.frame_bytes
        self.used_max = self.padded_tokens = self.prefill_dispatches = 0
        self._traced: dict[str, TraceRequest] = {}
        self._plan: Plan | None = None

    @property
    def tree(self) -> RadixTree | None:
        """The prefix tree; None if the cache is off."""
        return self.scheduler.memory.tree

    @property
    def busy(self) -> bool:
        """A plan is running."""
        return self._plan is not None

    @property
    def next_s(self) -> float | None:
        """When something comes from the disk; None for never."""
        return None if self.disk is None else self.disk.next_s

    def go_on_to(self, now: float) -> None:
        """It is now so late."""
        self.now = now
        if self.disk is not None:
            self.disk.advance(now)

    def add(self, name: str, traced: TraceRequest, done: Sequence[int] = ()) -> Request:
        """Queues a request of a trace, which may have tokens already.

        Raises:
            ValueError: it can never fit.
        """
        length = max(1, len(traced.output))
        asked = Request(
            request_id=name,
            prompt=traced.prompt.tolist(),
            params=SamplingParams(max_tokens=length),
            seed=0,
            max_tokens=length,
        )
        asked.output.token_ids += done
        self.scheduler.add(asked)
        self._traced[name] = traced
        return asked

    def begin(self) -> float | None:
        """Begins the next plan; returns when it ends, or None if there is nothing to do now."""
        plan = self.scheduler.plan()
        if not plan:
            return None
        self._plan = plan
        self.plan_ends = self.now + self._duration(plan)
        return self.plan_ends

    def end(self) -> list[NewTokens]:
        """Ends the plan that runs, and returns what it brought."""
        plan, self._plan = self._plan, None
        assert plan is not None, "virtual engine: no plan runs"
        held = self.scheduler.memory.frames.num_held * self.frame_bytes
        self.used_max = max(self.used_max, held)
        for out in plan.to_disk:
            out.give([NOTHING] * len(out.arena))
        self._read(plan)
        news = self.scheduler.receive(plan)
        for new in news:
            if new.finished:
                del self._traced[new.request.request_id]
        return news

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
        frames += sum(len(out.arena) for out in plan.to_disk)
        frames += sum(len(come.arena) for come in plan.from_disk)
        copying = self.device.copy_seconds(frames * self.frame_bytes)
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
        traced = self._traced[request.request_id]
        prompt_len, output = len(traced.prompt), traced.output
        start = len(request.output.token_ids) if position is None else position + 1 - prompt_len
        tokens = output[start : start + count].tolist()
        return tokens + [0] * (count - len(tokens))

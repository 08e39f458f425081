"""A trace through the engine's own scheduler on virtual time: arrivals, chunks, decode steps, requests side by side."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from hybrid_jax.cache.tree.node import DISK, HOSTS_MEMORY
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.costs import Costs
from hybrid_jax.schedule.request import Request
from hybrid_jax.sim.prefix_cache.request_order import CacheResult, asked_and_hit
from hybrid_jax.sim.prefix_cache.timing import DeviceModel, summary
from hybrid_jax.sim.prefix_cache.traces import TraceRequest
from hybrid_jax.sim.prefix_cache.virtual_engine import Turns, VirtualEngine

TIERS = {"": "arena", HOSTS_MEMORY: "host", DISK: "disk"}  # by where a hit was loaded from


@dataclass(frozen=True, kw_only=True)
class TierHits:
    """What the first prefills of requests skipped because one tier had it.

    Attributes:
        requests: those that resumed where this tier had their prefix; the arena if it had all of it.
        tokens: that it had, and no faster tier. token_hit_rate: their share of all prompt tokens.
    """

    requests: int
    tokens: int
    token_hit_rate: float


@dataclass(frozen=True, kw_only=True)
class ArenaAlone:
    """The same trace with the same arena, and nothing below it. The attributes are those of `InFlightResult`."""

    hit_tokens: int
    token_hit_rate: float
    ttft_s: dict[str, float]
    latency_s: dict[str, float]


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
        hits: by tier, "arena", "host" and "disk"; their tokens add up to `hit_tokens`.
        host: `TierCounters` of the host's memory; empty without one. disk: `DiskCounters` of the disk, likewise.
        moved_bytes: {"to_host", "from_host", "to_disk", "from_disk"}: to and from the arena as frames, or as files.
        copied_s: seconds that copies from and to the device took, in all. read_s, written_s: those of the disk.
        alone: the arena without what is below it; None where there is nothing, or where not asked.
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
    hits: dict[str, TierHits]
    host: dict[str, int]
    disk: dict[str, int]
    moved_bytes: dict[str, int]
    copied_s: float
    read_s: float
    written_s: float
    alone: ArenaAlone | None


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
    disk_capacity: int = 0,
    narrow_bytes: int = 0,
    loads: Literal["faster", "always"] = "faster",
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
        disk_capacity: bytes of the disk that keep what the arena has taken; 0 for none.
        narrow_bytes: of a checkpoint in the cache; 0 for those of `costs`, which rows have.
        loads: as of `CacheConfig`, by the rates of the device.
        bounds: also run "optimal" and "infinite", and where there is something below the arena, the arena alone.

    Raises:
        ValueError: no requests, an unknown policy or shapes, an arena or a host's memory too small for two
            checkpoints, a disk too small for one and a run of pages, or something below the arena without a cache.
    """
    if not trace:
        raise ValueError("simulate: a trace must hold at least one request, got none")
    started = time.process_time()
    cache_config = replace(cache_config_of(policy), loads=loads)
    engine = EngineConfig(
        cache=cache_config,
        max_rows=max_rows,
        grain=grain,
        prefill_tokens=prefill_tokens,
        shapes=shapes,
    )
    for below_bytes, what in ((host_capacity, "host"), (disk_capacity, "disk")):
        if below_bytes and cache_config.policy == "off":
            raise ValueError(
                f"simulate: {what} memory keeps what is cached, got {below_bytes} bytes of it with policy {policy!r}; "
                "leave it out, or choose another policy"
            )
    cached = replace(costs, checkpoint_bytes=narrow_bytes) if narrow_bytes else costs
    decoding = decode or costs
    virtual = VirtualEngine(
        costs,
        decoding,
        engine,
        capacity,
        device,
        host_capacity=host_capacity,
        disk_capacity=disk_capacity,
        narrow_bytes=narrow_bytes,
    )
    run = _Run(trace, virtual)
    run.go()
    tree, counters = run.scheduler.memory.tree, run.scheduler.counters
    below, disk = run.scheduler.memory.below, run.disk
    seconds = time.process_time() - started
    lengths = np.array([len(trace[i].prompt) for i in run.hits], np.int64)
    skipped = np.array(list(run.hits.values()), np.int64)
    alone = None
    if bounds and (host_capacity or disk_capacity):
        found = simulate_in_flight(
            trace,
            costs,
            policy,
            capacity,
            decode=decode,
            grain=grain,
            max_rows=max_rows,
            prefill_tokens=prefill_tokens,
            shapes=shapes,
            device=device,
            narrow_bytes=narrow_bytes,
            loads=loads,
        )
        alone = ArenaAlone(
            hit_tokens=found.hit_tokens,
            token_hit_rate=found.token_hit_rate,
            ttft_s=found.ttft_s,
            latency_s=found.latency_s,
        )
    return InFlightResult(
        **asked_and_hit(
            trace, cached, policy, capacity, lengths, skipped, grain=grain, bounds=bounds
        ),
        model_spec=model_spec,
        infeasible=run.infeasible,
        used_max=virtual.used_max,
        used_max_over_capacity=virtual.used_max / capacity,
        prefill_tokens=counters.prefill_tokens,
        padded_tokens=virtual.padded_tokens,
        prefill_dispatches=virtual.prefill_dispatches,
        padded_s=virtual.padded_tokens * costs.flops_per_token / run.device.flops_per_second,
        ttft_s=summary([run.first_token[i] - run.arrived[i] for i in run.first_token] or [0.0]),
        latency_s=summary([run.ended[i] - run.arrived[i] for i in run.ended] or [0.0]),
        span_s=run.now - trace[0].arrival_s,
        preemptions=counters.preemptions,
        evictions=0 if tree is None else tree.counters.evictions,
        waits=counters.waits,
        memory=asdict(run.scheduler.memory.holds.counters),
        hits=run.hits_by_tier(int(lengths.sum())),
        host={} if below is None else asdict(below.counters),
        disk={} if disk is None else asdict(disk.counters),
        moved_bytes=run.moved_bytes(),
        copied_s=virtual.copied_s,
        read_s=0.0 if disk is None else disk.read_s,
        written_s=0.0 if disk is None else disk.written_s,
        alone=alone,
        timing=run.device.describe(copies=below is not None, disk=disk is not None),
        seconds=seconds,
    )


class _Run:
    """One trace on its way through one engine."""

    def __init__(self, trace: Sequence[TraceRequest], engine: VirtualEngine):
        self.trace, self.engine = trace, engine
        self.scheduler, self.disk, self.device = engine.scheduler, engine.disk, engine.device
        self.now = 0.0
        self._go_on_to(trace[0].arrival_s)
        self.infeasible = 0
        self.arrived: dict[int, float] = {}
        self.first_token: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.hits: dict[int, int] = {}
        self._loaded: dict[int, tuple[str, int]] = {}  # tier, and tokens that came from there
        self._turns = Turns(trace)

    def go(self) -> None:
        """Runs until every request has ended or was refused. What waits to be written then is not written."""
        while len(self.ended) + self.infeasible < len(self.trace):
            for when, number in self._turns.due(self.now):
                self._arrive(when, number)
            ends = self.engine.begin()
            if ends is not None:
                self._go_on_to(ends)
                for new in self.engine.end():
                    number = int(new.request.request_id)
                    if new.new_token_ids:
                        self._note(number, new.request)
                    if new.finished:
                        self.ended[number] = self.now
                        self._turns.ended(number, self.now)
            elif (following := self._next_s()) is not None:
                self._go_on_to(max(self.now, following))
            else:
                assert not self.scheduler.has_work, "simulate: the scheduler has work and no plan"

    def _next_s(self) -> float | None:
        """When something happens that the scheduler may wait for; None for never."""
        times = [when for when in (self._turns.next_s, self.engine.next_s) if when is not None]
        return min(times, default=None)

    def _go_on_to(self, now: float) -> None:
        """It is now so late."""
        self.now = now
        self.engine.go_on_to(now)

    def _note(self, number: int, request: Request) -> None:
        """Notes when a request has its first token, and what its first prefill skipped."""
        if number not in self.first_token:
            self.first_token[number], self.hits[number] = self.now, request.hit.num_tokens
            if (found := request.hit.look_up) is not None:
                self._loaded[number] = TIERS[found.loaded_from], found.loaded

    def hits_by_tier(self, input_tokens: int) -> dict[str, TierHits]:
        """What requests skipped, by the tier that had it, of so many tokens of prompts."""
        memory = self.scheduler.memory
        there = {"arena": True, "host": memory.below is not None, "disk": self.disk is not None}
        requests, tokens = Counter[str](), Counter[str]()
        for number, hit in self.hits.items():
            tier, loaded = self._loaded.get(number, ("arena", 0))
            requests[tier] += hit > 0
            tokens[tier] += loaded
            tokens["arena"] += hit - loaded
        return {
            tier: TierHits(
                requests=requests[tier],
                tokens=tokens[tier],
                token_hit_rate=tokens[tier] / max(1, input_tokens),
            )
            for tier in there
            if there[tier]
        }

    def moved_bytes(self) -> dict[str, int]:
        """Bytes each way, of the tiers that there are."""
        moved, below = {}, self.scheduler.memory.below
        if below is not None:
            moved["to_host"] = below.counters.saved_frames * self.engine.frame_bytes
            moved["from_host"] = below.counters.loaded_frames * self.engine.frame_bytes
        if self.disk is not None:
            moved["to_disk"] = self.disk.counters.saved_bytes
            moved["from_disk"] = self.disk.counters.loaded_bytes
        return moved

    def _arrive(self, when: float, number: int) -> None:
        self.arrived[number] = when
        try:
            self.engine.add(str(number), self.trace[number])
        except ValueError:
            self.infeasible += 1
            self._turns.ended(number, self.now)

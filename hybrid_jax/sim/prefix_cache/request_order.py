"""A trace through one cache in request order: each request is cached before the next is looked up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.caches import least_capacity, make_cache
from hybrid_jax.sim.prefix_cache.timing import CostModel, Timing, summary
from hybrid_jax.sim.prefix_cache.traces import TraceRequest

LENGTH_BINS = (0, 1_000, 2_000, 4_000, 7_000, 10_000, 15_000, 20_000, 25_000, 30_000)


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Requests whose prompt has at least `tokens` tokens, and fewer than the next bin's.

    Attributes:
        tokens: lower bound.
        requests: how many.
        token_hit_rate: tokens skipped per token of their prompts.
        mean_hit_rate: mean over requests of each one's own.
    """

    tokens: int
    requests: int
    token_hit_rate: float
    mean_hit_rate: float


@dataclass(frozen=True, kw_only=True)
class CacheResult:
    """What one policy did on one trace, by either clock.

    Attributes:
        policy, model_spec, capacity: as asked; capacity in bytes.
        requests, input_tokens, hit_tokens: how many.
        token_hit_rate: hit_tokens / input_tokens.
        flops_saved: FLOPs of the tokens skipped; flops_saved_rate: share of all prefill FLOPs.
        length_bins: by prompt length.
        ttft_s: {"p5", "p50", "p95", "mean"} seconds to the first token.
        timing: the model or table that gives the times.
        evictions: entries evicted.
        used_max, used_max_over_capacity: most bytes ever used, and their share.
        distance_to_optimal, distance_to_infinite: by how much more of the input tokens a clairvoyant policy,
            and a cache without bounds, would have hit in request order; None where not asked.
        seconds: of processor time the run took.
    """

    policy: str
    model_spec: str
    capacity: int
    requests: int
    input_tokens: int
    hit_tokens: int
    token_hit_rate: float
    flops_saved: float
    flops_saved_rate: float
    length_bins: tuple[LengthBin, ...]
    ttft_s: dict[str, float]
    timing: str
    evictions: int
    used_max: int
    used_max_over_capacity: float
    distance_to_optimal: float | None
    distance_to_infinite: float | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Result(CacheResult):
    """What one policy did on one trace in request order.

    Attributes:
        alpha: what the policy tuned to, if it has one.
    """

    alpha: float | None


def simulate(
    trace: Sequence[TraceRequest],
    costs: Costs,
    policy: str,
    capacity: int,
    *,
    model_spec: str = "",
    grain: int = 1,
    timing: Timing | None = None,
    bounds: bool = True,
) -> Result:
    """Runs a trace and measures.

    Args:
        trace: requests in order.
        costs: of the model.
        policy: a name of `caches.NAMES`, "alpha:X" or "alpha-code:X".
        capacity: bytes.
        model_spec: its name, for the result.
        grain: tokens between resume points.
        timing: of a prefill; the default `CostModel` when None.
        bounds: also run "optimal" and "infinite".

    Raises:
        ValueError: no request, an unknown policy, or a capacity below one checkpoint.
    """
    if not trace:
        raise ValueError("simulate: needs at least one request, got none")
    timing = CostModel() if timing is None else timing
    started = time.process_time()
    cache = make_cache(policy, costs, capacity, trace, grain=grain)
    hits = np.array([cache.request(r.prompt, r.whole) for r in trace])
    seconds = time.process_time() - started
    lengths = np.array([len(r.prompt) for r in trace])
    times = [timing.seconds(costs, int(n), int(h)) for n, h in zip(lengths, hits, strict=True)]
    return Result(
        **asked_and_hit(trace, costs, policy, capacity, lengths, hits, grain=grain, bounds=bounds),
        model_spec=model_spec,
        ttft_s=summary(times),
        timing=timing.describe(),
        evictions=cache.evictions,
        used_max=cache.peak,
        used_max_over_capacity=cache.peak / capacity,
        alpha=cache.alpha,
        seconds=seconds,
    )


def asked_and_hit(
    trace: Sequence[TraceRequest],
    costs: Costs,
    policy: str,
    capacity: int,
    lengths: np.ndarray,
    hits: np.ndarray,
    *,
    grain: int,
    bounds: bool,
) -> dict[str, Any]:
    """The fields of a result about the tokens that were asked for and hit, and the distances to bounds if wanted."""
    inputs, hit_tokens = int(lengths.sum()), int(hits.sum())
    rate = hit_tokens / max(1, inputs)
    saved = sum(costs.flops(int(n)) for n in hits)
    distances: dict[str, float] = {}
    for name in ("optimal", "infinite") if bounds else ():
        if name == policy:
            distances[name] = 0.0
        elif name == "infinite" or capacity >= least_capacity(costs):  # else nothing is held
            bound = simulate(trace, costs, name, capacity, grain=grain, bounds=False)
            distances[name] = bound.token_hit_rate - rate
    return {
        "policy": policy,
        "capacity": capacity,
        "requests": len(lengths),
        "input_tokens": inputs,
        "hit_tokens": hit_tokens,
        "token_hit_rate": rate,
        "flops_saved": saved,
        "flops_saved_rate": saved / max(1.0, sum(costs.flops(int(n)) for n in lengths)),
        "length_bins": length_bins(lengths, hits),
        "distance_to_optimal": distances.get("optimal"),
        "distance_to_infinite": distances.get("infinite"),
    }


def length_bins(lengths: np.ndarray, hits: np.ndarray) -> tuple[LengthBin, ...]:
    """Hit rates by prompt length; bins that hold no request are left out."""
    places = np.searchsorted(LENGTH_BINS, lengths, side="right") - 1
    bins = []
    for index, tokens in enumerate(LENGTH_BINS):
        inside = places == index
        if inside.any():
            bins.append(
                LengthBin(
                    tokens=tokens,
                    requests=int(inside.sum()),
                    token_hit_rate=float(hits[inside].sum() / lengths[inside].sum()),
                    mean_hit_rate=float((hits[inside] / lengths[inside]).mean()),
                )
            )
    return tuple(bins)

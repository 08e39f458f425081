"""The published harness: requests come and go by the tick, whatever their allocator gives them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.pools.loads import PoolLoad, PoolResult
from benchmarks.pools.model_sizes import LayerSizes
from benchmarks.pools.published import KV, STATE, FixedDual

DEPARTURE, GROWTH, ARRIVAL = 0, 1, 2  # in this order within a tick
OF_ALLOCATOR = (  # fields of a result that an allocator counts by the same names
    *("rebalances_refused", "migrated_bytes", "wasted_bytes", "peak_bytes"),
    *("evictions", "self_evictions", "pages_evicted"),
)


@dataclass(frozen=True, kw_only=True)
class PaperResult(PoolResult):
    """What the published harness counts, and what it leaves out.

    Attributes:
        oom_count: allocate calls that failed, up to one per layer of a request.
        oom_requests: requests with such a call. All others count as `completed`, whatever they lost.
        hollow: completed requests that lost pages or states while they ran. intact: completed requests that did not.
        rebalance_count, rebalances_refused: moves of capacity between the kinds, done and refused.
        migrated_bytes, wasted_bytes: capacity that changed its kind, and that was lost for ever by that.
        evictions: times that a running request lost its memory; self_evictions: to a call of its own.
        victim_requests, pages_evicted: requests that lost memory, and how many pages and states they lost.
        allocate_calls: calls that the harness makes.
        peak_bytes: most bytes in use at once. reserved_bytes: what the allocator takes from the device.
        cpu_seconds: of the event loop.
    """

    mode: str = "paper"
    oom_requests: int
    intact: int
    rebalances_refused: int
    wasted_bytes: int
    victim_requests: int
    self_evictions: int
    pages_evicted: int
    reserved_bytes: int


def run_paper(
    load: PoolLoad, allocator: FixedDual, layers: LayerSizes, *, name: str, pool_bytes: int
) -> PaperResult:
    """Runs a load through an allocator by the published rules.

    On arrival a request asks once per attention layer for the pages of its prompt and once per recurrent layer for a
    state. It takes a token a tick, first of its prompt, then generated. Where a token begins a page, each attention
    layer asks for it. A request departs at its last token, and goes on even if it was refused something.

    Args:
        load: the requests.
        allocator: empty.
        layers: sizes of the model's pages and states.
        name, pool_bytes: of the allocator, for the result.
    """
    due = events(load, layers)
    prompt_pages = [layers.num_pages(length) for length in load.prompt_lens.tolist()]
    each, states = layers.num_pages_each, layers.num_states
    failures = [0] * len(load)
    allocate, release = allocator.allocate, allocator.release
    start = time.process_time()
    for kind, request in due:
        if kind == GROWTH:
            failures[request] += allocate(request, KV, 1, each)
        elif kind == ARRIVAL:
            failures[request] += allocate(request, KV, prompt_pages[request], each)
            failures[request] += allocate(request, STATE, 1, states)
        else:
            release(request)
    seconds = time.process_time() - start
    completed = {request for request, failed in enumerate(failures) if not failed}
    counters = allocator.counters
    num_growths = len(due) - 2 * len(load)  # the others are arrivals and departures
    hollow = len(completed & counters.victims)
    return PaperResult(
        **load.asked(name, layers.name, pool_bytes),
        **{name: getattr(counters, name) for name in OF_ALLOCATOR},
        oom_count=sum(failures),
        oom_requests=len(load) - len(completed),
        completed=len(completed),
        hollow=hollow,
        intact=len(completed) - hollow,
        rebalance_count=counters.rebalances,
        victim_requests=len(counters.victims),
        allocate_calls=each * num_growths + (each + states) * len(load),
        reserved_bytes=allocator.reserved_bytes,
        cpu_seconds=seconds,
    )


def events(load: PoolLoad, layers: LayerSizes) -> list[tuple[int, int]]:
    """(kind, request) of all events, ordered by tick, kind and request."""
    found = []
    ends = load.prompt_lens + load.gen_lens
    columns = zip(load.arrivals.tolist(), load.prompt_lens.tolist(), ends.tolist(), strict=True)
    page_tokens = layers.page_tokens
    for request, (arrival, prompt, end) in enumerate(columns):
        found += [(arrival, ARRIVAL, request), (arrival + end, DEPARTURE, request)]
        # A page begins with the token after a multiple of page_tokens. The last token's does not count: its tick is
        # the departure's, which comes first.
        first = layers.num_pages(prompt) * page_tokens + 1
        found += [(arrival + token, GROWTH, request) for token in range(first, end, page_tokens)]
    return [(kind, request) for _, kind, request in sorted(found)]

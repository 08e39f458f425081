"""A trace on virtual time: who arrives when, who waits for whom, what does not fit, what is left at the end."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hybrid_jax.byte_sizes import at_least
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.sim.prefix_cache.in_flight import _Run, simulate_in_flight
from hybrid_jax.sim.prefix_cache.request_order import simulate
from hybrid_jax.sim.prefix_cache.timing import DeviceModel
from hybrid_jax.sim.prefix_cache.virtual_engine import (
    FRAME_BYTES,
    VirtualEngine,
    virtual_geometry,
)
from tests.sim.chats import COSTS, KINDS, KV, PLENTY, asked, chat, tokens


def finished(trace, costs=COSTS, policy="lru", capacity=PLENTY, device=None) -> _Run:
    cache = CacheConfig(policy="off" if policy == "none" else policy)
    engine = EngineConfig(cache=cache, grain=32, max_rows=8, prefill_tokens=512)
    run = _Run(trace, VirtualEngine(costs, costs, engine, capacity, device))
    run.go()
    return run


# --- frames ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_bytes", "checkpoint_bytes", "page_tokens", "frame_bytes", "state_frames"),
    [
        (65_536, 26_787_840, 16, 16 * 65_536, 26),  # 25.5 pages
        (KV, 32 * KV, 16, FRAME_BYTES, 2),
        (1024, FRAME_BYTES, 256, FRAME_BYTES, 1),
        (20_000, 1, 16, 320_000, 1),
        (1024, 0, 256, FRAME_BYTES, 0),
        (0, 26_787_840, 0, FRAME_BYTES, 103),  # 102.2
    ],
)
def test_a_page_is_a_frame_of_a_quarter_megabyte_at_least(
    kv_bytes, checkpoint_bytes, page_tokens, frame_bytes, state_frames
):
    costs = replace(COSTS, kv_bytes=kv_bytes, checkpoint_bytes=checkpoint_bytes)
    found = virtual_geometry(costs, 32)
    assert (found.page_tokens, found.frame_bytes) == (page_tokens, frame_bytes)
    assert (found.state_frames, found.frames_per_page) == (state_frames, int(kv_bytes > 0))
    assert (found.has_pages, found.has_state) == (kv_bytes > 0, checkpoint_bytes > 0)


# --- who comes when -------------------------------------------------------------------------------


def test_two_of_the_same_prompt_at_once_compute_it_once():
    prompt = tokens(0, 300)
    trace = [asked(n, 0.0, prompt, tokens(n + 1, 5)) for n in range(2)]
    found = simulate_in_flight(trace, COSTS, "lru", PLENTY)
    assert (found.waits, found.hit_tokens, found.input_tokens) == (1, 288, 600)


def test_a_turn_never_arrives_before_the_one_before_has_ended():
    # All turns are due at once; a plan takes a second.
    run = finished(chat(5, 0.0), device=DeviceModel(dispatch_s=1.0))
    for turn in range(1, 5):
        assert run.arrived[turn] == run.ended[turn - 1] > run.arrived[turn - 1]
    # Each is found in the cache by the next: all but what lies after the last multiple of 32.
    assert [run.hits[n] for n in range(5)] == [0, 128, 256, 384, 512]


def test_a_turn_that_is_due_later_arrives_when_it_is_due():
    run = finished(chat(3, 1000.0))
    assert [run.arrived[n] for n in range(3)] == [0.0, 1000.0, 2000.0]


def test_sessions_do_not_wait_for_each_other():
    run = finished([asked(n, 0.0, tokens(n, 100), tokens(n, 20)) for n in range(4)])
    assert set(run.arrived.values()) == {0.0}


def test_what_can_never_fit_is_counted_and_does_not_block_its_session():
    # 10 frames: 8 pages beside a checkpoint, 128 tokens.
    trace = [
        asked("a", 0.0, tokens(0, 500), tokens(1, 5)),
        asked("a", 1.0, tokens(2, 50), tokens(3, 5)),
        asked("b", 2.0, tokens(4, 40), tokens(5, 5)),
    ]
    found = simulate_in_flight(trace, COSTS, "lru", 10 * FRAME_BYTES)
    assert (found.infeasible, found.requests, found.input_tokens) == (1, 2, 90)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_arena_evicts_comes_back_from_the_hosts_memory(kind):
    """Sessions take turns, and the arena holds few of them."""
    trace = sorted(
        (turn for session in range(8) for turn in chat(4, 1000.0, session)),
        key=lambda request: (request.arrival_s, request.session_id),
    )
    trace = [replace(request, arrival_s=20.0 * n) for n, request in enumerate(trace)]
    costs, capacity = KINDS[kind], (16 if kind == "recurrent" else 48) * FRAME_BYTES
    alone = simulate_in_flight(trace, costs, "lru", capacity)
    plenty = simulate_in_flight(trace, costs, "lru", PLENTY)
    below = simulate_in_flight(trace, costs, "lru", capacity, host_capacity=PLENTY)
    assert alone.host == {} and alone.copied_s == 0
    assert alone.token_hit_rate == 0 < below.token_hit_rate == plenty.token_hit_rate
    assert below.host["loads"] > 5 and below.host["loaded_tokens"] > 0
    moved = (below.host["saved_frames"] + below.host["loaded_frames"]) * FRAME_BYTES
    assert below.copied_s >= 0.999 * moved / DeviceModel().host_bytes_per_second
    with pytest.raises(ValueError, match="host memory must hold two checkpoints"):
        simulate_in_flight(trace, costs, "lru", capacity, host_capacity=1)


@pytest.mark.parametrize(
    ("length", "padded"), [(256, 0), (300, 212), (1024, 0), (1000, 24), (1030, 26)]
)
def test_times_are_those_of_the_device_and_padding_is_computed_too(length, padded):
    # 512 tokens a plan, a second each, and a GFLOP a token at 100 GFLOP/s. The four steps after the first token
    # are part of the last plan, and take nothing to speak of.
    device = DeviceModel(dispatch_s=1.0, flops_per_second=1e11, bytes_per_second=1e30)
    trace = [asked(0, 5.0, tokens(0, length), tokens(1, 5))]
    found = simulate_in_flight(trace, COSTS, "none", PLENTY, device=device, prefill_tokens=512)
    assert (found.prefill_tokens, found.padded_tokens) == (length, padded)
    assert found.padded_s == pytest.approx(padded / 100)
    assert found.ttft_s["mean"] == pytest.approx(-(-length // 512) + (length + padded) / 100)
    assert found.latency_s["mean"] == found.ttft_s["mean"] == pytest.approx(found.span_s)
    assert found.hit_tokens == 0 and found.timing == device.describe()


def test_coarse_shapes_pad_more_of_short_prompts_and_less_of_long_ones():
    def padded(length: int, shapes: str) -> tuple[int, int]:
        """Tokens of padding, and dispatches."""
        trace = [asked(0, 0.0, tokens(0, length), tokens(1, 5))]
        found = simulate_in_flight(trace, COSTS, "none", PLENTY, shapes=shapes)
        return found.padded_tokens, found.prefill_dispatches

    assert padded(40, "fine") == (88, 1) == padded(40, "coarse")
    assert padded(250, "fine") == (6, 1) and padded(250, "coarse") == (384 - 250, 1)
    assert padded(20, "fine") == (12, 1) and padded(20, "coarse") == (108, 1)
    assert padded(4200, "fine") == (8192 - 4200, 1)
    assert padded(4200, "coarse") == (2560 + 896 + 896 - 4200, 3)


# --- beside request order -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["lru", "sglang", "adaptive", "alpha:1"])
def test_requests_far_apart_hit_what_they_hit_one_after_the_other(kind, policy):
    trace = [
        turn for turns in zip(*(chat(6, 9e5, s) for s in range(3)), strict=True) for turn in turns
    ]
    trace = [replace(turn, arrival_s=1e5 * n) for n, turn in enumerate(trace)]
    found = simulate_in_flight(trace, KINDS[kind], policy, PLENTY)
    other = simulate(trace, KINDS[kind], policy, PLENTY, grain=32, bounds=False)
    assert found.hit_tokens == other.hit_tokens > 0
    assert found.waits == found.preemptions == found.evictions == 0


# --- memory that is short -------------------------------------------------------------------------


def test_a_pool_that_is_short_sends_requests_back_and_all_of_them_end():
    trace = [asked(n, 0.0, tokens(n, 60), tokens(50 + n, 100)) for n in range(4)]
    found = simulate_in_flight(trace, COSTS, "lru", 26 * FRAME_BYTES)
    assert found.preemptions > 0 and (found.requests, found.infeasible) == (4, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["lru", "adaptive", "none"])
@pytest.mark.parametrize("frames", [40, 100])
def test_at_the_end_every_frame_is_free_or_in_the_tree(kind, policy, frames):
    trace = sorted(
        (turn for s in range(5) for turn in chat(5, 0.01, s)), key=lambda turn: turn.arrival_s
    )
    run = finished(trace, KINDS[kind], policy, frames * FRAME_BYTES)
    run.scheduler.check_invariants()
    stats = run.scheduler.stats()
    assert stats["free_frames"] + stats["cached_frames"] == stats["num_frames"]
    assert len(run.ended) + run.infeasible == len(trace)
    run.scheduler.reset_prefix_cache()
    assert run.scheduler.stats()["free_frames"] == frames


# --- mistakes -------------------------------------------------------------------------------------


def test_no_requests_are_an_error():
    with pytest.raises(ValueError, match="a trace must hold at least one request, got none$"):
        simulate_in_flight([], COSTS, "lru", PLENTY)


def test_an_arena_below_two_checkpoints_is_an_error():
    least = 4 * FRAME_BYTES
    told = re.escape(at_least(least, least - 1))
    with pytest.raises(ValueError, match=f"must hold two checkpoints, {told}$"):
        simulate_in_flight(chat(1, 0.0), COSTS, "lru", least - 1)


def test_a_policy_that_no_engine_has_is_an_error():
    with pytest.raises(ValueError, match="'optimal'"):
        simulate_in_flight(chat(1, 0.0), COSTS, "optimal", PLENTY)


def test_what_request_order_tells_is_told_here_too():
    trace = chat(5, 1000.0)
    found = simulate_in_flight(trace, COSTS, "lru", PLENTY, bounds=True)
    ordered = simulate(trace, COSTS, "lru", PLENTY, grain=32)
    for name in ("hit_tokens", "token_hit_rate", "flops_saved", "flops_saved_rate", "length_bins"):
        assert getattr(found, name) == getattr(ordered, name), name
    assert found.distance_to_optimal == ordered.distance_to_optimal == 0.0
    assert found.distance_to_infinite == ordered.distance_to_infinite > 0
    assert 0 < found.used_max <= PLENTY
    assert found.used_max_over_capacity == found.used_max / PLENTY


def test_memory_is_told():
    trace = sorted((t for s in range(6) for t in chat(6, 0.01, s)), key=lambda t: t.arrival_s)
    found = simulate_in_flight(trace, COSTS, "adaptive", 100 * FRAME_BYTES)
    assert found.memory["evicted_page_frames"] > 0
    assert 0 < found.memory["peak_live_frames"] <= 100


def test_used_memory_never_exceeds_the_capacity():
    trace = [asked(n, 0.0, tokens(n, 200), tokens(n + 50, 40)) for n in range(12)]
    found = simulate_in_flight(trace, COSTS, "adaptive", 26 * FRAME_BYTES)
    assert 16 * FRAME_BYTES < found.used_max <= 26 * FRAME_BYTES


def test_narrow_checkpoints_fit_where_others_do_not():
    """Eight prompts that come back, in room for eight of their pages and narrow checkpoints, and two rows."""
    texts = [tokens(n, 64) for n in range(8)]
    trace = [asked(n, 100.0 * n, texts[n % 8], [1]) for n in range(16)]
    costs = replace(COSTS, checkpoint_bytes=16 * 16 * KV)  # 16 frames
    capacity = (8 * (5 + 4) + 2 * 16 + 5) * FRAME_BYTES
    wide = simulate_in_flight(trace, costs, "lru", capacity)
    narrow = simulate_in_flight(trace, costs, "lru", capacity, narrow_bytes=4 * FRAME_BYTES)
    assert wide.hit_tokens == 0
    assert narrow.hit_tokens == 8 * 32
    assert narrow.memory["widened_checkpoints"] == 8

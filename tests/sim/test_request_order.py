"""What a simulation reports, on traces worked out by hand; and that it says the same each time."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.caches import NAMES
from hybrid_jax.sim.prefix_cache.request_order import LENGTH_BINS, Result, simulate
from hybrid_jax.sim.prefix_cache.timing import CostModel
from hybrid_jax.sim.prefix_cache.traces import TraceRequest
from tests.sim.tiny import COSTS, request

# Hits 0, 8 and 12 with room for everything: 4 + 10 + 13 tokens asked for.
TRACE = [request("pppp", "qqqq"), request("ppppqqqqrr", "ss"), request("ppppqqqqrrssT")]
QUADRATIC = Costs(flops_per_token=10, flops_per_key=2, kv_bytes=1, checkpoint_bytes=10)


def run(
    trace=TRACE, policy: str = "lru", capacity: int = 1000, costs: Costs = COSTS, **options
) -> Result:
    return simulate(trace, costs, policy, capacity, bounds=False, **options)


def test_tokens_are_counted_and_the_rate_is_their_share():
    found = run()
    assert (found.requests, found.input_tokens, found.hit_tokens) == (3, 27, 20)
    assert found.token_hit_rate == 20 / 27


def test_what_was_asked_is_repeated():
    found = run(policy="alpha:0.5", model_spec="mine")
    assert (found.policy, found.model_spec, found.capacity) == ("alpha:0.5", "mine", 1000)


def test_flops_saved_are_those_of_the_tokens_skipped():
    found = run(costs=QUADRATIC)
    flops = lambda n: 10 * n + n * (n + 1)
    assert found.flops_saved == flops(8) + flops(12)
    assert found.flops_saved_rate == found.flops_saved / (flops(4) + flops(10) + flops(13))


def test_times_to_first_token_are_of_the_tokens_left():
    found = run(timing=CostModel(flops_per_second=1, overhead_s=100))
    # 4, 2 and 1 tokens are computed.
    assert found.ttft_s == pytest.approx(
        {"p5": 101.1, "p50": 102, "p95": 103.8, "mean": 100 + 7 / 3}
    )
    assert found.timing == "100000 ms + FLOPs / 1e-12 TFLOP/s"


def test_evictions_and_the_most_bytes_used_are_told():
    # 32 bytes, then 11 more: of 40 one checkpoint of 10 goes and 33 are used.
    found = run([*TRACE[:2], request("z")], capacity=40)
    assert (found.evictions, found.used_max) == (1, 33)
    assert found.used_max_over_capacity == 33 / 40


def test_bounds_that_were_not_asked_for_are_none():
    found = run()
    assert found.distance_to_optimal is None and found.distance_to_infinite is None


def test_bins_are_by_prompt_length_and_count_every_request_once():
    lengths = [10, 999, 1000, 1999, 2000, 30_000, 40_000]
    trace = [request("x" * length) for length in lengths]
    found = run(trace, policy="infinite")
    assert [(part.tokens, part.requests) for part in found.length_bins] == [
        (0, 2), (1000, 2), (2000, 1), (30_000, 2),
    ]  # fmt: skip
    assert all(part.tokens in LENGTH_BINS for part in found.length_bins)


def test_a_bins_rate_weighs_tokens_and_its_mean_weighs_requests():
    # Of 10 tokens none hit, of 20 tokens 10.
    (part,) = run([request("x" * 10), request("x" * 10 + "y" * 10)]).length_bins
    assert (part.token_hit_rate, part.mean_hit_rate) == (10 / 30, 0.25)


def test_a_result_is_plain_data():
    found = run().as_dict()
    assert found["ttft_s"].keys() == {"p5", "p50", "p95", "mean"}
    assert found["length_bins"][0] == {
        "tokens": 0, "requests": 3, "token_hit_rate": 20 / 27, "mean_hit_rate": (0 + 0.8 + 12 / 13) / 3,
    }  # fmt: skip


def test_no_requests_are_an_error():
    with pytest.raises(ValueError, match="^simulate: needs at least one request, got none$"):
        run([])


def test_an_unknown_policy_is_an_error():
    with pytest.raises(ValueError, match="^simulate: no policy 'fifo'; known are none, vllm, "):
        run(policy="fifo")


# --- random chats ---------------------------------------------------------------------------------


def chats(seed: int, count: int = 120) -> list[TraceRequest]:
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 50, 40, np.int32)
    histories = [system for _ in range(6)]
    trace = []
    for turn in range(count):
        chat = int(rng.integers(len(histories)))
        prompt = np.concatenate(
            (histories[chat], rng.integers(0, 50, rng.integers(1, 60), np.int32))
        )
        output = rng.integers(0, 50, rng.integers(0, 40), np.int32)
        trace.append(
            TraceRequest(
                session_id=chat, turn_id=turn, arrival_s=turn, prompt=prompt, output=output
            )
        )
        grown = np.concatenate((prompt, output))
        histories[chat] = system if len(grown) > 800 else grown
    return trace


POLICIES = [*NAMES, "alpha:0.7"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("grain", [1, 8])
def test_the_same_trace_twice_gives_the_same_result(policy, grain):
    first, second = (run(chats(1), policy, 1200, QUADRATIC, grain=grain) for _ in range(2))
    assert replace(first, seconds=0) == replace(second, seconds=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_exceeds_its_budget_or_hits_more_than_an_endless_cache(policy):
    rng = random.Random(policy)
    trace = chats(rng.randrange(100))
    bound = run(trace, "infinite").hit_tokens
    for capacity in (200, 1200, 10**6):
        found = run(trace, policy, capacity, QUADRATIC)
        assert found.used_max <= capacity
        assert found.hit_tokens <= bound


@pytest.mark.parametrize("policy", ["marconi", "marconi-code"])
def test_a_tuned_alpha_keeps_what_spares_more_than_what_is_newer(policy):
    # A document of 210 bytes is asked about every sixth time; five strangers of 40 between do not fit beside it.
    strangers = [request(letter * 30) for letter in "abcdefghijklmnopqrstuvwxyz"]
    trace = []
    for turn in range(120):
        document = request("D" * 200 + chr(33 + turn // 6))
        trace.append(strangers[turn % 26] if turn % 6 else document)
    found, lru = run(trace, policy, 300), run(trace, "alpha:0", 300)
    assert found.alpha > 0 and lru.hit_tokens == 0
    assert found.hit_tokens > 200 * 10

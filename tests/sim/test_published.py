"""The shipped traces through baselines, beside the hit rates that Marconi's published simulator gives for them.

Those were taken from the simulator's own code on the same traces, with the paper's 7B model. They are met where bytes
are counted the same way. Two are not compared: the published SGLang+ on the agents' trace (13.7 and 25.1 % at 60 and
100 GB, here 14.6 and 31.6 %), which miscounts what its evictions free and so now overruns its budget, now evicts too
much; and the published Marconi, whose FLOPs of feed-forward blocks have a slip besides. In their place stand runs of
the same policies with the bytes counted exactly.
"""

from __future__ import annotations

from functools import cache

import pytest

from hybrid_jax.cache.policy.flop_aware import FlopAware, whole_prefix_efficiency
from hybrid_jax.cache.policy.value import saved_flops
from hybrid_jax.sim.model_specs import load_spec
from hybrid_jax.sim.prefix_cache.caches import Simulated
from hybrid_jax.sim.prefix_cache.request_order import Result, simulate
from hybrid_jax.sim.prefix_cache.traces import TraceRequest, read_trace
from tests.drawing import left_to_all

GB = 10**9
FILES = {
    "chat": "lmsys_s1_sps0.5",
    "short": "sharegpt_s1_sps1",
    "agents": "swebench_s1_sps5_art10",
    "log": "mooncake_conv_first1500",
}


@pytest.fixture(scope="module")
def trace(root_of_traces):
    """The requests of a file, read once."""
    return cache(lambda name: read_trace(root_of_traces / f"{FILES[name]}.seg.jsonl.gz"))


@pytest.fixture(scope="module")
def root_of_traces(request):
    return request.config.rootpath / "benchmarks" / "traces"


def percent(requests: list[TraceRequest], policy: str, gigabytes: float, model="paper_7b") -> float:
    return 100 * result(requests, policy, gigabytes, model).token_hit_rate


def result(requests, policy, gigabytes, model="paper_7b") -> Result:
    costs = load_spec(model).costs
    return simulate(requests, costs, policy, int(gigabytes * GB), bounds=False)


@pytest.mark.parametrize(
    ("name", "policy", "gigabytes", "published"),
    [
        ("chat", "sglang", 2, 10.18),
        ("chat", "sglang", 5, 38.04),
        ("short", "sglang", 1, 6.51),
        ("short", "sglang", 2, 18.07),
        ("short", "sglang", 4, 39.89),
        ("log", "sglang", 100, 4.95),
        ("short", "vllm", 2, 0.68),
        ("short", "vllm", 4, 2.02),
        ("agents", "vllm", 60, 3.92),
        ("agents", "vllm", 100, 4.24),
    ],
)
@left_to_all("agents")
def test_baselines_hit_what_the_published_simulator_hits(trace, name, policy, gigabytes, published):
    assert percent(trace(name), policy, gigabytes) == pytest.approx(published, abs=0.5)


@pytest.mark.parametrize(
    ("name", "gigabytes", "exact"),
    [("chat", 5, 38.26), ("agents", 60, 14.9), ("agents", 100, 31.8), ("agents", 140, 47.8)],
)
def test_lru_hits_what_the_published_one_hits_with_bytes_counted_exactly(
    trace, name, gigabytes, exact
):
    assert percent(trace(name), "lru", gigabytes) == pytest.approx(exact, abs=0.2)


@pytest.mark.parametrize(("gigabytes", "exact"), [(5, 62.7), (10, 79.6)])
def test_lru_hits_more_where_states_are_as_large_as_real_ones(trace, gigabytes, exact):
    found = percent(trace("chat"), "lru", gigabytes, "paper_7b_real")
    assert found == pytest.approx(exact, abs=0.2)


@pytest.mark.parametrize(
    ("name", "bound"), [("chat", 99.26), ("short", 95.70), ("agents", 51.61), ("log", 27.82)]
)
def test_an_endless_cache_hits_the_bound_of_the_readme(trace, name, bound):
    assert percent(trace(name), "infinite", 1) == pytest.approx(bound, abs=0.01)


def test_flop_aware_eviction_with_the_papers_definition_hits_as_much(trace):
    assert percent(trace("agents"), "alpha:1", 60) == pytest.approx(16.7, abs=1)


def own_edge_always(node, costs, tier):
    """As the paper may be read too: state and edge count where only the state would be freed."""
    edge = len(node.tokens) * costs.kv_bytes
    return saved_flops(node, costs, tier) / (costs.checkpoint_bytes + edge)


@pytest.mark.parametrize(
    ("efficiency", "gigabytes", "exact"),
    [
        (whole_prefix_efficiency, 60, 34.4),
        (whole_prefix_efficiency, 100, 39.3),
        (whole_prefix_efficiency, 140, 39.7),
        (own_edge_always, 60, 16.7),
        (own_edge_always, 100, 22.3),
        (own_edge_always, 140, 25.9),
    ],
)
def test_alpha_1_hits_what_the_published_formulas_hit_with_bytes_counted_exactly(
    trace, efficiency, gigabytes, exact
):
    costs, requests = load_spec("paper_7b").costs, trace("agents")
    caching = Simulated(costs, gigabytes * GB, FlopAware(1.0, costs, efficiency=efficiency))
    hits = sum(caching.request(r.prompt, r.whole) for r in requests)
    total = sum(len(r.prompt) for r in requests)
    assert 100 * hits / total == pytest.approx(exact, abs=0.6)


@pytest.mark.parametrize(
    ("name", "policy", "gigabytes"),
    [("chat", "sglang", 2), ("agents", "sglang", 60), ("agents", "lru", 60), ("short", "vllm", 2)],
)
def test_the_budget_holds_where_the_published_simulator_overruns_it(trace, name, policy, gigabytes):
    found = result(trace(name), policy, gigabytes)
    assert 0.99 < found.used_max_over_capacity <= 1

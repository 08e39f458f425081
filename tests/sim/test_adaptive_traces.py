"""The shipped traces through `adaptive` and the clairvoyant policy: what learning and knowing bring there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hybrid_jax.sim.model_specs import load_spec
from hybrid_jax.sim.prefix_cache.request_order import Result, simulate
from hybrid_jax.sim.prefix_cache.traces import read_trace
from tests.drawing import left_to_all

GB = 10**9
FILES = {
    "chat": "lmsys_s1_sps0.5",
    "short": "sharegpt_s1_sps1",
    "agents": "swebench_s1_sps5_art10",
    "log": "mooncake_conv_first1500",
}
CELLS = [
    *(("chat", 2), ("chat", 5), ("chat", 10)),
    *(("short", 1), ("short", 2), ("short", 4)),
    *(("agents", 60), ("agents", 100), ("agents", 140)),
    *(("log", 100), ("log", 200)),
]


@pytest.fixture(scope="module")
def run(request):
    """A policy on a file with so many GB, and the paper's 7B model; every run is made once."""
    folder = request.config.rootpath / "benchmarks" / "traces"
    trace = cache(lambda name: read_trace(folder / f"{FILES[name]}.seg.jsonl.gz"))
    costs = load_spec("paper_7b").costs

    @cache
    def made(name: str, gigabytes: int, policy: str, again: int = 0) -> Result:
        return simulate(trace(name), costs, policy, gigabytes * GB, bounds=False)

    return made


@pytest.fixture(scope="module")
def percent(run):
    return lambda *cell: 100 * run(*cell).token_hit_rate


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gigabytes"), CELLS)
def test_adaptive_is_nowhere_worse_than_sglang_by_half_a_point(percent, name, gigabytes):
    assert percent(name, gigabytes, "adaptive") >= percent(name, gigabytes, "sglang") - 0.5


@pytest.mark.slow
@left_to_all
def test_adaptive_closes_four_tenths_of_the_gap_to_the_clairvoyant_on_average(percent):
    shares = []
    for cell in CELLS:
        least, most = percent(*cell, "sglang"), percent(*cell, "optimal")
        assert most > least + 2, cell
        shares.append((percent(*cell, "adaptive") - least) / (most - least))
    assert sum(shares) / len(shares) >= 0.40, [round(share, 2) for share in shares]


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("chat", 5), ("short", 2), ("agents", 60), ("log", 100)]
)
def test_a_clairvoyant_hits_no_less_than_who_only_remembers(percent, name, gigabytes):
    most = percent(name, gigabytes, "optimal")
    assert most >= percent(name, gigabytes, "lru")
    assert most >= percent(name, gigabytes, "adaptive")


@pytest.mark.parametrize("policy", ["adaptive", "optimal"])
def test_a_trace_run_twice_gives_the_same_object(run, policy):
    first, second = (run("short", 2, policy, again) for again in range(2))
    assert first is not second
    assert replace(first, seconds=0).as_dict() == replace(second, seconds=0).as_dict()


@pytest.mark.parametrize("policy", ["adaptive", "optimal"])
def test_memory_is_used_up_and_no_more(run, policy):
    assert 0.99 < run("short", 2, policy).used_max_over_capacity <= 1

"""Whatever the cache keeps and evicts: the same tokens, with room for hardly more than one sequence."""

from __future__ import annotations

import numpy as np
import pytest

from tests.exactness.jobs import Job

POLICIES = ("lru", "sglang", "marconi", "marconi-code", "alpha:1", "adaptive")
MODELS = ("nemotron_h_moe", "mamba2", "windowed")


def conversations(bench, rounds=4):
    """Turns of three conversations that share a beginning, then a stranger, over and over."""
    shared = bench.prompt(70, seed=1)
    histories = [shared + bench.prompt(5 + n, seed=20 + n) for n in range(3)]
    for number in range(rounds):
        declared = (33, 70)  # the first is no grain boundary
        turns = [
            Job(prompt=history[:170], max_tokens=12, cache_breakpoints=declared)
            for history in histories
        ]
        run = bench.check([*turns, Job(prompt=bench.prompt(100, seed=50 + number), max_tokens=3)])
        histories = [
            tuple(request.tokens) + bench.prompt(4, seed=90 + number)
            for request in run.requests[:3]
        ]
        yield run


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_every_policy_evicts_and_hits_and_changes_no_token(bench_of, name, policy):
    bench = bench_of(name, "padded")
    bench.start_over(policy="off")
    expected = [run.outputs for run in conversations(bench)]
    bench.start_over(1.6, policy=policy)
    runs = list(conversations(bench))
    assert [run.outputs for run in runs] == expected
    moved = {key: sum(run.moved[key] for run in runs) for key in runs[0].moved}
    assert moved["cache_hits"] >= 3, moved
    evictions = moved["cache_leaf_evictions"] + moved["cache_tombstone_evictions"]
    assert evictions >= 8, moved


def test_the_order_in_which_policies_evict_differs(bench_of):
    """A run that cannot tell policies apart would prove nothing."""
    bench, hits = bench_of("nemotron_h_moe", "padded"), {}
    for policy in POLICIES:
        bench.start_over(1.6, policy=policy)
        hits[policy] = tuple(np.concatenate([run.cached for run in conversations(bench)]).tolist())
    assert len(set(hits.values())) >= 2, hits

"""bfloat16: the same executables give the same bits, whoever else is in the batch and whatever was cached."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.exactness.jobs import Job


@pytest.fixture(params=("nemotron_h_moe",))
def bench(request, bench_of):
    return bench_of(request.param, "bfloat16")


def jobs_of(bench):
    return [
        Job(prompt=bench.prompt(n, seed=n), max_tokens=40, temperature=0.6 * (n % 2), seed=n)
        for n in (31, 64, 33, 129, 65)
    ]


def test_the_same_run_twice(bench):
    runs = []
    for _ in range(2):
        bench.forget()
        runs.append(bench.run(jobs_of(bench)))
    assert runs[0].bits == runs[1].bits
    assert runs[0].folds >= 5
    assert all(np.isfinite(e.logprob) for r in runs[0].requests for e in r.output.logprobs)


def test_batch_mates_and_rows_change_no_bit(bench):
    """One prefill and one decode shape, and chunks cut at the same tokens: nothing else may matter."""
    jobs = jobs_of(bench)
    alone = []
    for job in jobs:
        bench.forget()
        alone += bench.run([job]).bits
    bench.forget()
    together = bench.run([replace(job, arrive=5 * i) for i, job in enumerate(reversed(jobs))])
    assert together.bits == alone[::-1]


def test_a_hit_and_the_same_hit(bench):
    job = Job(prompt=bench.prompt(101, seed=5), max_tokens=40)
    bench.run([job])
    mate = Job(prompt=bench.prompt(50, seed=6), max_tokens=60)
    first, second = bench.run([job]), bench.run([mate, job])
    assert first.cached == second.cached[1:] == [96]
    assert first.bits == second.bits[1:]

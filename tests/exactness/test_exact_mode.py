"""Exact mode: the bits of every log-probability are the same, whatever the cache, chunks, batch and memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.drawing import left_to_all
from tests.exactness.conftest import EXACT_NAMES
from tests.exactness.engines import short_of_memory
from tests.exactness.jobs import Job

pytestmark = pytest.mark.as_users
EDGES = (1, 31, 32, 33, 64, 65, 129)


BENCHES = [(name, "exact") for name in EXACT_NAMES] + [("with_cut", "exact_fp8")]


@pytest.fixture(params=BENCHES, ids="-".join)
def bench(request, bench_of):
    return bench_of(*request.param)


def jobs_of(bench, max_tokens=40):
    return [
        Job(
            prompt=bench.prompt(n, seed=300 + n),
            max_tokens=max_tokens,
            logprobs=5,
            temperature=0.7 * (n % 2),
            top_p=0.9,
            seed=n,
        )
        for n in EDGES
    ]


def alone(bench, jobs):
    """Each job cold, with nobody beside it."""
    bits = []
    for job in jobs:
        bench.forget()
        run = bench.check([job])
        assert run.cached == [0]
        bits += run.bits
    bench.forget()
    return bits


@left_to_all("with_unknown_kind", "with_cut-exact_fp8", "windowed", "jamba", "mamba2")
def test_batches_rows_and_arrivals_change_no_bit(bench):
    jobs = jobs_of(bench)
    expected = alone(bench, jobs)
    assert bench.check(jobs).bits == expected
    bench.forget()
    order = np.random.default_rng(3)
    arrivals = [replace(job, arrive=int(order.integers(0, 60))) for job in reversed(jobs)]
    assert bench.check(arrivals).bits == expected[::-1]
    bench.forget()
    mates = [Job(prompt=bench.prompt(50 + i, seed=i), max_tokens=70, abort_at=9) for i in range(3)]
    run = bench.check([*mates[:2], *jobs[-2:], mates[2]])
    assert run.bits[2:4] == expected[-2:]


def test_a_cache_hit_changes_no_bit(bench):
    jobs = jobs_of(bench)[-4:]
    expected = alone(bench, jobs)
    for job, bits in zip(jobs, expected, strict=True):
        bench.run([job])
        again = bench.check([job])
        assert again.cached == [(len(job.prompt) - 1) // 32 * 32]
        assert again.bits == [bits]
        bench.forget()


def test_shared_prefixes_change_no_bit(bench):
    shared = bench.prompt(100, seed=6)
    jobs = [
        Job(prompt=shared + bench.prompt(n, seed=n), max_tokens=20, logprobs=5) for n in (3, 20, 33)
    ]
    expected = alone(bench, jobs)
    run = bench.check(jobs)
    assert run.moved["cache_hit_tokens"] >= 2 * 96
    assert run.bits == expected


def test_decoding_a_token_and_prefilling_it_agree_to_the_bit(bench):
    whole = bench.check([Job(prompt=bench.prompt(40, seed=12), max_tokens=100, logprobs=5)])
    tokens, entries = tuple(whole.requests[0].tokens), whole.bits[0][2:]
    for cut in (41, 63, 64, 65, 95, 96, 97, 128, 131):
        bench.forget()
        run = bench.check([Job(prompt=tokens[:cut], max_tokens=140 - cut, logprobs=5)])
        assert run.cached == [0]
        assert run.bits[0][2:] == entries[cut - 40 :], f"prefill of {cut} tokens, then decode"


def test_preemption_changes_no_bit(bench):
    bench.start_over(1.5)
    jobs = [
        Job(prompt=bench.prompt(n, seed=n), max_tokens=150, logprobs=5, temperature=0.5, seed=n)
        for n in (25, 20, 31)
    ]
    expected = alone(bench, jobs)
    with short_of_memory(bench.engine, at=(45, 80)):
        run = bench.check(jobs)
    assert run.moved["preemptions"] >= 2
    assert run.bits == expected


def test_samples_of_one_prompt_are_as_if_alone(bench):
    """No fork: its log-probabilities would come from another executable."""
    prompt = bench.prompt(77, seed=11)
    jobs = [
        Job(prompt=prompt, temperature=0.8, seed=4, sample_index=i, group="g", logprobs=3)
        for i in range(3)
    ]
    jobs[1] = replace(jobs[1], repetition_penalty=1.3)
    expected = alone(bench, [replace(job, group=None) for job in jobs])
    run = bench.check(jobs)
    assert run.bits == expected and run.moved["forks"] == 0
    assert run.cached == [0, 64, 64]


def test_log_probabilities_of_prompts_have_the_same_bits_beside_others(bench):
    jobs = [replace(job, prompt_logprobs=2, max_tokens=5) for job in jobs_of(bench)]
    expected = alone(bench, jobs)
    run = bench.check(jobs)
    assert run.bits == expected
    entries = [[repr(entry) for entry in r.output.prompt_logprobs] for r in run.requests]
    again = bench.check([replace(job, arrive=3 * i) for i, job in enumerate(jobs)])
    assert [[repr(entry) for entry in r.output.prompt_logprobs] for r in again.requests] == entries

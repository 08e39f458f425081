"""Random arrivals, aborts, pools and shared prefixes beside the plain definition, on poisoned memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawing import EVERYTHING
from tests.exactness.jobs import Job
from tests.tiny_models import MODELS

ROOMS = (0.7, 1.0, 1.2, 2.2)


def random_jobs(prompt, longest: int, count: int, rng: np.random.Generator) -> list[Job]:
    """Jobs whose prompts leave one of two trunks somewhere, and fit the pool."""
    jobs = []
    for _ in range(count):
        shared = rng.choice((0, 0, 0, 32, 64, 65, 97, 128, rng.integers(130)))
        tokens = prompt(shared, seed=rng.integers(2))
        tokens += prompt(rng.integers(1, 40), seed=rng.integers(1000, 1010))
        tokens = tokens[: longest - 1]
        jobs.append(
            Job(
                prompt=tokens,
                max_tokens=min(int(rng.choice((1, 40, 120, 160))), longest - len(tokens)),
                temperature=float(rng.choice((0.0, 0.8))),
                top_k=int(rng.choice((0, 20))),
                top_p=0.9,
                seed=int(rng.integers(5)),
                sample_index=int(rng.integers(3)),
                prompt_logprobs=1 if rng.random() < 0.1 else None,
                repetition_penalty=float(rng.choice((1.0, 1.0, 1.0, 1.2))),
                frequency_penalty=float(rng.choice((0.0, 0.0, 0.0, 0.5))),
                stop_ids=frozenset(range(rng.choice((0, 0, 0, 2)))),
                arrive=int(rng.integers(20)),
                abort_at=int(rng.integers(1, 60)) if rng.random() < 0.2 else None,
            )
        )
        if rng.random() < 0.3:
            first = jobs[-1] = replace(jobs[-1], group=f"g{len(jobs)}")
            later = int(rng.choice((0, 0, 3)))
            jobs += [
                replace(first, sample_index=i, arrive=first.arrive + later, abort_at=None)
                for i in range(3, 3 + rng.integers(1, 4))
            ]
    return jobs


# Exact mode does not fork; a prefill of one grain a step is never computing what another row waits for.
NEVER = {"exact": {"forks"}, "fine": {"waits"}}
BENCHES = [("bamba", "padded"), ("mamba2", "padded")]
if EVERYTHING:
    BENCHES = [(n, s) for n in MODELS for s in ("padded", "fine", "coarse", "exact")]


@pytest.mark.parametrize(("name", "engine"), BENCHES)
def test_random_traffic_gives_the_plain_tokens(bench_of, name, engine):
    bench = bench_of(name, engine)
    seen: Counter = Counter()

    @settings(max_examples=200 if EVERYTHING else 20)
    @given(
        # Jobs come from a generator: hypothesis likes them alike, and then nobody is ever preempted.
        count=st.integers(3, 9),
        seed=st.integers(0, 2**32 - 1),
        room=st.sampled_from(ROOMS),
        forget_at=st.frozensets(st.integers(0, 80), max_size=2),
    )
    def check(count, seed, room, forget_at):
        bench.start_over(room)
        longest = bench.engine.scheduler.max_output(0)
        batch = random_jobs(bench.prompt, longest, count, np.random.default_rng(seed))
        try:
            run = bench.check(batch, forget_at=forget_at)
        finally:
            for request_id in list(bench.engine._live):  # a failure must not stop the shrinking
                bench.engine.abort(request_id)
            while bench.engine.has_work:
                bench.engine.step()
        seen.update({key: value for key, value in run.moved.items() if value > 0})
        seen["aborted"] += sum(request.finish_reason == "abort" for request in run.requests)
        seen["stopped"] += sum(request.finish_reason == "stop" for request in run.requests)

    check()
    happened = [
        "forks",
        "cache_hits",
        "waits",
        "preemptions",
        "aborted",
        "stopped",
        "cache_leaf_evictions",
    ]
    geometry = bench.engine.geometry
    happened += ["copies"] if geometry.page_tokens > geometry.grain else []
    missing = {name for name in happened if not seen[name]}
    assert missing == NEVER.get(engine, set()), dict(seen)

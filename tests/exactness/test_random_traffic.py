"""Random arrivals, aborts, pools and shared prefixes beside the plain definition, on poisoned memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exactness.conftest import EVERYTHING
from tests.exactness.harness import Job
from tests.tiny_models import MODELS

ROOMS = (0.7, 1.0, 1.5, 2.2)


def jobs(prompt, longest: int) -> st.SearchStrategy[list[Job]]:
    """Jobs whose prompts leave one of two trunks somewhere, and fit the pool."""

    def make(trunk, shared, tail, seed, max_tokens, warm, stops, arrive, abort_at):
        tokens = prompt(shared, seed=trunk) + prompt(tail, seed=1000 + seed)
        tokens = tokens[: longest - 1]
        return Job(
            prompt=tokens,
            max_tokens=min(max_tokens, longest - len(tokens)),
            temperature=0.8 * warm,
            top_k=20 * (seed % 2),
            top_p=0.9,
            seed=seed,
            sample_index=seed % 3,
            stop_ids=frozenset(range(stops)),
            arrive=arrive,
            abort_at=abort_at,
        )

    job = st.builds(
        make,
        trunk=st.integers(0, 1),
        shared=st.sampled_from((0, 30, 31, 32, 64, 65, 97, 128)) | st.integers(0, 130),
        tail=st.integers(1, 40),
        seed=st.integers(0, 5),
        max_tokens=st.integers(1, 80),
        warm=st.booleans(),
        stops=st.sampled_from((0, 0, 2)),
        arrive=st.integers(0, 50),
        abort_at=st.none() | st.none() | st.integers(1, 30),
    )
    return st.lists(job, min_size=3, max_size=9)


BENCHES = [("bamba", "padded"), ("llama", "padded"), ("mamba2", "padded")]
if EVERYTHING:
    BENCHES = [(n, s) for n in MODELS for s in ("padded", "fine", "coarse", "exact")]


@pytest.mark.parametrize(("name", "engine"), BENCHES)
def test_random_traffic_gives_the_plain_tokens(bench_of, name, engine):
    bench = bench_of(name, engine)
    seen: Counter = Counter()

    @settings(max_examples=200 if EVERYTHING else 25)
    @given(st.data())
    def check(data):
        bench.start_over(data.draw(st.sampled_from(ROOMS), label="room"))
        longest = bench.engine.scheduler.max_output(0)
        batch = data.draw(jobs(bench.prompt, longest), label="jobs")
        forget_at = data.draw(st.frozensets(st.integers(0, 80), max_size=2), label="forget_at")
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
    happened = ["cache_hits", "waits", "preemptions", "aborted", "stopped", "cache_leaf_evictions"]
    happened += ["copies"] if bench.config.attention else []
    assert min(seen[name] for name in happened) > 0, seen

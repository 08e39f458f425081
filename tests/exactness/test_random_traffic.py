"""Random arrivals, aborts, pools and shared prefixes beside the plain definition, on poisoned memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawing import EVERYTHING, left_to_all
from tests.exactness.random_traffic import ROOMS, random_jobs
from tests.tiny_models import MODELS

# Exact mode does not fork; a prefill of one grain a step is never computing what another row waits for.
NEVER = {"exact": {"forks"}, "fine": {"waits"}}
BENCHES = [("bamba", "padded"), ("mamba2", "padded")]
if EVERYTHING:
    BENCHES = [(n, s) for n in MODELS for s in ("padded", "fine", "coarse", "exact")]


@pytest.mark.parametrize(("name", "engine"), BENCHES)
@left_to_all("mamba2")
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
        seen["aborted"] += sum(request.output.finish_reason == "abort" for request in run.requests)
        seen["stopped"] += sum(request.output.finish_reason == "stop" for request in run.requests)

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

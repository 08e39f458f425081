"""Narrow checkpoints in the cache: what plans narrow and widen, on a device that checks every read."""

from __future__ import annotations

import pytest

from tests.drawing import drawn
from tests.schedule.simulated_engine import Engine, make_geometry
from tests.schedule.test_second_tier import serve


def make(*, kind="hybrid", windows=(), **options):
    return Engine.make(geometry=make_geometry(kind=kind, windows=windows, narrow=True), **options)


FORMS = [("hybrid", 40), ("recurrent", 14), ("hybrid", 100)]


@pytest.mark.parametrize(
    ("kind", "num_frames", "cache", "below", "lag"),
    drawn(
        [
            (*form, cache, below, lag)
            for form in FORMS
            for cache in ("lru", "adaptive")
            for below in (0, 40, 600)
            for lag in (0, 1)
        ]
    ),
)
def test_rows_go_on_from_narrow_checkpoints(kind, num_frames, cache, below, lag):
    engine = make(kind=kind, num_frames=num_frames, cache=cache, host_frames=below, lag=lag)
    serve(engine, 1)
    events, counters = engine.device.events, engine.counters
    assert min(events["narrowed"], events["widened"]) > 5
    assert counters["narrowed_checkpoints"] == events["narrowed"]
    assert counters["widened_checkpoints"] == events["widened"] == counters["cache_hits"]
    if below == 600 and num_frames < 100:
        assert min(events.get("saves", 0), events.get("loads", 0)) > 3

"""The comparison of prefill shapes: that it counts right, and that it holds what engines take."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import prefill_shapes
from hybrid_jax.config import EngineConfig
from hybrid_jax.schedule import bucket

CHOSEN = "five around 896"


def test_the_list_of_engines_is_among_those_compared():
    chosen = prefill_shapes.LISTS[CHOSEN]
    assert chosen.chunks == bucket.CHUNKS
    assert (chosen.several, chosen.budget) == (bucket.SEVERAL_ROWS, bucket.TOKENS_OF_SEVERAL)


def test_a_list_is_taken_for_a_while():
    engine = EngineConfig(max_rows=256, prefill_tokens=8192, shapes="coarse")
    before = bucket.shapes_of(engine).prefill
    with prefill_shapes.LISTS["256, 1024"].taken() as shapes:
        assert shapes.prefill == ((1, 256), (4, 256), (1, 1024), (1, 8192))
        assert bucket.shapes_of(engine) is shapes
    assert bucket.shapes_of(engine).prefill == before


def test_dispatches_and_padding_are_counted():
    (asked,) = prefill_shapes.drawn(0.0, 1)
    length = len(asked.prompt)
    with prefill_shapes.LISTS["quarters"].taken() as shapes:
        sizes, left = [], length
        while left:
            first = shapes.first_chunk(left)
            sizes.append(shapes.prefill_of(first)[0])
            left -= first
    found = prefill_shapes.row([asked], prefill_shapes.LISTS["quarters"])
    assert (found["prompt_tokens"], found["dispatches"]) == (length, len(sizes))
    assert found["padded_tokens"] == sum(sizes) - length
    assert found["cost_tokens"] == sum(sizes) + bucket.DISPATCH_TOKENS * len(sizes)


def test_nine_tenths_of_a_drawn_prompt_are_found():
    requests = prefill_shapes.drawn(0.9, 4)
    found = prefill_shapes.row(requests, prefill_shapes.LISTS[CHOSEN])
    asked = sum(len(request.prompt) for request in requests[::2])
    rest = sum(len(request.prompt) for request in requests[1::2]) / 10
    assert asked + rest <= found["prompt_tokens"] <= asked + rest + 64


def test_a_hit_of_most_of_a_prompt_takes_the_share_that_is_wanted():
    measured = json.loads(prefill_shapes.MEASURED.read_text())
    hits = prefill_shapes.hits(measured)["lists"]
    assert hits[CHOSEN]["least"] == hits[CHOSEN]["most"] <= 0.15
    times = measured["ttft"]["8192 tokens"]
    ratio = [times[f"pallas {side}"]["seconds"]["median"] for side in ("hit", "cold")]
    # In the shape of the measured hit, the line gives what was measured.
    assert hits["halves"]["shapes"] == [1024]
    assert hits["halves"]["most"] == pytest.approx(ratio[0] / ratio[1])
    assert hits["quarters"]["shapes"] == [512, 512] and hits["quarters"]["least"] > 0.17

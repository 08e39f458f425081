"""A larger compiled program serves while the one that would fit is compiled in the background.

What a call may run is fixed when it begins.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hybrid_jax.config import EngineConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs.compiling import Background
from hybrid_jax.engine.steps.decode import Decode
from hybrid_jax.engine.steps.prefill import Prefill
from hybrid_jax.engine.steps.step import PLAIN
from hybrid_jax.schedule.bucket import DecodeBucket, PrefillBucket
from hybrid_jax.schedule.request import Request
from tests.exactness.jobs import generate
from tests.tiny_models import tiny_engine, tiny_model

COARSE = EngineConfig(max_rows=3, prefill_tokens=512, shapes="coarse")


def coarse_engine() -> Engine:
    config, params = tiny_model("bamba")
    return Engine(replace(config, max_position=640), params, COARSE)


@pytest.fixture
def engine(monkeypatch):
    """What is to be compiled in the background waits in `engine.background` until it is called."""
    made = coarse_engine()
    made.background = {}
    monkeypatch.setattr(
        made.runner.programs._background,
        "compile",
        lambda key, make: made.background.setdefault(key, make()),
    )
    yield made
    made.close()


def compiled(engine) -> set[tuple[int, int]]:
    """Rows and tokens of the steps that are compiled."""
    known = engine.runner.programs.made.items()
    return {sizes(key[1]) for key, program in known if len(key) == 3 and program.compiled}


def sizes(shape) -> tuple[int, int]:
    return shape.rows, getattr(shape, "tokens", 1)


def compile_the_largest(engine) -> None:
    for kind in engine.runner.kinds:
        for shape in kind.buckets():
            if sizes(shape) in {(1, 512), (3, 1)}:
                engine.runner._warm_step(kind, shape, PLAIN)
    generate(engine, length=400, max_tokens=1)  # and what is not a step
    assert compiled(engine) == {(1, 512), (3, 1)}


def test_shapes_that_can_do_the_work_of_another():
    config = EngineConfig(max_rows=256, prefill_tokens=8192, shapes="coarse")
    model = SimpleNamespace(config=SimpleNamespace(later=()))
    prefill, decode = (kind(config, model, 9) for kind in (Prefill, Decode))
    assert prefill.larger(PrefillBucket(1, 384, 9)) == [
        *(PrefillBucket(1, 896, 9), PrefillBucket(4, 384, 9), PrefillBucket(1, 2560, 9)),
        PrefillBucket(1, 8192, 9),
    ]
    assert prefill.larger(PrefillBucket(4, 384, 9)) == []
    assert decode.larger(DecodeBucket(1, 8, 9)) == [
        *(DecodeBucket(64, 8, 9), DecodeBucket(256, 8, 9))
    ]


def test_without_any_program_the_one_that_fits_is_compiled(engine):
    generate(engine)
    assert compiled(engine) == {(1, 128), (1, 1)}
    assert not engine.background


def test_a_larger_program_serves_and_no_step_waits(engine):
    want = generate(coarse_engine())
    compile_the_largest(engine)
    before = engine.compile_seconds()
    assert generate(engine) == want
    assert engine.compile_seconds() == before and compiled(engine) == {(1, 512), (3, 1)}
    assert {sizes(key[1]) for key in engine.background} == {(1, 128), (1, 1)}


def test_what_a_call_may_run_is_fixed_when_it_begins(engine):
    compile_the_largest(engine)
    ran = []
    run = engine.runner._run
    engine.runner._run = lambda kind, shape, *rest, **more: (
        ran.append(shape),
        run(kind, shape, *rest, **more),
    )[1]
    request = Request(
        request_id="a",
        prompt=[1, 2, 3],
        params=SamplingParams(temperature=0.0),
        max_tokens=30,
        seed=0,
    )
    engine.add(request)
    while len(request.output.token_ids) < 8:
        engine.step()
    for call in engine.background.values():
        call()
    seconds = engine.compile_seconds()
    while engine.has_work:
        engine.step()
    assert {shape.rows for shape in ran if isinstance(shape, DecodeBucket)} == {3}
    ran.clear()
    generate(engine)
    assert {sizes(shape) for shape in ran} == {(1, 128), (1, 1)}
    # Nor did the clock run for what was compiled in the background.
    assert engine.compile_seconds() == seconds


def test_a_busy_engine_takes_what_was_compiled_in_the_background(engine):
    """Once the requests that began before it have ended."""
    compile_the_largest(engine)
    shapes, run = [], engine.runner._run

    def watched(kind, shape, *rest, **more):
        shapes.append(sizes(shape))
        return run(kind, shape, *rest, **more)

    engine.runner._run = watched

    def add(name: str) -> Request:
        sampling = SamplingParams(temperature=0.0)
        request = Request(request_id=name, prompt=[1, 2], params=sampling, max_tokens=20, seed=0)
        engine.add(request)
        return request

    first = add("0")
    while len(first.output.token_ids) < 2:
        engine.step()
    for call in engine.background.values():
        call()
    for number in range(1, 9):
        last = add(str(number))
        while len(last.output.token_ids) < 2:
            engine.step()
        assert engine.has_work
        if first.output.finish_reason is None:
            assert set(shapes) == {(1, 512), (3, 1)}
    assert (1, 128) in shapes[-8:] and (1, 512) not in shapes[-8:]


def test_with_fine_shapes_a_later_request_waits_for_what_fits():
    """So its programs do not depend on how long compiling takes."""
    engine = tiny_engine(max_rows=1, prefill_tokens=128)
    generate(engine, length=120)
    assert compiled(engine) == {(1, 128), (1, 1)}
    ran, run = [], engine.runner._run
    engine.runner._run = lambda kind, shape, *rest: (
        ran.append(sizes(shape)),
        run(kind, shape, *rest),
    )[1]
    want = generate(tiny_engine(max_rows=1, prefill_tokens=32), length=5)
    for fits in ((1, 128), (1, 32), (1, 32)):
        ran.clear()
        engine.reset_prefix_cache()
        assert generate(engine, length=5) == want
        assert ran[0] == fits
    assert compiled(engine) == {(1, 128), (1, 32), (1, 1)}
    engine.close()


def test_each_program_is_compiled_once_and_one_that_fails_is_logged(caplog):
    background, called = Background(), []
    caplog.set_level(logging.ERROR, "hybrid_jax.compiling")

    def fail():
        called.append("b")
        raise RuntimeError("out of registers")

    background.compile("a", lambda: lambda: called.append("a"))
    background.compile("b", lambda: fail)
    background.compile("a", lambda: lambda: called.append("again"))
    background.compile("c", lambda: lambda: called.append("c"))
    background._pool.shutdown(wait=True)
    assert called == ["a", "b", "c"]
    assert "a larger one serves" in caplog.text and "out of registers" in caplog.text


def test_after_close_no_further_program_is_begun():
    engine = coarse_engine()
    compile_the_largest(engine)
    generate(engine)
    pool = engine.runner.programs._background._pool
    engine.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(print)
    pool.shutdown(wait=True)  # what was begun would be logged in the next test

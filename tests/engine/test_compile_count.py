"""Shapes are compiled once: a mixed workload traces each bucket at most once, and nothing after a warm-up."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.runner import Runner
from hybrid_jax.schedule.request import Request
from tests.drawing import left_to_all
from tests.tiny_models import VOCAB, tiny_engine

KINDS = {"prefill", "fork", "decode", "exact", "write_slots", "move_row", "move_adjust"}


def all_buckets(runner: Runner) -> list:
    """Every bucket of all kinds of steps."""
    return [shape for kind in runner.kinds for shape in kind.buckets()]


def warmed(engine: Engine, **wanted: bool) -> list[str]:
    """Runs every program of a warm-up; returns their names."""
    programs = engine.warm_ups(**wanted)
    for program in programs:
        program.run()
    return [program.name for program in programs]


def run_traffic(engine: Engine, *, num_requests: int, seed: int, logprobs: bool = False) -> None:
    """Random prompt and output lengths, arrivals between steps, shared prefixes, all kinds of sampling."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 150).tolist()
    waiting, outputs = list(range(num_requests)), {}
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.4:
            number = waiting.pop()
            prompt = (
                shared[: rng.integers(0, 150)] + rng.integers(0, VOCAB, 1 + number % 40).tolist()
            )
            params = SamplingParams(
                temperature=float(rng.choice([0.0, 0.9])),
                top_k=int(rng.choice([0, 5])),
                top_p=float(rng.choice([0.8, 1.0])),
                logprobs=int(rng.integers(0, 9)) if logprobs and number % 2 else None,
            )
            max_tokens = int(rng.integers(1, 50))
            for sample in range(1 + 2 * (number % 3 == 0)):
                request = Request(
                    request_id=f"{seed}-{number}.{sample}",
                    prompt=prompt,
                    params=params,
                    seed=number,
                    sample_index=sample,
                    sibling_group=f"{seed}-{number}",
                    max_tokens=max_tokens,
                    stop_ids=frozenset(rng.integers(0, VOCAB, number % 3).tolist()),
                )
                outputs[request.request_id] = request
                engine.add(request)
        engine.step()
        engine.scheduler.check_invariants()
    assert len(outputs) >= num_requests
    assert (
        engine.engine_config.exact or engine.engine_config.max_rows == 1 or engine.stats()["forks"]
    )
    assert all(request.output.finish_reason in ("stop", "length") for request in outputs.values())


@pytest.mark.parametrize("exact", [False, True])
def test_mixed_traffic_traces_each_bucket_at_most_once(exact):
    engine = tiny_engine(exact=exact)
    runner = engine.runner
    # What would be compiled in the background is compiled at once, so that it can be counted.
    runner.programs._background.compile = lambda key, prepare: prepare()()
    run_traffic(engine, num_requests=12, seed=0)
    run_traffic(engine, num_requests=3, seed=1, logprobs=True)
    assert runner.programs.num_traces == len(runner.programs.made) == engine.stats()["num_traces"]
    # What fits is compiled while larger programs serve, and then nothing more.
    for _ in range(4):
        before = runner.programs.num_traces
        run_traffic(engine, num_requests=12, seed=0)
        assert runner.programs.num_traces == len(runner.programs.made)
    assert runner.programs.num_traces == before
    kinds = collections.Counter(kind for kind, *_ in runner.programs.made)
    assert set(kinds) <= KINDS
    steps = [key for key in runner.programs.made if len(key) == 3]
    assert {key[1] for key in steps} <= set(all_buckets(runner))
    # Log-probabilities need shapes of their own, except where one executable serves all.
    assert {key[2].num_logprobs > 0 for key in steps} == ({True} if exact else {False, True})
    assert len(steps) == 1 or not exact
    if not exact:
        assert kinds["prefill"] > 2 and kinds["decode"] > 2 and kinds["fork"] >= 1


@pytest.mark.parametrize("settings", [{}, {"exact": True}], ids=["default", "exact"])
def test_nothing_is_traced_after_a_warmup(settings):
    engine = tiny_engine(**settings)
    names = warmed(engine)
    count = len(names)
    shapes = all_buckets(engine.runner)
    moves = 3 if engine.engine_config.exact else 1
    assert (
        count
        == moves + 1 + len(shapes)  # and one that writes slots
        == engine.runner.programs.num_traces
    )
    assert names[0] == "move_row"
    for shape, name in zip(shapes, names[-len(shapes) :], strict=True):
        assert name.startswith(str(shape))
    assert len(set(names)) == len(names)
    assert not engine.runner.state.arena[1:].any()  # a warm-up writes to the sink alone
    run_traffic(engine, num_requests=14, seed=2)
    assert engine.runner.programs.num_traces == count
    assert warmed(engine) == names
    assert engine.runner.programs.num_traces == count
    run_traffic(engine, num_requests=2, seed=3, logprobs=True)
    # Shapes with log-probabilities come when they are asked for; exact mode's one shape has them.
    assert (engine.runner.programs.num_traces > count) != engine.engine_config.exact


@left_to_all
def test_a_warmup_covers_what_it_is_asked_for():
    engine = tiny_engine(max_rows=2, prefill_tokens=32, max_model_len=128)
    names = warmed(engine, logprobs=True, adjusts=True)
    count = len(names)
    assert count == engine.runner.programs.num_traces == len(set(names))
    run_traffic(engine, num_requests=4, seed=3, logprobs=True)
    params = SamplingParams(repetition_penalty=1.2, logprobs=1, max_tokens=9)
    for n in range(2):
        name, prompt = f"p{n}", [1, 2, 3]
        request = Request(
            request_id=name, prompt=prompt, params=params, seed=n, max_tokens=9, sibling_group="p"
        )
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert engine.runner.programs.num_traces == count


def test_a_model_without_state_warms_no_slots():
    engine = tiny_engine(
        "llama", max_rows=1, prefill_tokens=32, steps_per_dispatch=2, max_model_len=64
    )
    count = len(warmed(engine))
    shapes = all_buckets(engine.runner)
    assert count == engine.runner.programs.num_traces == 1 + len(shapes)


def test_tokens_that_are_there_do_not_wait_for_the_compiler(monkeypatch):
    engine, compiling = tiny_engine(), []
    execute = Runner.execute

    def watched(runner, plan, missing):
        if missing:
            compiling.append(len(engine._pending))
        return execute(runner, plan, missing)

    monkeypatch.setattr(Runner, "execute", watched)
    run_traffic(engine, num_requests=6, seed=3)
    assert len(compiling) > 2 and set(compiling) == {0}
    engine.close()

"""Layers with two windows and with none: rows give pages back, and every token is that of the definition."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from unittest import mock

import pytest

from hybrid_jax.config import (
    MLP,
    Attention,
    Mamba2,
    ModelConfig,
    Rope,
    SpeculationConfig,
    residual_layer,
    with_cut,
)
from hybrid_jax.config.engine import FP8
from hybrid_jax.models.initialize import random_params
from hybrid_jax.schedule.memory import Memory
from tests.drawing import left_to_all
from tests.exactness.conftest import ONE_SHAPE, ROOM, SETTINGS, Bench
from tests.exactness.definition import Plain
from tests.exactness.engines import kept_by_arguments, make_engine, one_shape, short_of_memory
from tests.exactness.jobs import Job
from tests.exactness.poison import Poison
from tests.tiny_models import MAX_POSITION, VOCAB, redrawn

WINDOWS = {
    "all": (20, 50, 20),
    "some": (20, None, 50),
    "state": (50, None),
    "cut": (50, 20, 20),
    "drafting": (20, 50),
}
BENCHES = [
    ("some", "fine"),
    ("state", "padded"),
    pytest.param(("all", "fine"), marks=left_to_all),
    pytest.param(("some", "fp8"), marks=left_to_all),
    pytest.param(("state", "fine"), marks=left_to_all),
    pytest.param(("cut", "fine"), marks=left_to_all),
    pytest.param(("cut", "exact"), marks=[left_to_all, pytest.mark.as_users]),
    pytest.param(("some", "exact"), marks=[left_to_all, pytest.mark.as_users]),
    pytest.param(("state", "exact"), marks=[left_to_all, pytest.mark.as_users]),
]


def model_of(name: str) -> ModelConfig:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": Rope(dim=8)}
    mixers = [Attention(**shape, sliding_window=window) for window in WINDOWS[name]]
    if name == "state":
        mixers.insert(1, Mamba2(num_heads=6, head_dim=4, state_size=8, num_groups=2))
    layers = tuple(residual_layer(mixers=(mixer,), mlp=MLP(width=40)) for mixer in mixers)
    config = ModelConfig(
        family="windows", layers=layers, width=28, vocab_size=VOCAB, max_position=MAX_POSITION
    )
    return with_cut(config, 1, kv_group=2) if name == "cut" else config


@kept_by_arguments
def bench_with(name: str, settings: str) -> Bench:
    config = model_of(name)
    params = redrawn(config, seed=40, dtype="float32")
    shapes = contextlib.nullcontext
    if settings in ONE_SHAPE:
        shapes = functools.partial(one_shape, ONE_SHAPE[settings])
    with shapes():
        engine = make_engine(config, params, SETTINGS[settings], room=ROOM)
    plain = Plain(config, params, FP8 if settings == "fp8" else None)
    return Bench(config, engine, plain, Poison(engine), shapes)


@pytest.fixture(params=BENCHES, ids="-".join)
def bench(request):
    bench = bench_with(*request.param)
    bench.start_over()
    return bench


def test_tokens_are_those_of_a_run_that_keeps_all(bench):
    shared = bench.prompt(100, seed=6)
    jobs = [Job(prompt=shared + bench.prompt(n, seed=60 + n), max_tokens=24) for n in (5, 20, 33)]
    jobs += [Job(prompt=bench.prompt(190, seed=4), max_tokens=40)]
    jobs += [
        Job(prompt=bench.prompt(77, seed=5), max_tokens=30, temperature=0.7, seed=i,
            sample_index=i, group="g")
        for i in range(3)
    ]  # fmt: skip
    run = bench.check(jobs)
    assert sum(run.cached) >= 192  # the shared prefix, twice
    again = bench.check(jobs[-1:])
    assert again.cached == [64] and again.outputs == run.outputs[-1:]
    bench.forget()
    with mock.patch.object(Memory, "give_back", lambda memory, sequence, later=False: None):
        assert bench.check(jobs).outputs == run.outputs


def test_a_conversation_and_a_hit_inside_a_window(bench):
    first = bench.check([Job(prompt=bench.prompt(50, seed=7), max_tokens=60)])
    history = tuple(first.requests[0].tokens) + bench.prompt(9, seed=8)
    second = bench.check([Job(prompt=history, max_tokens=30)])
    assert second.cached == [96]  # 50 + 60 - 1 tokens processed
    branch = history[:70] + bench.prompt(40, seed=9)
    bench.check([Job(prompt=branch, max_tokens=30)])
    third = bench.check([Job(prompt=branch[:80] + (1, 2, 3), max_tokens=30)])
    assert third.cached == [64]


def test_preemption(bench):
    bench.start_over(1.5)
    jobs = [Job(prompt=bench.prompt(n, seed=n), max_tokens=150) for n in (25, 20, 31)]
    with short_of_memory(bench.engine, at=(45, 80)):
        run = bench.check(jobs)
    assert run.moved["preemptions"] >= 2


@pytest.mark.parametrize("method", [pytest.param("draft", marks=left_to_all), "mtp"])
def test_layers_that_draft_give_pages_back(method):
    """A second model's layers with a window, and a head's, beside the model's own."""
    config = model_of("drafting")
    params = redrawn(config, seed=41, dtype="float32")
    if method == "draft":
        other = replace(config, layers=config.layers[:1])
        drafting = replace(config, draft=other)
        drafts = {"draft": redrawn(other, seed=42, dtype="float32")}
    else:
        drafting = replace(config, mtp=config.layers[1:])
        drafts = {"mtp": random_params(drafting, 0)["mtp"]}
    speculation = SpeculationConfig(method=method, num_tokens=3, adaptive=False)
    settings = replace(SETTINGS["fine"], prefill_tokens=64, speculation=speculation)
    with one_shape():
        engine = make_engine(drafting, params | drafts, settings, room=2 * ROOM)
    bench = Bench(drafting, engine, Plain(config, params), Poison(engine), one_shape)
    shared = bench.prompt(90, seed=6)
    jobs = [Job(prompt=shared + bench.prompt(n, seed=n), max_tokens=60) for n in (5, 20)]
    jobs += [replace(jobs[0], temperature=0.8, seed=n, arrive=20) for n in (1, 2)]
    jobs += [Job(prompt=(3, 1, 4) * 20, max_tokens=90)]
    gone, give_back = set(), Memory.give_back

    def noted(memory, sequence, later=False):
        give_back(memory, sequence, later=later)
        gone.update(enumerate(sequence.held.first_pages))

    with mock.patch.object(Memory, "give_back", noted):
        run = bench.check(jobs)
    assert gone >= {(0, 6), (1, 4)}  # first pages of the groups
    assert sum(run.cached) >= 2 * 64
    assert sum(r.course.drafts.windows.total() for r in run.requests) > 40
    assert [group.window for group in engine.geometry.windowed] == [20, 50]

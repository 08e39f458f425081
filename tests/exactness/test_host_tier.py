"""An arena of two prompts above a host's memory of ten: the tokens of a run without cache, from what came back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jax.sharding import SingleDeviceSharding

from hybrid_jax.config.arrays import FP8
from hybrid_jax.engine import runner
from tests.drawing import left_to_all
from tests.exactness.conftest import FLOAT32, load
from tests.exactness.engines import make_engine, one_shape
from tests.exactness.jobs import conversations
from tests.exactness.speculation_matrix import ENGINES, with_drafter
from tests.exactness.tiers import BELOW, DRAFTING, EXACT, NAMES, OTHER, ROOM, cold, serve


@pytest.mark.parametrize("name", NAMES)
@left_to_all("bamba", "with_latent", "with_fixed_decay")
def test_tokens_are_those_of_a_run_without_cache(name, plain_of):
    config, params = load(name)
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        engine = make_engine(config, params, FLOAT32, room=ROOM, below=BELOW)
        run = serve(engine, jobs, "host")
        assert plain_of(name).mismatches(run.requests) == []
        assert run.outputs == cold(engine, jobs).outputs
        engine.close()


def test_from_pinned_memory_as_beside_a_gpu(plain_of, monkeypatch):
    """A CPU has such a memory, too."""
    pinned = lambda device: SingleDeviceSharding(device, memory_kind="pinned_host")  # noqa: E731
    monkeypatch.setattr(runner, "host_memory", pinned)
    config, params = load("jamba")
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        engine = make_engine(config, params, FLOAT32, room=ROOM, below=BELOW)
        run = serve(engine, jobs, "host")
        assert plain_of("jamba").mismatches(run.requests) == []
        kinds = {x.sharding.memory_kind for x in engine.runner.host_frames.frames.values()}
        assert kinds == {"pinned_host"}
        engine.close()


@pytest.mark.parametrize("how", OTHER)
def test_with_other_pages_and_steps(how, plain_of):
    config, params = load("with_cut")
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        engine = make_engine(config, params, OTHER[how], room=ROOM, below=BELOW)
        run = serve(engine, jobs, "host")
        assert plain_of("with_cut", FP8 if how == "fp8" else None).mismatches(run.requests) == []
        engine.close()


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", ["qwen3_next", "with_cut", "windowed"])
@left_to_all("qwen3_next-f", "windowed-f", "with_cut-float32")
def test_exact_mode_gives_the_same_bits(name, dtype):
    config, params = load(name, EXACT[dtype].dtype)
    jobs = conversations(config.vocab_size)
    engine = make_engine(config, params, EXACT[dtype], room=ROOM, below=BELOW)
    run = serve(engine, jobs, "host")
    assert run.bits == cold(engine, jobs).bits
    engine.close()


@pytest.mark.parametrize("name", DRAFTING)
@left_to_all("mtp-parallel", "draft-jamba")
def test_with_drafts(name):
    maker = ENGINES[name]
    config, params = with_drafter(maker)
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        engine = make_engine(
            config, params, replace(maker.settings, max_rows=3), room=ROOM, below=BELOW
        )
        run = serve(engine, jobs, "host")
        assert run.moved["draft_tokens"] > 0
        assert run.outputs == cold(engine, jobs).outputs
        engine.close()

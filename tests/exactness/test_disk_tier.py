"""Engines that find on disk what another engine has left there: the tokens of a run without cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_jax.config.arrays import FP8
from hybrid_jax.engine.engine import Engine
from hybrid_jax.tiers import chain, disk
from tests.drawing import left_to_all
from tests.exactness.conftest import FLOAT32, load
from tests.exactness.engines import make_engine, one_shape, start_over
from tests.exactness.jobs import Job, conversations, drive
from tests.exactness.poison import Poison
from tests.exactness.speculation_matrix import ENGINES, with_drafter
from tests.exactness.tiers import BELOW, DRAFTING, EXACT, NAMES, ROOM, cold, serve

# What the engine that reads may have otherwise than the one that wrote.
OTHER = {
    "other pages": {"page_tokens": 16},
    "coarser grain": {"grain": 32},
    "finer grain": {"grain": 8},
    "other rows": {"max_rows": 3, "steps_per_dispatch": 8},
}


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Prefixes of several runs, although prompts are short."""
    for module in (chain, disk):
        monkeypatch.setattr(module, "RUN_TOKENS", 64)


def fill(folder: Path, config, params, settings, jobs: list[Job], **room) -> Engine:
    """Runs jobs over an arena of two prompts. All that the cache took is on disk then."""
    engine = make_engine(config, params, settings, room=ROOM, folder=folder, **room)
    drive(engine, jobs, Poison(engine))
    engine.scheduler.check_invariants()
    while engine.has_saves or engine.has_work:
        engine.step()
    engine.disk.flush()
    counters = engine.disk.counters
    assert counters.saves > 5 and counters.saves_dropped + counters.loads_failed == 0, counters
    assert engine.disk.folder.num_files == len(list(folder.glob("*/*.safetensors"))) > 10
    return engine


@pytest.mark.parametrize("name", NAMES)
@left_to_all("bamba", "with_latent", "with_fixed_decay")
def test_an_empty_arena_is_filled_from_disk(name, plain_of, tmp_path):
    config, params = load(name)
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        engine = fill(tmp_path, config, params, FLOAT32, jobs)
        start_over(engine, ROOM)
        run = serve(engine, jobs, "disk")
        assert plain_of(name).mismatches(run.requests) == []
        engine.close()


@pytest.mark.parametrize("how", OTHER)
@pytest.mark.parametrize("name", ["with_cut", "windowed", "qwen3_next"])
@left_to_all(
    "qwen3_next-", "windowed-coarser", "windowed-finer", "with_cut-finer", "with_cut-other"
)
def test_an_engine_of_other_sizes_continues(name, how, plain_of, tmp_path):
    config, params = load(name)
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        fill(tmp_path, config, params, FLOAT32, jobs).close()
        settings = replace(FLOAT32, **OTHER[how])
        engine = make_engine(config, params, settings, room=ROOM, folder=tmp_path)
        run = serve(engine, jobs, "disk", tokens=100)
        assert plain_of(name).mismatches(run.requests) == []
        engine.close()


def test_pages_of_fp8_come_back_as_they_were(plain_of, tmp_path):
    config, params = load("with_cut")
    settings = replace(FLOAT32, kv_cache_dtype="fp8")
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        fill(tmp_path, config, params, settings, jobs).close()
        engine = make_engine(
            config, params, replace(settings, page_tokens=16), room=ROOM, folder=tmp_path
        )
        run = serve(engine, jobs, "disk")
        assert plain_of("with_cut", FP8).mismatches(run.requests) == []
        engine.close()


def test_a_hosts_memory_and_a_disk_together(plain_of, tmp_path):
    config, params = load("jamba")
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        engine = fill(tmp_path, config, params, FLOAT32, jobs, below=BELOW)
        start_over(engine, ROOM)
        run = serve(engine, jobs, "disk")
        assert run.moved["host_loads"] > 5
        assert plain_of("jamba").mismatches(run.requests) == []
        engine.close()


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", ["qwen3_next", "with_cut", "windowed"])
@left_to_all("qwen3_next-f", "windowed", "with_cut")
def test_exact_mode_gives_the_same_bits(name, dtype, tmp_path):
    config, params = load(name, EXACT[dtype].dtype)
    jobs = conversations(config.vocab_size)
    fill(tmp_path, config, params, EXACT[dtype], jobs).close()
    settings = replace(EXACT[dtype], page_tokens=16)
    engine = make_engine(config, params, settings, room=ROOM, folder=tmp_path)
    run = serve(engine, jobs, "disk")
    assert run.bits == cold(engine, jobs).bits
    engine.close()


@pytest.mark.parametrize("name", DRAFTING)
@left_to_all("mtp", "draft-jamba", "exit")
def test_with_drafts(name, tmp_path):
    maker = ENGINES[name]
    config, params = with_drafter(maker)
    jobs = conversations(config.vocab_size)
    settings = replace(maker.settings, max_rows=3)
    with one_shape(64):
        engine = fill(tmp_path, config, params, settings, jobs)
        start_over(engine, ROOM)
        run = serve(engine, jobs, "disk")
        assert run.moved["draft_tokens"] > 0
        assert run.outputs == cold(engine, jobs).outputs
        engine.close()

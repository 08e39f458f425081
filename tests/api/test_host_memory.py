"""`LLM(host_memory=...)`: prompts that were evicted resume from there, and what is said of it."""

from __future__ import annotations

import dataclasses

import pytest

from hybrid_jax import CacheConfig, SamplingParams
from hybrid_jax.api.stats import MEANINGS
from hybrid_jax.config import EngineConfig
from hybrid_jax.sizing import room
from hybrid_jax.sizing.devices import Device, card
from tests.llms import tiny_llm
from tests.tiny_models import tiny_model

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
SMALL = {"max_rows": 1, "max_model_len": 256, "memory": "300KB"} | {
    "cache": CacheConfig(loads="always")
}
PROMPTS = [[(7 * n + k * k) % 250 for k in range(120)] for n in range(10)]


def answers(llm):
    """Tokens, and how many of the prompt were cached, one prompt after the other, twice."""
    found = []
    for ids in PROMPTS * 2:
        [output] = llm.generate([{"prompt_token_ids": ids}], GREEDY)
        found.append((output.outputs[0].token_ids, output.num_cached_tokens))
    return found


def test_prompts_that_were_evicted_resume_from_the_hosts_memory():
    with tiny_llm(**SMALL) as llm:
        plain, evicted = answers(llm), llm.stats()["cache_leaf_evictions"]
        assert not [name for name in llm.stats() if name.startswith("host_")]
        assert "\nhost" not in llm.describe()
    with tiny_llm(host_memory="4MiB", **SMALL) as llm:
        found, stats = answers(llm), llm.stats()
        assert "of the host's memory, for what the arena evicts" in llm.describe()
        group = "Tier in the host's memory"
        assert group in str(stats)
        assert sorted(name for name in stats if name.startswith("host_")) == sorted(MEANINGS[group])
    assert evicted > 5
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
    assert [cached for _, cached in found[10:]] == [96] * 10
    kept = sum(cached for _, cached in plain)
    assert kept < 600 and stats["host_loads"] >= 5
    assert stats["host_loaded_tokens"] == 960 - kept
    assert stats["host_bytes"] <= 4 << 20


def test_a_warm_up_compiles_the_copies_too():
    with tiny_llm(host_memory="4MiB", **SMALL) as llm:
        seconds = llm.warmup()
        assert {"save_frames", "load_frames"} <= seconds.keys()
        traced = llm.stats()["num_traces"]
        answers(llm)
        assert llm.stats()["host_loads"] and llm.stats()["num_traces"] == traced


def test_a_reset_empties_the_hosts_memory():
    with tiny_llm(host_memory="4MiB", **SMALL) as llm:
        answers(llm)
        assert llm.stats()["host_checkpoints"] >= 5
        llm.reset_prefix_cache()
        assert llm.stats()["host_bytes"] == 0
        [output] = llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY)
        assert output.num_cached_tokens == 0


CONFIG = tiny_model("bamba")[0]


@pytest.mark.parametrize(("host_memory", "fits"), [(0, True), (1 << 20, True), (1 << 33, False)])
def test_on_a_cpu_it_counts_as_memory(host_memory, fits):
    device = Device(num_bytes=1 << 30)
    engine = EngineConfig(host_memory=host_memory, memory=1 << 20, max_model_len=256)
    found = room.find_room(CONFIG, engine, device)
    assert found.fits == fits and ("host_memory" in found.parts()) == bool(host_memory)


def test_beside_a_gpu_it_must_fit_the_hosts_ram(monkeypatch):
    engine = EngineConfig(dtype="bfloat16", host_memory=1 << 36, memory=1 << 28, max_model_len=256)
    found = room.find_room(CONFIG, engine, card("h200"))
    assert found.fits and found.sizes.host_bytes <= 1 << 36
    monkeypatch.setattr(room, "ram_bytes", lambda: 1 << 37)
    room.require_room(found)
    monkeypatch.setattr(room, "ram_bytes", lambda: None)
    room.require_room(found)
    monkeypatch.setattr(room, "ram_bytes", lambda: 1 << 35)
    with pytest.raises(room.DoesNotFit, match="host_memory of 64 GiB .* this machine has 32 GiB"):
        room.require_room(found)


def test_what_is_too_little_or_without_a_cache_is_refused():
    engine = EngineConfig(memory=1 << 20, max_model_len=256)
    with pytest.raises(ValueError, match="host_memory must hold a checkpoint and the pages of 32 "):
        room.find_room(CONFIG, dataclasses.replace(engine, host_memory=1000), Device())
    with pytest.raises(ValueError, match="host_memory must be 0 with cache='off'"):
        dataclasses.replace(engine, host_memory=1 << 20, cache=CacheConfig(policy="off"))

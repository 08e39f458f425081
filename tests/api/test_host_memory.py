"""`LLM(host_memory=...)`: prompts that were evicted resume from there, and what is said of it."""

from __future__ import annotations

import dataclasses

import pytest

from hybrid_jax import CacheConfig, SamplingParams, inspect_model
from hybrid_jax.api import starting
from hybrid_jax.api.stats import MEANINGS
from hybrid_jax.config import EngineConfig
from hybrid_jax.machine import PINNED_LIMIT
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
    monkeypatch.setenv(PINNED_LIMIT, "80")
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


def refused(size, said, monkeypatch):
    """What `require_room` says of so many GiB beside a GPU, with this value of the variable; None if it takes them."""
    if said is None:
        monkeypatch.delenv(PINNED_LIMIT, raising=False)
    else:
        monkeypatch.setenv(PINNED_LIMIT, said)
    monkeypatch.setattr(room, "ram_bytes", lambda: 1 << 40)
    engine = EngineConfig(
        dtype="bfloat16", host_memory=int(size * 2**30), memory=1 << 28, max_model_len=256
    )
    try:
        return room.require_room(room.find_room(CONFIG, engine, card("h200")))
    except room.DoesNotFit as error:
        return str(error)


@pytest.mark.parametrize(
    ("said", "most"),
    [
        *((None, 48), ("", 48), ("many", 48), ("64.5", 48)),  # XLA's own 64
        *(("128", 112), (" 40 ", 24), ("32", 16), ("8", 4)),  # copies of 16 GiB, or of all
    ],
)
def test_beside_a_gpu_it_must_fit_what_xla_pins(said, most, monkeypatch):
    assert refused(most, said, monkeypatch) is None
    message = refused(most + 1 / 1024, said, monkeypatch)
    assert f"lower it to {most} GiB, or set {PINNED_LIMIT}=" in message
    enough = message.split(f"{PINNED_LIMIT}=")[1].split()[0]
    assert refused(most + 1 / 1024, enough, monkeypatch) is None


def test_the_error_of_what_xla_pins_names_the_value_the_limit_and_the_remedy(monkeypatch):
    assert refused(60, None, monkeypatch) == (
        "EngineConfig: host_memory of 60 GiB does not fit: with copies on their way it takes 76 GiB, and XLA pins at "
        f"most 64 GiB of the host's memory for a GPU; lower it to 48 GiB, or set {PINNED_LIMIT}=76 before Python starts"
    )
    with pytest.raises(room.DoesNotFit, match="host_memory of 60 GiB"):
        inspect_model(device="h200", host_memory="60GiB")
    assert inspect_model(device="h200", host_memory="48GiB")["fits"]
    monkeypatch.setattr(starting, "this_device", lambda **_: card("h200"))
    with pytest.raises(ValueError, match="^LLM: host_memory of 60 GiB does not fit: with copies"):
        tiny_llm(host_memory="60GiB")
    assert f"for a GPU; set {PINNED_LIMIT}=2 before" in refused(1, "0", monkeypatch)


def test_only_a_gpu_has_such_a_pool(monkeypatch):
    monkeypatch.setenv(PINNED_LIMIT, "1")
    engine = EngineConfig(host_memory=8 << 30, memory=1 << 28, max_model_len=256)
    room.require_room(room.find_room(CONFIG, engine, Device(num_bytes=1 << 40)))
    found = inspect_model(device="cpu", device_memory="1TiB", host_memory="8GiB")
    assert found["fits"] and "host_memory 8 GiB" in found["needs"]
    for share in found["shares"]:
        assert sum(size for name, size in share.items() if name.endswith("_bytes")) == 1 << 40
        assert share["cache_bytes"] > 8e9


def test_what_is_too_little_or_without_a_cache_is_refused():
    engine = EngineConfig(memory=1 << 20, max_model_len=256)
    with pytest.raises(ValueError, match="host_memory must hold a checkpoint and the pages of 32 "):
        room.find_room(CONFIG, dataclasses.replace(engine, host_memory=1000), Device())
    with pytest.raises(ValueError, match="host_memory must be 0 with cache='off'"):
        dataclasses.replace(engine, host_memory=1 << 20, cache=CacheConfig(policy="off"))

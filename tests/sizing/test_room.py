"""Whether a model fits a machine: what is counted, what the default leaves, and advice that helps."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from hybrid_jax.byte_sizes import parse_size
from hybrid_jax.config import (
    MLP,
    XLA,
    Attention,
    EngineConfig,
    Mamba2,
    ModelConfig,
    MoE,
    residual_layer,
)
from hybrid_jax.costs import weight_bytes
from hybrid_jax.engine import this_device
from hybrid_jax.engine.this_device import held_bytes
from hybrid_jax.geometry import make_geometry
from hybrid_jax.inspection.facts import model_facts
from hybrid_jax.models.initialize import random_params
from hybrid_jax.sizing.devices import Device
from hybrid_jax.sizing.room import (
    DoesNotFit,
    find_room,
    require_room,
)
from hybrid_jax.sizing.temporaries import temporary_bytes
from tests.cache.pools import Pools

ATTENTION = Attention(num_heads=8, num_kv_heads=4, head_dim=32, qkv_bias=True, qk_norm=True)
MAMBA = Mamba2(num_heads=16, head_dim=32, state_size=32, proj_bias=True)
MIXTURE = MoE(num_experts=4, top_k=2, width=64, shared_width=32, routing="sigmoid", bias=True)


def model(**settings) -> ModelConfig:
    layers = (
        residual_layer(mixers=(MAMBA,), mlp=MLP(width=512)),
        residual_layer(mixers=(ATTENTION, MAMBA), mlp=MIXTURE),
        residual_layer(mixers=(MAMBA,), mlp=MLP(width=512)).again(0),
    )
    settings = {"vocab_size": 512, "width": 256, "max_position": 1024} | settings
    return ModelConfig(family="test", layers=layers, **settings)


def needed(config: ModelConfig, engine: EngineConfig) -> int:
    """Weights, temporaries and the least memory."""
    return find_room(config, engine, Device(num_bytes=1)).needed_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_to_the_byte(dtype, tied):
    config = model(tie_embeddings=tied)
    params = jax.eval_shape(lambda: random_params(config, 0, dtype))
    assert weight_bytes(config, dtype) == held_bytes(params)


@pytest.mark.parametrize("percent", [10, 50, 80, 90])
def test_the_default_leaves_room_for_weights_of_any_share(percent):
    config, engine = model(), EngineConfig(max_rows=1)
    weights = weight_bytes(config, "float32")
    for num_bytes in (needed(config, engine), 100 * weights // percent):
        room = find_room(config, engine, Device(num_bytes=max(num_bytes, needed(config, engine))))
        assert room.fits
        require_room(room)
    assert not find_room(config, engine, Device(num_bytes=needed(config, engine) - 1)).fits


def test_the_default_of_a_host_is_a_quarter_of_it_and_half_of_what_weights_leave():
    config, engine = model(), EngineConfig(max_rows=8)

    def default(weights: int) -> float:
        device = Device(num_bytes=100 << 20)
        return find_room(config, engine, device, held=weights << 20).sizes.total_bytes / 2**20

    assert default(0) == default(20) == pytest.approx(25, abs=0.3)
    assert default(54) == pytest.approx(23, abs=0.3)


@pytest.mark.parametrize("memory_gib", [24, 80, 141])
def test_the_default_of_a_gpu_is_what_weights_and_a_step_leave(memory_gib):
    config, engine = model(), EngineConfig(max_rows=8, prefill_tokens=8192)
    device = Device(platform="gpu", num_bytes=memory_gib << 30)
    room = find_room(config, engine, device, held=10 << 30)
    left = device.num_bytes - (10 << 30) - room.temporary_bytes
    assert 0.949 < room.sizes.total_bytes / left <= 0.95
    assert room.fits and room.sizes.row_bytes < room.sizes.arena_bytes


def advised(error: DoesNotFit) -> EngineConfig:
    """The settings that it is advised to use; only the first way."""
    words = str(error).rpartition("use ")[2].split(" or ")[0]
    given = dict(re.findall(r'(\w+)="?([^" ]+)', words))
    if "memory" in given:
        given["memory"] = parse_size(given["memory"])
    if "max_rows" in given:
        given["max_rows"] = int(given["max_rows"])
    return given


@pytest.mark.parametrize(
    "settings, spare, expected",
    [
        ({}, -1000, {"dtype"}),
        ({"memory": 1 << 30}, 5 << 20, {"memory"}),
        ({"memory": 1 << 30}, -(1 << 20), {"dtype", "memory"}),
        ({"max_rows": 4096}, 10 << 20, {"max_rows"}),
        ({"max_rows": 4096, "memory": 1 << 40}, 10 << 20, {"memory", "max_rows"}),
        ({"max_rows": 4096, "memory": 1 << 40}, -(1 << 20), {"dtype", "memory", "max_rows"}),
    ],
)
def test_following_the_advice_makes_it_fit(settings, spare, expected):
    config, engine = model(), EngineConfig(**{"max_rows": 2} | settings)
    usual = replace(engine, memory=None, max_rows=2)
    machine = Device(num_bytes=needed(config, usual) + spare)
    with pytest.raises(
        DoesNotFit, match="this model does not fit: weights .* this machine"
    ) as error:
        require_room(find_room(config, engine, machine))
    change = advised(error.value)
    assert set(change) == expected
    require_room(find_room(config, replace(engine, **change), machine))


def test_where_no_setting_helps_the_machine_that_would_do_is_named():
    config, engine = model(), EngineConfig(max_rows=1)
    with pytest.raises(DoesNotFit, match="a smaller model or a machine with at least") as error:
        require_room(find_room(config, engine, Device(num_bytes=1 << 20)))
    enough = parse_size(str(error.value).rpartition("at least ")[2])
    assert find_room(config, engine, Device(num_bytes=enough)).fits


def test_weights_that_are_in_memory_already_are_not_advised_to_change():
    config, engine = model(), EngineConfig(max_rows=1)
    held = weight_bytes(config, "float32")
    machine = Device(num_bytes=needed(config, engine) - 1000)
    assert "dtype" in find_room(config, engine, machine).remedy
    assert "dtype" not in find_room(config, engine, machine, held=held).remedy
    assert find_room(config, engine, machine, held=held - 1000).fits


def test_widened_weights_are_temporaries_but_experts_are_widened_one_at_a_time():
    config, engine = model(), EngineConfig(dtype="bfloat16")
    plain, widened = (temporary_bytes(config, engine, backend=XLA, widens=w) for w in (False, True))
    expert = 4 * (2 * 256 * 64 + 3 * 64 + 2 * 256)
    assert 0.9 < (widened - plain) / (weight_bytes(config, "float32") - 3 * expert) < 1.1
    float32 = replace(engine, dtype="float32")
    assert temporary_bytes(config, float32, backend=XLA, widens=True) == plain


def test_too_much_of_the_hosts_memory_is_named_with_what_fits():
    """On a CPU it lies in the same RAM."""
    config = ModelConfig(
        family="llama", vocab_size=64, width=64, layers=(residual_layer(mixers=(ATTENTION,)),)
    )
    machine, engine = Device(num_bytes=1 << 30), EngineConfig(max_rows=1, host_memory=2 << 30)
    room = find_room(config, engine, machine)
    most = parse_size(re.fullmatch('use at most host_memory="(.*)"', room.remedy)[1])
    assert room.fits is False and 900 << 20 < most < 1 << 30
    assert find_room(config, replace(engine, host_memory=most), machine).fits


@pytest.mark.parametrize(
    "wanted, remedy", [("cuda", 'pip install "hybrid_jax[cuda12]"'), ("tpu", "leave it out")]
)
def test_a_platform_that_jax_cannot_use_is_named_with_the_remedy(monkeypatch, wanted, remedy):
    def fails(backend=None):
        raise RuntimeError("Unable to initialize backend")

    config = SimpleNamespace(jax_platforms=wanted, jax_default_device=None)
    asked = SimpleNamespace(devices=fails, local_devices=fails, config=config, Device=jax.Device)
    monkeypatch.setattr(this_device, "jax", asked)
    monkeypatch.setattr(this_device, "claim_gpu", lambda: None)
    with pytest.raises(
        ValueError, match=f"LLM: JAX_PLATFORMS={wanted} asks for a device"
    ) as caught:
        this_device.first_device()
    assert remedy in str(caught.value)
    asked.config.jax_platforms = None
    with pytest.raises(RuntimeError, match="Unable to initialize backend"):
        this_device.first_device()


@pytest.mark.parametrize("windows", [(20, None), (20, 300)])
@pytest.mark.parametrize("mixers", [(MAMBA,), ()])
def test_as_many_tokens_are_cached_as_the_facts_say(mixers, windows):
    attention = [replace(ATTENTION, sliding_window=window) for window in windows]
    layers = tuple(residual_layer(mixers=(mixer,)) for mixer in (*attention, *mixers))
    config = ModelConfig(family="test", layers=layers, vocab_size=64, width=256)
    engine = EngineConfig(memory=parse_size("24MiB"), max_model_len=640, page_tokens=16, grain=16)
    facts, geometry = model_facts(config, engine, Device()), make_geometry(config, engine)
    fit = facts["fit"]
    about = [
        f"of {part.window} tokens: a row holds at most {part.max_pages} pages"
        for part in geometry.windowed
    ]
    assert [one.split(" of these")[0] for one in facts["windows"].split("; ")] == about
    assert ("keeps all pages" in facts["cache"]) == (not geometry.has_state)
    pools = Pools(
        16, geometry.has_state, 50000, geometry.frames_per_page, max_slots=500,
        windows=[(part.window, part.frames) for part in geometry.windowed],
        state_frames=geometry.state_frames,
    )  # fmt: skip
    prefixes, rest = divmod(fit["cached_tokens"], 640)
    for number in range(prefixes):
        pools.insert([number, *range(639)])
    assert prefixes > 1
    held = pools.frames.num_held
    for length, fits in ((rest // 16 * 16, True), (rest // 16 * 16 + 16, False)):
        before = pools.frames.num_held
        if length:
            pools.insert([prefixes + length, *range(length - 1)])
        taken = held + pools.frames.num_held - before
        assert (taken < fit["num_frames"]) == fits

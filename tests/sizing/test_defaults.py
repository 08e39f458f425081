"""What an engine is set to on devices that are not there: tables for cards, and rules that hold for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_jax.config import EngineConfig
from hybrid_jax.geometry import make_geometry
from hybrid_jax.models.known import known, load_known
from hybrid_jax.sizing.defaults import choose_settings
from hybrid_jax.sizing.devices import Device, card, cards
from hybrid_jax.sizing.room import find_room


def chosen(name: str, where: str, **given) -> EngineConfig:
    return choose_settings(load_known(name), card(where), given, dtype="bfloat16")


@pytest.mark.parametrize(
    "name, where, rows, chunk",
    [
        ("nemotron_h_8b", "h200", 256, 8192),
        ("nemotron_h_8b", "h100", 128, 8192),
        ("nemotron_h_8b", "a100-40gb", 64, 8192),
        ("nemotron_3_nano_30b", "h200", 256, 8192),
        ("nemotron_3_nano_30b", "h100", 64, 8192),
        ("granite_4_h_tiny", "h100", 256, 8192),
        ("bamba_9b", "h200", 256, 8192),
        ("bamba_9b", "h100", 128, 8192),
        ("llama_3_1_8b", "h200", 128, 8192),
        ("llama_3_1_8b", "h100", 64, 8192),
        ("codestral_mamba_7b", "h200", 128, 8192),
        ("qwen3_5_9b", "h200", 256, 8192),
        ("qwen3_5_9b", "h100", 128, 8192),
        ("qwen3_5_35b_a3b", "h100", 32, 8192),
    ],
)
def test_rows_and_chunks_of_known_cards(name, where, rows, chunk):
    engine = chosen(name, where)
    assert (engine.max_rows, engine.prefill_tokens) == (rows, chunk)
    assert (engine.steps_per_dispatch, engine.grain, engine.shapes) == (4, 32, "coarse")


def test_a_cpu_keeps_the_defaults_of_the_engine():
    found = choose_settings(load_known("bamba_9b"), Device(num_bytes=1 << 35), {}, dtype="float32")
    assert found == EngineConfig()
    assert (found.max_rows, found.prefill_tokens, found.steps_per_dispatch) == (8, 512, 8)


WITH_KERNELS = sorted(name for name in cards() if card(name).runs_kernels)


@pytest.mark.parametrize("name", sorted(known()))
@pytest.mark.parametrize("where", WITH_KERNELS)
def test_what_is_chosen_fits_and_uses_nine_tenths_of_what_is_free(name, where):
    config, device = load_known(name), card(where)
    engine = choose_settings(config, device, {}, dtype="bfloat16")
    room = find_room(config, engine, device)
    if room.weight_bytes > device.num_bytes:
        assert not room.fits and engine.max_rows == 1
        return
    left = device.num_bytes - room.weight_bytes - room.temporary_bytes
    # so much is free when the largest product is timed
    tuning = (1 << 28) + 2 * config.vocab_size * config.width
    most = min(0.95 * left, left - tuning)
    assert room.fits and 0.999 < room.sizes.total_bytes / most <= 1
    if device.total_bytes > 3 * room.weight_bytes:  # elsewhere CUDA's share weighs more
        free = device.total_bytes - room.weight_bytes - room.temporary_bytes
        assert 0.87 < room.sizes.total_bytes / free < 0.91
    geometry = make_geometry(config, engine)
    tokens = min(config.max_position, 4096)
    each = geometry.row_frames(tokens) + geometry.state_frames
    assert engine.max_rows * each < room.sizes.num_frames
    if engine.max_rows < 256:  # twice as many would not fit beside their rings
        rings = room.sizes.ring_bytes // geometry.frame_bytes
        assert 2 * engine.max_rows * each > room.sizes.num_frames - rings


@pytest.mark.parametrize("name", sorted(known()))
@pytest.mark.parametrize("where", sorted(set(cards()) - set(WITH_KERNELS)))
def test_where_xla_makes_the_steps_the_most_rows_are_chosen_that_fit(name, where):
    """There a step takes more for each row, so less is left for twice as many."""
    config, device = load_known(name), card(where)
    engine = choose_settings(config, device, {}, dtype="bfloat16")
    room = find_room(config, engine, device)
    if not room.fits:
        assert engine.max_rows == 1 and room.remedy.startswith("use a smaller model or a device")
        return
    geometry = make_geometry(config, engine)
    each = geometry.row_frames(min(config.max_position, 4096)) + geometry.state_frames

    def holds_its_rows(rows: int) -> bool:
        more = find_room(config, replace(engine, max_rows=rows), device)
        return bool(more.fits) and rows * each < more.sizes.num_frames

    assert engine.max_rows == 1 or holds_its_rows(engine.max_rows)
    assert engine.max_rows == 256 or not holds_its_rows(2 * engine.max_rows)


def test_what_is_given_is_kept_and_the_rest_follows_it():
    given = {"max_rows": 7, "grain": 8, "prefill_tokens": 1024, "steps_per_dispatch": 2}
    found = chosen("nemotron_h_8b", "h200", **given)
    assert {name: getattr(found, name) for name in given} == given
    assert chosen("nemotron_h_8b", "h200", shapes="fine").shapes == "fine"
    small = chosen("nemotron_h_8b", "h200", memory=4 << 30)
    assert (small.memory, small.max_rows) == (4 << 30, 8)
    assert chosen("nemotron_h_8b", "h200", memory=1 << 40).max_rows == 256  # refused elsewhere


def test_chunks_are_shorter_where_weights_leave_little():
    config = load_known("nemotron_h_8b")
    found = [
        choose_settings(
            config, Device(platform="gpu", num_bytes=n << 30), {}, dtype="bfloat16"
        ).prefill_tokens
        for n in (17, 18, 24, 40)
    ]
    assert found == sorted(found) and found[0] < 4096 and found[-1] == 8192


def test_a_gpu_of_unknown_size_gets_a_middling_engine():
    found = choose_settings(load_known("bamba_9b"), Device(platform="gpu"), {}, dtype="bfloat16")
    assert (found.max_rows, found.prefill_tokens, found.memory) == (64, 8192, None)


def test_a_mistake_is_refused_on_any_device():
    for where in ("cpu", "h200"):
        with pytest.raises(ValueError, match="EngineConfig: max_rows must be"):
            chosen("bamba_9b", where, max_rows=0)

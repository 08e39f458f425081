"""Costs as a cache reckons with them; FLOPs and weights of whole models are in test_geometry.py."""

from __future__ import annotations

import pytest

from hybrid_jax.config import (
    MLP,
    Attention,
    EngineConfig,
    GatedDelta,
    LayerSpec,
    Mamba1,
    Mamba2,
    ModelConfig,
)
from hybrid_jax.costs import (
    Costs,
    block_costs,
    model_costs,
    prefill_flops,
    token_flops,
)
from hybrid_jax.geometry import checkpoint_bytes, make_geometry
from hybrid_jax.kinds.table import kind_of

ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=8)
WINDOWED = Attention(num_heads=4, num_kv_heads=2, head_dim=8, window=5)
MAMBA = Mamba2(num_heads=4, head_dim=8, state_size=16)


def model(*mixers) -> ModelConfig:
    layers = tuple(LayerSpec(mixers=(mixer,), mlp=MLP(width=24)) for mixer in mixers)
    return ModelConfig(family="x", vocab_size=8, width=16, layers=layers)


def test_flops_of_a_part_are_those_of_the_whole_without_what_stands_before_it():
    costs = Costs(
        flops_per_token=7,
        flops_per_key=3,
        windows=((5, 2), (40, 11)),
        kv_bytes=1,
        checkpoint_bytes=1,
    )
    for start, end in ((0, 1), (0, 30), (4, 6), (20, 90), (50, 50)):
        keys = lambda window, span=range(start, end): sum(min(q + 1, window) for q in span)
        want = 7 * (end - start) + 3 * keys(10**9) + 2 * keys(5) + 11 * keys(40)
        assert costs.flops(end, start) == want


def test_windows_of_equal_width_are_counted_together():
    costs = block_costs(
        [(2, WINDOWED), (1, ATTENTION), (3, WINDOWED)], width=16, kv_bytes=0, checkpoint_bytes=0
    )
    assert costs.windows == ((5, 5 * 4 * 4 * 8),)
    assert costs.flops_per_key == 4 * 4 * 8


@pytest.mark.parametrize(
    ("kv_bytes", "checkpoint", "tokens"), [(8, 100, 12.5), (0, 100, float("inf")), (8, 0, 0)]
)
def test_tokens_that_take_as_much_as_a_checkpoint(kv_bytes, checkpoint, tokens):
    costs = Costs(
        flops_per_token=1, flops_per_key=1, kv_bytes=kv_bytes, checkpoint_bytes=checkpoint
    )
    assert costs.tokens_per_checkpoint == tokens


@pytest.mark.parametrize(
    "mixers", [(ATTENTION, MAMBA, MAMBA), (ATTENTION, ATTENTION), (MAMBA,)], ids=len
)
def test_a_models_bytes_are_those_of_the_engines_frames(mixers):
    config = model(*mixers)
    geometry = make_geometry(config, EngineConfig(dtype="bfloat16"))
    costs = model_costs(config, geometry)
    assert costs.checkpoint_bytes == checkpoint_bytes(geometry)
    page = geometry.frames_per_page * geometry.frame_bytes if geometry.has_pages else 0
    assert costs.kv_bytes == (page // geometry.page_tokens if page else 0)
    assert (costs.kv_bytes > 0, costs.checkpoint_bytes > 0) == (
        ATTENTION in mixers,
        MAMBA in mixers,
    )


def test_a_models_flops_are_those_of_its_prefill():
    config = model(ATTENTION, MAMBA)
    costs = model_costs(config, make_geometry(config, EngineConfig()))
    assert costs.flops(90, start=30) == prefill_flops(config, 60, 30)


# --- later layers that only write -----------------------------------------------------------------


def test_a_cut_at_half_of_nemotron_h_saves_what_its_formula_says():
    """43.2 % at 8K tokens, where the scan is counted by its chunks; a recurrence costs a little less."""
    mamba = Mamba2(num_heads=128, head_dim=64, state_size=128, num_groups=8)
    attention = Attention(num_heads=32, num_kv_heads=8, head_dim=128)
    half = [(2, attention), (12, mamba), (12, MLP(width=21504, kind="relu2"))]
    taken = {"width": 4096, "kv_bytes": 1, "checkpoint_bytes": 1}
    whole = block_costs(half + half, **taken).flops(8192)
    cut = block_costs(half, **taken, written=half).flops(8192)
    assert 1 - cut / whole == pytest.approx(0.432, abs=0.008)


def test_what_a_token_writes_by_hand():
    assert (
        kind_of(ATTENTION).written_flops(ATTENTION, 16) == 2 * 16 * 2 * 2 * 8
    )  # K and V of two heads
    assert kind_of(MLP(width=24)).written_flops(MLP(width=24), 16) == 0
    # x of 32 channels, B of 16 and 4 steps; convolutions of width 4; decay and update of a 32 x 16 state.
    assert (
        kind_of(MAMBA).written_flops(MAMBA, 16)
        == 2 * 16 * (32 + 16 + 4) + 8 * (32 + 16) + 4 * 32 * 16
    )


@pytest.mark.parametrize(
    "mixer",
    [
        MAMBA,
        ATTENTION,
        Mamba1(inner_size=32, state_size=16, dt_rank=4),
        GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8),
    ],
    ids=lambda mixer: type(mixer).__name__,
)
def test_to_write_is_less_than_to_compute(mixer):
    assert 0 < kind_of(mixer).written_flops(mixer, 16) < 0.7 * token_flops(mixer, 16)


def test_a_cut_behind_the_last_layer_saves_nothing_and_one_before_the_first_most():
    config = model(ATTENTION, MAMBA, MAMBA)
    geometry = make_geometry(config, EngineConfig(dtype="bfloat16"))
    flops = [model_costs(config, geometry, cut=cut).flops(100) for cut in (0, 1, 2, 3)]
    assert flops == sorted(flops) and flops[3] == model_costs(config, geometry).flops(100)
    assert len(set(flops)) == 4
    assert model_costs(config, geometry, cut=1).kv_bytes == model_costs(config, geometry).kv_bytes

"""Rings of honest studies: their sizes, and their length by name."""

from __future__ import annotations

import pytest

from hybrid_jax.config import LayerSpec, Mamba2, ModelConfig
from hybrid_jax.geometry import ring_specs
from hybrid_jax.sim.honest_allocators import make_honest
from hybrid_jax.sim.honest_models import honest_model
from hybrid_jax.sim.pool_honest import run_honest
from tests.sim.tiny import MODEL, pool_load


def test_a_shorter_ring_beside_the_pool_changes_the_footprint_alone():
    load, size = pool_load((6, 20, 0), (4, 30, 0)), 2000
    long, short = (
        run_honest(load, make_honest(name, MODEL, size), MODEL, name=name, pool_bytes=size)
        for name in ("frames@8", "frames@2")
    )
    assert long.tokens_per_tick == short.tokens_per_tick
    # Two rows and the one for padding; six records of 2 bytes less in each.
    assert long.peak_footprint - short.peak_footprint == pytest.approx(3 * 6 * 2 / size)


def test_rings_are_those_of_the_engines_layout():
    model = honest_model("nemotron_h_8b")
    mixer = Mamba2(num_heads=128, head_dim=64, state_size=128, num_groups=8)
    layers = (LayerSpec(mixers=(mixer,)),) * 24
    config = ModelConfig(family="sizes", vocab_size=1, width=1, layers=layers)
    for grain in (1, 8, 32):
        specs = ring_specs(config, model.at_grain(grain).frames, num_rows=1, window=1)
        assert model.at_grain(grain).ring_bytes == sum(each.num_bytes for each in specs.values())
    assert model.window_bytes == 24 * 4 * 10240 * 2
    assert model.record_bytes == 24 * (9216 * 2 + 128 * 4)


@pytest.mark.parametrize("name", ["frames@3", "frames:4@128", "frames@96"])
def test_lengths_that_are_no_power_of_two_up_to_64_are_refused(name):
    length = name.rpartition("@")[2]
    with pytest.raises(ValueError, match=f"{name}: a ring's length .* from 1 to 64, got {length}$"):
        make_honest(name, MODEL, 2000)


@pytest.mark.parametrize("name", ["frames_some", "frames@", "ideal:4@8"])
def test_other_names_are_unknown(name):
    with pytest.raises(ValueError, match="^pool-sim: no allocator"):
        make_honest(name, MODEL, 2000)

"""Descriptions of checkpoints and of configs against what they describe."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jax
import pytest

from hybrid_jax.config import (
    MLP,
    Attention,
    Layer,
    ModelConfig,
    Rope,
    RopeScaling,
    is_feed_forward,
    residual_layer,
)
from hybrid_jax.costs import weight_count
from hybrid_jax.models import FAMILIES, config_from_hf
from hybrid_jax.models.initialize import random_params
from hybrid_jax.models.stored_config import from_json, to_json
from tests.parity.goldens import GOLDENS


def config_of(golden) -> ModelConfig:
    return config_from_hf(json.loads((golden / "config.json").read_text()))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_checkpoints_describe_the_tree_that_the_model_uses(golden):
    config = config_of(golden)
    stored = FAMILIES[config.family].stored(config)
    params = random_params(config, 0)
    assert jax.tree.structure(stored) == jax.tree.structure(params)
    assert jax.tree.map(lambda leaf: leaf.shape, stored) == jax.tree.map(
        lambda leaf: leaf.shape, params
    )


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_checkpoints_hold_as_many_weights_as_the_geometry_counts(golden):
    config = config_of(golden)
    leaves = jax.tree.leaves(FAMILIES[config.family].stored(config))
    shapes = {part.name: part.shape for leaf in leaves for part in leaf.parts}
    assert sum(map(math.prod, shapes.values())) == weight_count(config)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_configs_survive_json(golden):
    config = config_of(golden)
    text = json.dumps(to_json(config), allow_nan=False)
    assert from_json(json.loads(text)) == config


def test_config_of_no_family_survives_json():
    rope = Rope(dim=4, scaling=RopeScaling(kind="linear", factor=2.0))
    attention = Attention(num_heads=2, num_kv_heads=1, head_dim=4, rope=rope, sliding_window=9)
    layers = (
        residual_layer(mixers=(attention,), mlp=MLP(width=8)),
        residual_layer(mlp=MLP(width=4)),
    )
    config = ModelConfig(family="own", vocab_size=9, width=8, layers=layers, eos_token_ids=(3, 4))
    assert from_json(to_json(config)) == config


def test_a_former_field_is_read_where_it_changed_nothing():
    data = to_json(config_of(GOLDENS[0]))
    former = {"own_readout": False, "kv_group": 1, "state_group": 1}
    assert from_json(data | former) == config_of(GOLDENS[0])
    with pytest.raises(ValueError, match="own_readout is no longer supported, .* got True"):
        from_json(data | {"own_readout": True})


def test_layers_as_they_were_stored_before_they_had_blocks_are_read():
    config = config_of(GOLDENS[0])

    def former(layer: Layer) -> dict:
        mixers = [to_json(mixer) for mixer in layer.mixers]
        mlp = next((to_json(part) for part in layer.parts if is_feed_forward(part)), None)
        return {"type": "LayerSpec", "mixers": mixers, "mlp": mlp, "weights_of": None}

    layers = [former(layer) for layer in config.layers]
    data = to_json(config) | {"layers": layers}
    assert from_json(data | {"residual_multiplier": 1.0}) == config
    loud = tuple(layer.with_gain(0.5) for layer in config.layers)
    assert from_json(data | {"residual_multiplier": 0.5}) == replace(config, layers=loud)


def test_unknown_parts_of_a_stored_config_are_named():
    data = to_json(config_of(GOLDENS[0]))
    with pytest.raises(ValueError, match="ModelConfig has no field 'colour'"):
        from_json(data | {"colour": "red"})
    with pytest.raises(ValueError, match="type 'Gru' is unknown, only .*Mamba2"):
        from_json(data | {"layers": [{"type": "Gru"}]})
    with pytest.raises(ValueError, match="must be 'ModelConfig', got 'MLP'"):
        from_json({"type": "MLP", "width": 3})


@pytest.mark.parametrize(
    "change, words",
    [
        ({"vocab_size": "9"}, "vocab_size of ModelConfig must not be '9'"),
        ({"width": True}, "width of ModelConfig must not be True"),
        ({"layers": [3]}, r"layers of ModelConfig must not be \(3,\)"),
        ({"layers": None}, "layers of ModelConfig must not be None"),
        ({"layers": [{"type": "Layer", "blocks": 5}]}, "blocks of Layer must not be 5"),
        ({"layers": [{"type": "LayerSpec", "mixers": 5}]}, "mixers of LayerSpec must not be 5"),
        ({"layers": [{"type": "LayerSpec", "mlp": [3]}]}, r"mlp of LayerSpec must not be \(3,\)"),
        ({"layers": [{"type": "LayerSpec", "blocks": []}]}, "blocks of LayerSpec must not be"),
        ({"layers": [{"type": "LayerSpec", "weights_of": 0}]}, "weights_of is no longer read"),
        ({"eos_token_ids": [None]}, r"eos_token_ids of ModelConfig must not be \(None,\)"),
        ({"draft": {"type": "MLP", "width": 3}}, "draft of ModelConfig must not be MLP"),
        ({"layers": [{"type": ["x"]}]}, r"type \['x'\] is unknown"),
    ],
)
def test_values_of_another_type_in_a_stored_config_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        from_json(to_json(config_of(GOLDENS[0])) | change)

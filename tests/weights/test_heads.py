"""Heads for multi-token prediction in checkpoints: names of tensors, layers, and checkpoints without a head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import MLP, Attention, Mamba2, ModelConfig, MoE, SpeculationConfig
from hybrid_jax.config.speculation import drafting_model
from hybrid_jax.models import FAMILIES, config_from_hf, mtp
from hybrid_jax.models.checkpoint import open_checkpoint
from hybrid_jax.models.hf_config import HFConfig
from hybrid_jax.models.initialize import random_params
from hybrid_jax.train.export import hf_tensors, rounded
from hybrid_jax.weights import load_config, load_model, save_orbax
from hybrid_jax.weights.hugging_face import load_hf
from tests.weights.checkpoints import GOLDEN, read, same_bits, write

DENSE, EXPERTS = "nemotron_h_dense", "nemotron_h_moe_groups"
ONE_HEAD = {"num_nextn_predict_layers": 1}


def write_with_a_head(folder: Path) -> tuple[ModelConfig, dict]:
    """Fills a directory that has a config.json with random weights and a head, and returns what was written."""
    config = load_config(folder)
    config = replace(config, mtp=open_checkpoint(folder).family.mtp(config))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, np.float32),
        random_params(config, 0),
    )
    tensors = hf_tensors(params, config)
    write(folder / "model.safetensors", {n: a.astype(np.float32) for n, a in tensors.items()})
    return config, rounded(params, config)


@pytest.mark.parametrize(
    "name, fields",
    [
        ("granite_moe_nope_tied", {}),
        ("granite_dense_rope_biases", {}),
        (EXPERTS, ONE_HEAD),
        ("nemotron_h_moe_latent_biases", ONE_HEAD),
        ("qwen3_next_experts_and_dense", {}),
    ],
)
def test_a_head_comes_back_as_it_was_written(edit, name, fields):
    folder = edit(name, **fields)
    config, written = write_with_a_head(folder)
    again, params = load_model(folder, mtp=True)
    assert again == config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, written)
    plain, without = load_model(folder)
    head = params.pop("mtp")
    assert plain == replace(config, mtp=()) and same_bits(without, params)
    assert len(head["layers"]) == len(config.mtp)


def add_a_head(tensors: dict) -> None:
    """Adds a head for multi-token prediction, whose layer is a copy of layer 1."""
    layer = {n: a for n, a in tensors.items() if n.startswith("model.layers.1.")}
    tensors.update({n.replace("model.layers.1.", "mtp.layers.0."): a + 1 for n, a in layer.items()})
    rng, width = np.random.default_rng(0), tensors["model.norm.weight"].size
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    tensors["mtp.fc.weight"] = draw(width, 2 * width)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = draw(width)


@pytest.mark.parametrize("name", ["qwen3_5_dense_tied", "qwen3_5_moe_text"])
def test_a_head_for_multi_token_prediction_is_read_where_it_is_asked_for(edit, name, tmp_path):
    folder = edit(name, add_a_head)
    tensors, (_, without) = read(folder / "model.safetensors"), load_model(folder)
    assert same_bits(without, load_model(GOLDEN[name])[1])
    config, params = load_model(folder, mtp=True)
    (spec,), head = config.mtp, params.pop("mtp")
    assert same_bits(params, without) and spec.mixers == (config.attention,)
    assert np.array_equal(head["in_proj"], tensors["mtp.fc.weight"].T)
    assert np.array_equal(head["embed_norm"], 1 + tensors["mtp.pre_fc_norm_embedding.weight"])
    assert np.array_equal(head["hidden_norm"], 1 + tensors["mtp.pre_fc_norm_hidden.weight"])
    assert np.array_equal(head["norm"], 1 + tensors["mtp.norm.weight"])
    (layer,), model_layer = head["layers"], without["layers"][1]
    assert jax.tree.structure(layer) == jax.tree.structure(model_layer)
    assert np.array_equal(layer["mixers"][0]["out"], model_layer["mixers"][0]["out"] + 1)
    save_orbax(tmp_path / "saved", config, params | {"mtp": head})
    again, saved = load_model(tmp_path / "saved", mtp=True)
    assert again == config and same_bits(saved, params | {"mtp": head})
    again, saved = load_model(tmp_path / "saved")
    assert again == replace(config, mtp=()) and same_bits(saved, params)


def test_norms_of_a_head_of_granite_are_stored_as_they_are(edit):
    folder = edit("granite_dense_rope_biases")
    write_with_a_head(folder)
    tensors, head = read(folder / "model.safetensors"), load_model(folder, mtp=True)[1]["mtp"]
    assert np.array_equal(head["norm"], tensors["mtp.norm.weight"])
    assert np.array_equal(head["hidden_norm"], tensors["mtp.pre_fc_norm_hidden.weight"])


def test_a_head_of_granite_is_the_last_layer_with_attention(edit):
    config = load_config(GOLDEN["granite_moe_nope_tied"])
    (layer,) = load_config(GOLDEN["granite_moe_nope_tied"], mtp=True).mtp
    assert layer == config.layers[2] and layer.mixers == (config.attention,)
    folder = edit("granite_moe_nope_tied", layer_types=["mamba"] * 4)
    with pytest.raises(ValueError, match="this model has no layer with attention; choose another"):
        load_config(folder, mtp=True)


# --- Nemotron-H -----------------------------------------------------------------------------------


def nemotron_head(name: str, **fields) -> tuple[ModelConfig, tuple]:
    """A golden's config, and the layers of the head that config.json with these fields has."""
    values = HFConfig(load_fields(name) | fields, "nemotron_h")
    config = config_from_hf(values.values)
    return config, FAMILIES["nemotron_h"].of(values).mtp(config)


def load_fields(name: str) -> dict:
    return json.loads((GOLDEN[name] / "config.json").read_text())


def test_tensors_of_a_head_of_nemotron_h_have_the_published_names(edit):
    folder = edit(EXPERTS, **ONE_HEAD)
    write_with_a_head(folder)
    names = {name for name in read(folder / "model.safetensors") if name.startswith("mtp.")}
    first = ["enorm", "hnorm", "eh_proj", "norm"] + [f"mixer.{x}_proj" for x in "qkvo"]
    last = ["norm", "final_layernorm", "mixer.gate"]
    last += [f"mixer.shared_experts.{x}_proj" for x in ("up", "down")]
    last += [f"mixer.experts.{i}.{x}_proj" for i in range(8) for x in ("up", "down")]
    expected = {f"mtp.layers.0.{name}.weight" for name in first}
    expected |= {f"mtp.layers.1.{name}.weight" for name in last}
    assert names == expected | {"mtp.layers.1.mixer.gate.e_score_correction_bias"}


def test_an_entry_of_a_head_of_nemotron_h_follows_from_its_tensors(edit):
    folder = edit(DENSE, **ONE_HEAD, mtp_layers_block_type=["full_attention", "mlp"])
    config, _ = write_with_a_head(folder)
    config, params = load_hf(open_checkpoint(folder), config, "float32", lambda done, total: None)
    tensors, token = read(folder / "model.safetensors"), 5
    hidden = np.random.default_rng(1).standard_normal(config.width, np.float32)

    def of(name: str) -> np.ndarray:
        return tensors[f"mtp.layers.{name}.weight"]

    def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + 1e-5) * weight

    embedded = tensors["backbone.embeddings.weight"][token]
    halves = [normed(embedded, of("0.enorm")), normed(hidden, of("0.hnorm"))]
    x = of("0.eh_proj") @ np.concatenate(halves)
    value = of("0.mixer.v_proj") @ normed(x, of("0.norm"))  # of the one KV head and the one token
    x = x + of("0.mixer.o_proj") @ np.tile(value, 3)
    up = of("1.mixer.up_proj") @ normed(x, of("1.norm"))
    x = x + of("1.mixer.down_proj") @ np.maximum(up, 0) ** 2
    want = normed(x, of("1.final_layernorm"))
    given = jnp.array([[token]]), jnp.asarray(hidden)[None, None], jnp.array([1])
    got = mtp.forward(params, *given, config)
    np.testing.assert_allclose(got[0, 0], want, atol=1e-4)
    swapped = of("0.eh_proj") @ np.concatenate(halves[::-1])
    assert np.abs(swapped - of("0.eh_proj") @ np.concatenate(halves)).max() > 0.1


@pytest.mark.parametrize(
    "fields, blocks",
    [
        ({}, [Attention, MoE]),
        ({"mtp_layers_block_type": None}, [Attention, MoE]),
        ({"mtp_layers_block_type": ["attention", "mlp"]}, [Attention, MLP]),
        (
            {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*-*"},
            [Attention, MLP, Attention],
        ),
        ({"mtp_layers_block_type": ["mamba"]}, [Mamba2]),
    ],
)
def test_the_layers_of_a_head_of_nemotron_h_are_those_that_the_file_names(fields, blocks):
    config, layers = nemotron_head(EXPERTS, **ONE_HEAD, **fields)
    assert [type(layer.parts[0]) for layer in layers] == blocks
    assert all(layer in config.layers for layer in layers)


def test_heads_of_nemotron_h_that_are_not_supported_are_refused():
    with pytest.raises(NotImplementedError, match="num_nextn_predict_layers 2 is not supported"):
        nemotron_head(EXPERTS, num_nextn_predict_layers=2)
    with pytest.raises(ValueError, match="no head .*: num_nextn_predict_layers .* is None"):
        nemotron_head(EXPERTS, num_nextn_predict_layers=None)
    with pytest.raises(ValueError, match="this model has no layer with moe"):
        nemotron_head(DENSE, **ONE_HEAD)
    with pytest.raises(ValueError, match=r"mtp_hybrid_override_pattern .* M\*-E, got \['x'\]"):
        odd = {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*x"}
        nemotron_head(EXPERTS, **ONE_HEAD, **odd)
    config, layers = nemotron_head(EXPERTS, **ONE_HEAD, mtp_layers_block_type=["mamba"])
    with pytest.raises(ValueError, match="needs a head of attention layers, got one with Mamba2"):
        drafting_model(replace(config, mtp=layers), SpeculationConfig(method="mtp"))


# --- heads that are not there, or only in part ----------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5_dense_tied", "granite_dense_rope_biases", EXPERTS])
def test_a_checkpoint_without_a_head_says_so(name):
    with pytest.raises(
        ValueError,
        match="has no head for multi-token prediction: .* choose another speculation than 'mtp'",
    ):
        load_model(GOLDEN[name], mtp=True)


def test_a_family_without_heads_says_so():
    with pytest.raises(ValueError, match=".*family llama has no head .*qwen3_next"):
        load_model(GOLDEN["llama_llama3"], mtp=True)


def test_a_missing_part_of_a_head_is_named(edit):
    def add_most(tensors):
        add_a_head(tensors)
        del tensors["mtp.norm.weight"]

    folder = edit("qwen3_5_dense_tied", add_most)
    with pytest.raises(ValueError, match=r"tensor mtp\.norm\.weight \(\d+,\) is missing .* again"):
        load_model(folder, mtp=True)
    load_model(folder)


def test_a_second_layer_of_a_head_is_not_ignored(edit):
    def add_two(tensors):
        add_a_head(tensors)
        tensors["mtp.layers.1.input_layernorm.weight"] = np.zeros(3, np.float32)

    folder = edit("qwen3_5_dense_tied", add_two)
    with pytest.raises(ValueError, match=r"1 tensors .*mtp\.layers\.1\..* with mtp=False"):
        load_model(folder, mtp=True)
    load_model(folder)

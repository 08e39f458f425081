"""Models saved with orbax: every bit comes back, and nothing else is overwritten."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax.config import Attention, ModelConfig, residual_layer
from hybrid_jax.models.initialize import random_params
from hybrid_jax.weights import BUNDLED, load_model, orbax, save_orbax
from hybrid_jax.weights.load import open_model
from tests.parity.goldens import GOLDENS
from tests.weights.checkpoints import GOLDEN, same_bits


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_orbax_round_trip_keeps_every_bit(golden, tmp_path):
    config, params = load_model(golden, dtype="bfloat16")
    save_orbax(tmp_path / "model", config, params)
    again, restored = load_model(tmp_path / "model")
    assert again == config
    assert same_bits(restored, params)


def test_orbax_keeps_shared_layers_and_copies_the_tokenizer(tmp_path):
    attention = Attention(num_heads=2, num_kv_heads=1, head_dim=4)
    layer = residual_layer(mixers=(attention,))
    layers = (layer, layer.again(0))
    config = ModelConfig(family="own", vocab_size=9, width=8, layers=layers)
    params = random_params(config, 1)
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("no")
    save_orbax(tmp_path / "model", config, params, tokenizer_from=source)
    again, restored = load_model(tmp_path / "model")
    assert again == config
    assert restored["layers"][1] == {}
    assert same_bits(restored, params)
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert names == {"model_config.json", "params", "tokenizer.json"}


def test_orbax_replaces_an_earlier_model_and_nothing_else(tmp_path):
    config, params = load_model(GOLDEN["mamba2_biases_tied"])
    save_orbax(tmp_path / "model", config, params)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    save_orbax(tmp_path / "model", config, doubled)
    assert same_bits(load_model(tmp_path / "model")[1], doubled)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("text")
    with pytest.raises(ValueError, match="thesis exists and is not a saved model"):
        save_orbax(tmp_path / "thesis", config, params)


def test_a_model_is_written_over_itself_in_another_dtype(tmp_path):
    config, params = load_model(BUNDLED, dtype="float32")
    folder = tmp_path / "model"
    save_orbax(folder, config, params, tokenizer_from=BUNDLED)
    save_orbax(folder, *load_model(folder, dtype="bfloat16"), tokenizer_from=folder)
    again, restored = load_model(folder)
    assert again.dtype == "bfloat16" and (folder / "tokenizer.json").is_file()
    assert same_bits(restored, load_model(BUNDLED, dtype="bfloat16")[1])
    assert sorted(file.name for file in folder.iterdir() if file.is_dir()) == ["params"]


def test_orbax_casts_on_load(tmp_path):
    config, params = load_model(GOLDEN["mamba2_biases_tied"])
    save_orbax(tmp_path / "model", config, params)
    config, restored = load_model(tmp_path / "model", dtype="bfloat16")
    mixer = restored["layers"][0]["mixers"][0]
    assert config.dtype == "bfloat16"
    assert mixer["in_proj"].dtype == jnp.bfloat16
    assert mixer["A_log"].dtype == jnp.float32


@pytest.mark.parametrize("group_bytes", [0, 20_000])
def test_arrays_that_are_read_in_groups_keep_every_bit(group_bytes, tmp_path, monkeypatch):
    config, params = load_model(GOLDEN["falcon_h1_gate_first_tied"])
    save_orbax(tmp_path, config, params)
    monkeypatch.setattr(orbax, "GROUP_BYTES", group_bytes)
    seen = []
    _, restored = load_model(tmp_path, progress=lambda *found: seen.append(found))
    assert same_bits(restored, params)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert seen[0] == (0, total) and seen[-1] == (total, total) and seen == sorted(set(seen))
    steps = [now[0] - before[0] for before, now in pairwise(seen)]
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert len(steps) > 3 and max(steps) <= max(group_bytes, largest)


def test_a_head_that_is_not_asked_for_is_not_read(tmp_path):
    attention = Attention(num_heads=2, num_kv_heads=1, head_dim=4)
    layers = (residual_layer(mixers=(attention,)),)
    config = ModelConfig(family="own", vocab_size=9, width=8, layers=layers, mtp=layers)
    params = random_params(config, 1)
    save_orbax(tmp_path, config, params)
    again, restored = load_model(tmp_path, mtp=True)
    assert again == config and same_bits(restored, params)
    seen = []
    plain, restored = load_model(tmp_path, progress=lambda *found: seen.append(found))
    assert plain == replace(config, mtp=())
    del params["mtp"]
    assert same_bits(restored, params)
    assert seen[-1] == (sum(leaf.nbytes for leaf in jax.tree.leaves(params)),) * 2


def test_an_error_of_the_device_is_no_damage_of_the_files(tmp_path):
    save_orbax(tmp_path, *load_model(GOLDEN["mamba2_biases_tied"]))

    def put(*weight):
        raise MemoryError("the device is full")

    with pytest.raises(MemoryError, match="the device is full"):
        open_model(tmp_path).load(put=put)


def test_orbax_directory_without_its_arrays_is_refused(tmp_path):
    config, params = load_model(GOLDEN["mamba2_biases_tied"])
    save_orbax(tmp_path / "model", config, params)
    shutil.rmtree(tmp_path / "model" / "params")
    with pytest.raises(FileNotFoundError, match=r"has model_config\.json but no params/"):
        load_model(tmp_path / "model")


def test_damaged_orbax_directory_is_refused(tmp_path):
    config, params = load_model(GOLDEN["mamba2_biases_tied"])
    save_orbax(tmp_path / "model", config, params)
    blobs = max(
        (file for file in (tmp_path / "model" / "params").rglob("*") if file.is_file()),
        key=lambda file: file.stat().st_size,
    )
    blobs.write_bytes(blobs.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model/params is damaged or not an orbax checkpoint"):
        load_model(tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "params")
    (tmp_path / "model" / "params").mkdir()
    with pytest.raises(ValueError, match=r"model/params is damaged or not an orbax checkpoint"):
        load_model(tmp_path / "model")


def test_arrays_of_another_size_than_the_config_names_are_refused_before_they_are_read(tmp_path):
    config, params = load_model(GOLDEN["mamba2_biases_tied"])
    save_orbax(tmp_path / "model", config, params)
    params["embed"] = jnp.zeros((3, config.width))
    save_orbax(tmp_path / "other", config, params)
    shown = rf"\['embed'\] of shape \(3, {config.width}\), model_config\.json asks for"
    with pytest.raises(ValueError, match=shown):
        load_model(tmp_path / "other")
    del params["norm"]
    save_orbax(
        tmp_path / "less", config, params | {"embed": load_model(tmp_path / "model")[1]["embed"]}
    )
    with pytest.raises(ValueError, match=r"\['norm'\] of shape None, model_config\.json asks for"):
        load_model(tmp_path / "less")


@pytest.mark.parametrize("change", ["empty", "half", "noise", "gone", "folder"])
def test_a_damaged_file_of_an_orbax_directory_is_one_line_or_does_no_harm(tmp_path, change):
    config, params = load_model(GOLDEN["mamba2_biases_tied"])
    save_orbax(tmp_path / "model", config, params)
    files = [file for file in (tmp_path / "model").rglob("*") if file.is_file()]
    num_refused = 0
    for file in sorted(files):
        data = file.read_bytes()
        file.unlink()
        if change == "folder":
            file.mkdir()
        elif change != "gone":
            half = data[: len(data) // 2]
            file.write_bytes({"empty": b"", "half": half, "noise": bytes(range(256)) * 9}[change])
        try:
            load_model(tmp_path / "model")
        except ValueError as error:
            assert "model" in str(error) and "\n" not in str(error)
            num_refused += 1
        if change == "folder":
            file.rmdir()
        file.write_bytes(data)
    assert num_refused >= 4

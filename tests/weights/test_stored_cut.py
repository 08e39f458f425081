"""A model with a cut as a directory beside the model without: what is written, read, and refused."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hybrid_jax.config import with_cut
from hybrid_jax.inspection.report import read_config
from hybrid_jax.models.cut import cut_params
from hybrid_jax.models.files import CUT_FILE, CheckpointNotFound
from hybrid_jax.weights import BUNDLED, load_config, load_model
from hybrid_jax.weights.cut import WEIGHTS_FILE, own_tensors, save_cut, with_tensors


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The bundled model, elsewhere."""
    folder = tmp_path_factory.mktemp("models") / "base"
    shutil.copytree(BUNDLED, folder)
    return folder


@pytest.fixture
def stored(base, tmp_path):
    """A directory with a cut beside the base, its config, and its parameters."""
    config, plain = load_model(base)
    config = with_cut(config, 4, state_group=3)
    params = cut_params(plain, config)
    rng = np.random.default_rng(0)

    def spread(leaf: jax.Array) -> jax.Array:
        return leaf + jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    tensors = jax.tree.map(spread, own_tensors(params, config))
    save_cut(tmp_path / "cut", config, tensors, base=base, base_params=plain)
    return tmp_path / "cut", config, with_tensors(params, tensors)


def test_what_was_written_is_read(stored, base):
    folder, config, params = stored
    assert json.loads((folder / CUT_FILE).read_text())["base"].endswith("models/base") or base
    read, found = load_model(folder)
    assert read == config == load_config(folder) == read_config(folder)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert (folder / "tokenizer.json").is_file()
    wide, _ = load_model(folder, dtype="float32")
    assert wide.dtype == "float32" and wide.cut == 4


def test_only_what_differs_is_written(stored, base):
    folder, config, params = stored
    own = sum(leaf.nbytes for leaf in own_tensors(params, config).values())
    assert own <= (folder / WEIGHTS_FILE).stat().st_size < own + 30_000
    assert own < 0.2 * (base / "model.safetensors").stat().st_size


def test_the_bundled_model_needs_no_path(tmp_path):
    config, params = load_model(BUNDLED)
    config = with_cut(config, 6)
    tensors = own_tensors(cut_params(params, config), config)
    save_cut(tmp_path, config, tensors, base=BUNDLED, base_params=params)
    assert json.loads((tmp_path / CUT_FILE).read_text())["base"] is None
    assert load_config(tmp_path) == config


def test_a_base_with_a_head_of_its_own_keeps_it(stored, base, tmp_path):
    """config.json ties the head to the embedding, and only the tensors tell that the two differ."""
    folder, config, params = stored
    assert config.tie_embeddings
    other = tmp_path / "untied"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    [embed] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    save_file(tensors | {"lm_head.weight": 2 * tensors[embed]}, other / "model.safetensors")
    config, plain = load_model(other)
    assert not config.tie_embeddings
    config = with_cut(config, 4, state_group=3)
    tensors = own_tensors(params, config)
    save_cut(tmp_path / "cut", config, tensors, base=other, base_params=plain)
    read, found = load_model(tmp_path / "cut")
    assert read == config
    jax.tree.map(np.testing.assert_array_equal, found, params | {"head": plain["head"]})


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"base": "gone"}, CheckpointNotFound, "gone, which does not exist; put it there"),
        ({"base": 5}, ValueError, "base in .* must be the path of a directory or null, got 5"),
        ({"cut": 9}, ValueError, "at least 1 and below the number of layers, 8, got 9"),
        ({"cut": "4"}, ValueError, "cut must be a whole number of at least 1, got '4'"),
        ({"own_readout": True}, ValueError, "own_readout is no longer supported, .* got True"),
        ({"state_group": 2}, ValueError, "state_group must divide .* after the cut, 3, got 2"),
        ({"state_group": 1}, ValueError, "has no tensor layers|must have shape"),
    ],
)
def test_files_that_do_not_fit_are_refused(stored, change, error, message):
    folder, *_ = stored
    values = json.loads((folder / CUT_FILE).read_text())
    (folder / CUT_FILE).write_text(json.dumps(values | change))
    with pytest.raises(error, match=message):
        load_model(folder)


def test_a_former_field_that_changed_nothing_is_read(stored):
    folder, config, _ = stored
    values = json.loads((folder / CUT_FILE).read_text())
    (folder / CUT_FILE).write_text(json.dumps(values | {"own_readout": False}))
    assert load_config(folder) == config


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_another_model_in_place_of_the_base_is_noticed(stored, base, tmp_path, dtype):
    folder, *_ = stored
    load_model(folder, dtype=dtype)
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in sorted(tensors) if tensors[name].ndim == 2)
    tensors[name] = (1.02 * tensors[name].astype(np.float32)).astype(tensors[name].dtype)
    save_file(tensors, other / "model.safetensors")
    values = json.loads((folder / CUT_FILE).read_text())
    (folder / CUT_FILE).write_text(json.dumps(values | {"base": "../other"}))
    with pytest.raises(ValueError, match="was made beside another model than the one .* differs"):
        load_model(folder, dtype=dtype)


def test_missing_weights_and_a_head_are_refused(stored):
    folder, *_ = stored
    with pytest.raises(ValueError, match="has a cut, so the tokens of prompts have no last hidden"):
        load_model(folder, mtp=True)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointNotFound, match=f"has {CUT_FILE} but no {WEIGHTS_FILE}"):
        load_model(folder)

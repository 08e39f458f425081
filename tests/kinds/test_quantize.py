"""Which matrices become codes when a model is quantised, and what they take then."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.config import GatedDelta, Mamba1, Mamba2, MoE
from hybrid_jax.config.formats import DENSE, QUANTIZED, Joined
from hybrid_jax.costs import weight_bytes
from hybrid_jax.inspection.report import inspect_model
from hybrid_jax.kinds.kind import placed
from hybrid_jax.kinds.quantize import bytes_by_format, quantized
from hybrid_jax.kinds.table import kind_of, model_weights
from hybrid_jax.models.initialize import random_params
from hybrid_jax.products.matrix import Matrix
from hybrid_jax.products.operations import encoded
from hybrid_jax.weights import load_model
from hybrid_jax.weights.orbax import save_orbax
from tests.tiny_models import tiny_model

# What stays in each kind of layer, beside vectors.
KINDS = {
    "nemotron_h_moe": {"router"},
    "qwen3_next": {"router", "shared_gate"},
    "jamba": {"router", "x_proj", "dt_proj"},
    "bamba": set(),
    "lfm2": set(),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_stays_as_it_is(name):
    config = quantized(tiny_model(name)[0], "int8")
    for place, weight in placed(model_weights(config)):
        first, last = place.split(".")[0], place.split(".")[-1]
        stays = first != "layers" or last in KINDS[name] or not weight.is_multiplied
        assert (weight.format == DENSE) == stays, place


@pytest.mark.parametrize(
    ("spec", "columns"),
    [
        (Mamba2(num_heads=6, head_dim=4, state_size=8, num_groups=2), 6),
        (GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8), 8),
    ],
)
def test_decays_and_step_sizes_stay(spec, columns):
    weight = kind_of(spec).weights(spec, 32)["in_proj"]
    assert weight.stays == columns
    own = [size for name, size in kind_of(spec).parts(spec).own.items() if name in ("dt", "a", "b")]
    assert sum(own) == columns
    [kept] = {
        weight.format
        for place, weight in placed(model_weights(quantized(tiny_model("bamba")[0], "int4")))
        if place.endswith("in_proj")
    }
    assert isinstance(kept, Joined) and [own for _, own in kept.parts] == [QUANTIZED["int4"], DENSE]


def test_small_projections_of_mamba_and_latents_stay():
    spec = Mamba1(inner_size=16, state_size=8, dt_rank=4)
    tree = kind_of(spec).weights(spec, 32)
    assert {n for n, w in tree.items() if w.is_matrix and w.stays} == {"x_proj", "dt_proj"}
    latent = MoE(num_experts=4, top_k=2, width=8, latent_width=16)
    tree = kind_of(latent).weights(latent, 32)
    stays = {n for n, w in tree.items() if hasattr(w, "stays") and w.is_matrix and w.stays}
    assert stays == {"latent_down", "latent_up"}


@pytest.mark.parametrize("name", QUANTIZED)
def test_files_are_quantised_one_matrix_after_the_other(name, tmp_path):
    """What comes out are the codes of each matrix alone, from files of either kind."""
    plain, numbers = load_model()
    config, params = load_model(quantize=name)
    assert config == quantized(plain, name)
    own = random_params(config, 0, plain.dtype)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), own) == jax.tree.map(
        lambda a: (a.shape, a.dtype), params
    )
    for place, format in config.matrices:
        first, second = params, numbers
        for key in place.split("."):
            step = int(key) if key.isdigit() else key
            first, second = first[step], second[step]
        jax.tree.map(np.testing.assert_array_equal, first, encoded(second, format))
        values = np.asarray(Matrix(first, format).values, np.float32)
        wide = np.asarray(second, np.float32)
        most = {"int8": 0.005, "fp8": 0.04, "int4": 0.08}[name] * np.abs(wide).max()
        assert 0 < np.abs(values - wide).max() <= most
    save_orbax(tmp_path / "plain", plain, numbers)
    again, stored = load_model(tmp_path / "plain", quantize=name)
    assert again.matrices == config.matrices
    jax.tree.map(np.testing.assert_array_equal, stored, params)
    save_orbax(tmp_path / "codes", config, params)
    saved, stored = load_model(tmp_path / "codes")
    assert saved == config
    jax.tree.map(np.testing.assert_array_equal, stored, params)
    with pytest.raises(ValueError, match=f"quantize='{name}' is for weights of 16 or 32 bits, and"):
        load_model(tmp_path / "codes", quantize=name)


def test_bytes_are_those_that_are_held():
    plain, _ = load_model()
    for name, share in (("int8", 0.6), ("int4", 0.4)):
        config, params = load_model(quantize=name)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        assert held == weight_bytes(config, config.dtype)
        assert held < share * weight_bytes(plain, plain.dtype)
        [(about, size)] = bytes_by_format(config, config.dtype).items()
        assert about == QUANTIZED[name].about and 0.8 * held < size < held
    assert bytes_by_format(plain, "float32") == {}


def test_an_engine_says_what_it_has_and_answers():
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(quantize="int8", quiet=True) as llm:
        assert "codes     int8, a scale per column: 3." in llm.describe()
        assert len(llm.generate("def f(", greedy)[0].outputs[0].token_ids) == 8
    found = inspect_model(quantize="int4", device="cpu")
    assert list(found["codes"]) == ["int4, a scale per 32"]
    assert "int4, a scale per 32: " in str(found)


def test_what_cannot_be_quantised():
    config, params = tiny_model("bamba")
    with pytest.raises(ValueError, match="quantize='fp8' is for models that are read from files"):
        LLM.from_params(config, params, quantize="fp8", quiet=True)
    with pytest.raises(ValueError, match="quantize must be one of int8, fp8, int4, got 'int3'"):
        load_model(quantize="int3")
    codes = quantized(config, "int8")
    with pytest.raises(ValueError, match="of 16 or 32 bits, and layers.0.*; leave quantize out"):
        quantized(codes, "int8")
    assert quantized(replace(config, draft=config), "int8").draft == config

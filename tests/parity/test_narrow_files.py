"""Tiny quantised files stand for what the libraries that own their formats make of them, to the last bit.

The answers of the libraries are stored; make_narrow_goldens.py wrote them. Neither they nor torch are needed here.
"""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from hybrid_jax.models.decoder import forward
from hybrid_jax.weights import load_model
from tests.drawing import spine
from tests.parity.goldens import tolerance
from tests.parity.narrow.answers import answers, logits
from tests.parity.narrow.damage import DAMAGES
from tests.parity.narrow.drawing import digest
from tests.parity.narrow.files import (
    CONFIG,
    DTYPES,
    VARIANTS,
    WEIGHTS,
    files,
    fingerprint,
    plain,
    weights_file,
    write,
)
from tests.parity.narrow.models import MODELS

# One variant of each model, with the most in it.
WHOLE = ("compressed_pack4_order", "fp8_blocks_partial", "modelopt_fp8", "modelopt_mixed")


@spine("fp8_blocks]", "compressed_nvfp4]", "gptq]")
@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_those_of_the_libraries(name):
    made, known = files(name), answers()[name]
    assert fingerprint(made) == known["files"], "the libraries were asked about other files"
    confirmed = set()
    for library, rules in known["weights"].items():
        for rule, digests in rules.items():
            ours = {weight: digest(made.weights[weight].rounded(rule)) for weight in digests}
            assert ours == digests, f"{library}, {rule}"
            confirmed |= digests.keys() if rule == "float32" else set()
    assert confirmed == made.weights.keys()


def test_every_variant_has_answers():
    assert answers().keys() == VARIANTS.keys() == logits().keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_is_two_roundings_from_float64(name):
    for weight in files(name).weights.values():
        exact = weight.weight(np.float64)
        assert np.abs(weight.weight() - exact).max() <= 2.0**-23 * np.abs(exact).max(), weight.name


@pytest.mark.parametrize("name", VARIANTS)
def test_the_library_reads_the_files(tmp_path, name):
    """All names, shapes and dtypes, and the values of those tensors that numpy knows."""
    made, found = files(name), {}
    for file in write(tmp_path / "model", name).glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            for key in opened.keys():
                entry = opened.get_slice(key)
                found[key] = (entry.get_dtype(), tuple(entry.get_shape()))
                if found[key][0] in ("I32", "I64", "U8", "F32"):
                    assert np.array_equal(opened.get_tensor(key), made.tensors[key]), key
    assert found == {key: (DTYPES[t.dtype], t.shape) for key, t in made.tensors.items()}


@functools.cache
def compiled(config):
    """The model's forward, compiled once."""
    return jax.jit(lambda params, tokens: forward(params, tokens, config))


@pytest.mark.parametrize("name", WHOLE)
def test_logits_of_the_weights_are_those_of_transformers(tmp_path, name):
    made = files(name)
    made.config.pop("quantization_config", None)
    (tmp_path / CONFIG).write_text(json.dumps(made.config))
    (tmp_path / WEIGHTS).write_bytes(weights_file(plain(made)))
    config, params = load_model(tmp_path)
    tokens = jnp.asarray([MODELS[VARIANTS[name].model].prompt], jnp.int32)
    difference = np.abs(np.asarray(compiled(config)(params, tokens))[0] - logits()[name]).max()
    assert difference < tolerance(config)


def test_every_damage_is_a_different_one():
    names = [(damage.variant, damage.wrong) for damage in DAMAGES]
    assert len(set(names)) == len(names) >= 60
    whole = {variant: files(variant).contents() for variant in {v for v, _ in names}}
    for damage in DAMAGES:
        made, words = damage.make()
        assert made.contents() != whole[damage.variant], damage.wrong
        assert all(words), damage.wrong
    assert any(not damage.make()[1] for damage in DAMAGES)

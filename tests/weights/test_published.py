"""Weights of 8 and 4 bits as they are published: what is read stands for the numbers that the files stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.config import XLA
from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.config.formats import Joined, Scaled
from hybrid_jax.kinds.kind import map_weights
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.kinds.tensors import Part, Stored
from hybrid_jax.models.checkpoint import open_checkpoint
from hybrid_jax.models.decoder import forward
from hybrid_jax.models.matrices import with_matrices
from hybrid_jax.models.published.runs import names_there
from hybrid_jax.weights.load import load_config, load_model
from hybrid_jax.weights.orbax import save_orbax
from tests.drawing import spine
from tests.parity.narrow.answers import logits
from tests.parity.narrow.files import VARIANTS, files
from tests.parity.narrow.models import MODELS

# Each way to keep a matrix once, and each kind of layer.
DISTINCT = {
    "fp8_blocks_mamba": {
        "fp8, a scale per 128 x 128",
        "fp8, a scale per 128",
    },  # of rows of some blocks
    "compressed_w8a8": {"int8, a scale per column"},
    "compressed_pack4_order": {"int4, a scale per 32 in an order of its own"},
    "compressed_mxfp4": {"mxfp4, a scale per 32"},
    "modelopt_nvfp4": {"nvfp4, a scale per 16"},
    "gptq": {"int4, a scale per 128 with zero points"},
    "gptq_8": {"int8, a scale per 128 with zero points"},
    "awq_64": {"int4, a scale per 64 with zero points"},
}


def parts_of(stored: Any, bound: Any) -> Iterator[tuple[Part, Any]]:
    """Each tensor of a tree of `Stored`, with the parameter that it is a part of."""
    if isinstance(stored, Stored):
        for part in stored.parts:
            yield part, bound
        return
    for key in stored if isinstance(stored, dict) else range(len(stored)):
        yield from parts_of(stored[key], bound[key])


@spine("fp8_blocks_experts]", "awq]", "modelopt_nvfp4]")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_weight_is_read_to_the_last_bit(name, tmp_path):
    """And nothing else is: each weight of the files finds its place."""
    made = files(name)
    folder = made.write(tmp_path / "model")
    has_head = any(weight.startswith("mtp.") for weight in made.weights)
    config, params = load_model(folder, mtp=has_head)
    names = names_there(made.tensors) | made.weights.keys()
    tree = open_checkpoint(folder).family.stored(config, names)
    left = set(made.weights)
    for part, matrix in parts_of(tree, with_matrices(params, config, XLA)):
        if part.name not in made.weights:
            continue
        left.discard(part.name)
        want = made.weights[part.name].weight(np.float64)
        if part.rows is not None:
            blocks = want.reshape(part.rows.blocks, part.rows.size, -1)
            want = blocks[:, part.rows.start : part.rows.stop].reshape(-1, want.shape[-1])
        got = np.asarray(matrix.values, np.float64)[part.place]
        np.testing.assert_allclose(got.swapaxes(-1, -2), want, rtol=2e-7, atol=0)
    assert not left
    stored = map_weights(lambda weight: weight.specs(config.dtype), model_weights(config))
    described = jax.tree.map(lambda array: ArraySpec(array.shape, array.dtype.name), params)
    assert described == stored  # so bytes are known before anything is read
    if not has_head:
        assert load_config(folder).matrices == config.matrices


@pytest.mark.parametrize("name", DISTINCT)
def test_formats_are_those_of_the_files(name, tmp_path):
    config = load_config(files(name).write(tmp_path / "model"))
    found = set()
    for _, format in config.matrices:
        inner = [own for _, own in format.parts] if isinstance(format, Joined) else [format]
        found |= {own.about for own in inner if isinstance(own, Scaled)}
    one_group = {about for about in found if about.endswith("per column")}  # of few rows or columns
    assert DISTINCT[name] <= found <= DISTINCT[name] | one_group


@spine("compressed_pack4_order]", "fp8_blocks_experts]")
@pytest.mark.parametrize("name", [name for name in VARIANTS if name in logits()])
def test_logits_are_those_of_transformers_with_the_same_numbers(name, tmp_path):
    """Those were computed in float32 from the numbers that the files stand for."""
    config, params = load_model(files(name).write(tmp_path / "model"), dtype="float32")
    prompt = MODELS[VARIANTS[name].model].prompt
    tokens = jnp.asarray(prompt, jnp.int32)[None]
    got = forward(with_matrices(params, config, XLA), tokens, config)[0]
    want = logits()[name]
    np.testing.assert_allclose(got, want, atol=2e-5 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("name", ["fp8_blocks_experts", "compressed_pack4_order", "awq"])
def test_what_was_read_is_written_and_read_again(name, tmp_path):
    config, params = load_model(files(name).write(tmp_path / "model"))
    save_orbax(tmp_path / "saved", config, params)
    again, stored = load_model(tmp_path / "saved")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, stored, params)


@pytest.mark.parametrize("name", ["fp8_blocks_experts", "compressed_pack4_zeros_32", "gptq_order"])
def test_tokens_of_an_engine_are_those_of_the_same_numbers(name, tmp_path):
    folder = files(name).write(tmp_path / "model")
    config, params = load_model(folder, dtype="float32")
    bound = with_matrices(params, config, XLA)
    is_matrix = lambda leaf: hasattr(leaf, "operations")
    numbers = jax.tree.map(lambda m: m.values if is_matrix(m) else m, bound, is_leaf=is_matrix)
    prompts, greedy = [[3, 17, 42], [5, 9]], SamplingParams(temperature=0, max_tokens=12)
    plain = replace(config, matrices=())
    with LLM(folder, dtype="float32", memory="8MiB", quiet=True) as llm:
        got = [out.outputs[0].token_ids for out in llm.generate(prompts, greedy)]
        assert len(set(map(tuple, got))) == 2
        assert got == [out.outputs[0].token_ids for out in llm.generate(prompts, greedy)]
    with LLM.from_params(plain, numbers, memory="8MiB", quiet=True) as llm:
        assert got == [out.outputs[0].token_ids for out in llm.generate(prompts, greedy)]

"""Weights from files, each put on the devices as it is read."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams, SpeculationConfig, load_model, save_orbax
from hybrid_jax.mesh.shards import Placing, Shards
from hybrid_jax.weights.load import open_model
from tests.drawing import left_to_all
from tests.imports import ROOT
from tests.llms import engines_of

GOLDENS = {
    "falcon_h1_gate_first_tied": (2, 4),
    "falcon_mamba_untied": (2, 3, 4),
    "jamba_dense_tied": (2, 4),
    "lfm2_attention_first_untied": (2, 4),
    "lfm2_biases_adjusted": (3,),
    "llama_llama3": (3,),
    "llama_swiftkv_groups_tied": (2, 4),
    "mamba2_groups_limits": (3,),
    "mamba_biases_untied": (2, 3),
    "qwen2_swiftkv_groups": (2, 4),
    "qwen2_tied": (2,),
    "qwen3_5_dense_tied": (2,),
}
CASES = [(name, count) for name, counts in GOLDENS.items() for count in counts]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = {"prompt_token_ids": [(3 * k + k * k) % 50 for k in range(70)]}


def folder_of(name):
    return ROOT / "tests" / "parity" / "goldens" / name


@pytest.mark.parametrize(("name", "count"), CASES)
def test_the_parts_make_up_what_one_device_reads(name, count, devices):
    whole = load_model(folder_of(name))[1]
    opened = open_model(folder_of(name))
    config, params = opened.load(put=Placing(devices[:count]))
    shards = Shards(config, devices[:count])
    assert jax.tree.structure(params) == jax.tree.structure(whole)
    for leaf, read in zip(
        jax.tree.leaves(shards.whole(params)), jax.tree.leaves(whole), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (read.shape, read.dtype)
        assert np.array_equal(np.asarray(leaf), np.asarray(read))
    assert all(leaf.sharding.mesh == shards.mesh for leaf in jax.tree.leaves(params))
    placed = shards.place(params)
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (placed, params)), strict=True))


@left_to_all(*(f"{name}-{count}" for name, count in CASES if name != "jamba_dense_tied"))
@pytest.mark.parametrize(("name", "count"), CASES)
def test_tokens_of_a_directory_are_those_of_one_device(name, count):
    found = []
    for mesh in (None, f"tp={count}"):
        with LLM(folder_of(name), mesh=mesh, max_rows=1, max_model_len=96, quiet=True) as llm:
            found.append(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    assert found[0] == found[1]


def test_an_orbax_directory(tmp_path):
    config, params = load_model(folder_of("qwen2_tied"))
    save_orbax(tmp_path, config, params)
    found = []
    for mesh in (None, "tp=2"):
        with LLM(tmp_path, mesh=mesh, max_rows=1, max_model_len=96, quiet=True) as llm:
            found.append(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    assert found[0] == found[1]


def test_a_second_model_beside_weights_in_memory():
    model = load_model(folder_of("qwen2_tied"))
    speculation = SpeculationConfig(method="draft", model=folder_of("qwen2_tied"))
    settings = {"max_rows": 1, "max_model_len": 96, "quiet": True, "speculation": speculation}
    found = []
    for mesh in (None, "tp=2"):
        with LLM.from_params(*model, mesh=mesh, **settings) as llm:
            found.append(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            "tp=0",
            "LLM: mesh must be like 'tp=4', 'dp=2', 'dp=2,tp=2' or 'prefill=1,decode=2', got 'tp=0'",
        ),
        (
            "four",
            "LLM: mesh must be like 'tp=4', 'dp=2', 'dp=2,tp=2' or 'prefill=1,decode=2', got 'four'",
        ),
        (4, "LLM: mesh must be like .* or a jax.sharding.Mesh, got 4"),
        ("tp=5", "num_heads of Attention layers must be a multiple of the devices .* and 5"),
    ],
)
def test_what_is_no_mesh_for_a_model(mesh, message):
    with pytest.raises(ValueError, match=message):
        LLM(folder_of("qwen2_tied"), mesh=mesh, quiet=True)


def test_more_devices_than_there_are():
    message = (
        r"LLM: mesh needs 12 devices \(dp=6 x tp=2\), and jax has 8 from .* on; lower dp or tp"
    )
    with pytest.raises(ValueError, match=message):
        LLM(folder_of("qwen2_tied"), mesh="dp=6,tp=2", quiet=True)
    message = "LLM: mesh needs 24 devices .tp=24., and jax has 8 from .* on; lower tp"
    with pytest.raises(ValueError, match=message):
        LLM(folder_of("falcon_mamba_untied"), mesh="tp=24", quiet=True)


def test_a_mesh_of_the_callers_with_one_device(devices):
    mesh = jax.sharding.Mesh(np.array(devices[3:4]), ("tp",))
    settings = {"mesh": mesh, "max_rows": 1, "max_model_len": 96, "quiet": True}
    config, params = load_model(folder_of("qwen2_tied"))
    for make in (
        lambda: LLM(folder_of("qwen2_tied"), **settings),
        lambda: LLM.from_params(config, params, **settings),
    ):
        with make() as llm:
            llm.generate([PROMPT], GREEDY)
            runner = llm._engine.runner
            for leaf in (*jax.tree.leaves(runner.params), runner.state.arena):
                assert leaf.devices() == {devices[3]}


def test_a_mesh_of_the_callers_with_replicas(devices):
    """Axes in any order."""
    mesh = jax.sharding.Mesh(np.array(devices[:4]).reshape(2, 2), ("tp", "dp"))
    with LLM(folder_of("qwen2_tied"), mesh=mesh, max_rows=1, max_model_len=96, quiet=True) as llm:
        found = [set(e.runner.state.arena.sharding.device_set) for e in engines_of(llm)]
        assert found == [set(devices[:4:2]), set(devices[1:4:2])]
        for engine in engines_of(llm):
            for leaf in jax.tree.leaves(engine.runner.params):
                assert leaf.devices() == engine.runner.state.arena.devices()


def test_a_mesh_of_the_callers(devices):
    mesh = jax.sharding.Mesh(np.array(devices[4:6]), ("tp",))
    with LLM(folder_of("qwen2_tied"), mesh=mesh, max_rows=1, max_model_len=96, quiet=True) as llm:
        assert llm._engine.runner.state.arena.sharding.device_set == set(devices[4:6])
        assert len(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids) == 12
    other = jax.sharding.Mesh(np.array(devices[:2]), ("data",))
    with pytest.raises(
        ValueError, match="the axes of mesh must be named 'dp' and 'tp', got 'data'"
    ):
        LLM(folder_of("qwen2_tied"), mesh=other, quiet=True)

"""Weights from files, each put on the devices as it is read."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import jax
import numpy as np
import orbax.checkpoint
import pytest
from safetensors.numpy import load_file, save_file

from hybrid_jax import LLM, SamplingParams, SpeculationConfig, load_model, save_orbax
from hybrid_jax.config import with_cut
from hybrid_jax.kinds.kind import all_weights
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.mesh.shards import Placing, Shards
from hybrid_jax.models.cut import cut_params, exit_params
from hybrid_jax.weights import orbax as orbax_files
from hybrid_jax.weights.cut import WEIGHTS_FILE, own_tensors, save_cut
from hybrid_jax.weights.load import open_model, open_with_drafter
from tests.drawing import left_to_all
from tests.imports import ROOT
from tests.llms import engines_of
from tests.mesh.models import DIVIDED
from tests.tiny_models import redrawn

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


# Models with a cut beside one of `GOLDENS`: where the cut is, its groups, and how many devices can divide it.
CUTS = {
    "falcon_h1_gate_first_tied": (1, {}, 2),
    "llama_llama3": (1, {}, 3),
    "qwen2_tied": (1, {"kv_group": 2}, 2),
    "qwen3_5_dense_tied": (2, {}, 2),
}


def make_cut(folder, base, cut, **groups):
    """A directory with a model with a cut beside the one in `base`, all of its own weights drawn anew."""
    config, plain = load_model(base)
    config = replace(with_cut(config, cut, **groups), exit_head=True)
    params = cut_params(plain, config)
    params |= {"exit": exit_params(plain, config)}
    rng = np.random.default_rng(5)
    own = {
        name: np.asarray(leaf) * rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        for name, leaf in own_tensors(params, config).items()
    }
    save_cut(folder, config, own, base=base, base_params=plain)
    return folder


def assert_read_in_parts(opened, devices, whole):
    """That the weights of a directory are divided over these devices, and are those of one device."""
    config, params = opened.load(put=Placing(devices))
    shards = Shards(config, devices)
    assert jax.tree.structure(params) == jax.tree.structure(whole)
    for leaf, read in zip(
        jax.tree.leaves(shards.whole(params)), jax.tree.leaves(whole), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (read.shape, read.dtype)
        assert np.array_equal(np.asarray(leaf), np.asarray(read))
    assert all(leaf.sharding.mesh == shards.mesh for leaf in jax.tree.leaves(params))
    placed = shards.place(params)
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (placed, params)), strict=True))


@pytest.mark.parametrize(("name", "count"), CASES)
def test_the_parts_make_up_what_one_device_reads(name, count, devices):
    whole = load_model(folder_of(name))[1]
    assert_read_in_parts(open_model(folder_of(name)), devices[:count], whole)


@pytest.mark.parametrize("name", DIVIDED)
def test_the_parts_make_up_what_an_orbax_directory_has(name, devices, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_files, "GROUP_BYTES", 20_000)  # several groups
    config, counts = DIVIDED[name]
    whole = redrawn(config, seed=0)
    save_orbax(tmp_path, config, whole)
    opened = open_model(tmp_path, mtp=bool(config.mtp))
    for count in (counts[0], counts[-1]):
        assert_read_in_parts(opened, devices[:count], whole)


@pytest.mark.parametrize("of_orbax", [False, True])
@pytest.mark.parametrize("exit_head", [False, True])
@pytest.mark.parametrize("name", CUTS)
def test_the_parts_make_up_a_model_with_a_cut(name, exit_head, of_orbax, devices, tmp_path):
    cut, groups, count = CUTS[name]
    base = folder_of(name)
    if of_orbax:
        save_orbax(tmp_path / "base", *load_model(base))
        base = tmp_path / "base"
    folder = make_cut(tmp_path / "cut", base, cut, **groups)
    whole = load_model(folder, exit_head=exit_head)[1]
    assert ("exit" in whole) == exit_head
    assert_read_in_parts(open_model(folder, exit_head=exit_head), devices[:count], whole)


@left_to_all(*(f"{name}-{count}" for name, count in CASES if name != "jamba_dense_tied"))
@pytest.mark.parametrize(("name", "count"), CASES)
def test_tokens_of_a_directory_are_those_of_one_device(name, count):
    found = []
    for mesh in (None, f"tp={count}"):
        with LLM(folder_of(name), mesh=mesh, max_rows=1, max_model_len=96, quiet=True) as llm:
            found.append(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    assert found[0] == found[1]


def tokens_of_both(folder, count, **settings):
    """The tokens that one device writes, and that several do."""
    found = []
    for mesh in (None, f"tp={count}"):
        with LLM(folder, mesh=mesh, max_rows=1, max_model_len=96, quiet=True, **settings) as llm:
            found.append(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    return found


def test_an_orbax_directory(tmp_path):
    save_orbax(tmp_path, *load_model(folder_of("qwen2_tied")))
    one, several = tokens_of_both(tmp_path, 2)
    assert one == several


@pytest.mark.parametrize("name", ["falcon_h1_gate_first_tied", "llama_llama3"])
def test_a_directory_with_a_cut(name, tmp_path):
    cut, groups, count = CUTS[name]
    folder = make_cut(tmp_path / "cut", folder_of(name), cut, **groups)
    one, several = tokens_of_both(folder, count)
    assert one == several


@pytest.mark.parametrize("of_orbax", [False, True])
def test_the_parts_make_up_a_second_model(of_orbax, devices, tmp_path):
    model = second = folder_of("qwen2_tied")
    if of_orbax:
        save_orbax(tmp_path, *load_model(second))
        second = tmp_path
    opened = open_with_drafter(model, SpeculationConfig(method="draft", model=second))
    whole = opened.load()[1]
    assert jax.tree.structure(whole["draft"]) == jax.tree.structure(load_model(second)[1])
    assert_read_in_parts(opened, devices[:2], whole)


def test_a_second_model_beside_weights_in_memory():
    model = load_model(folder_of("qwen2_tied"))
    speculation = SpeculationConfig(method="draft", model=folder_of("qwen2_tied"))
    settings = {"max_rows": 1, "max_model_len": 96, "quiet": True, "speculation": speculation}
    found = []
    for mesh in (None, "tp=2"):
        with LLM.from_params(*model, mesh=mesh, **settings) as llm:
            found.append(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    assert found[0] == found[1]


# --- how much is in memory at once ------------------------------------------------------------------


class Watched(Placing):
    """Looks at what is alive whenever a weight is put on the devices.

    Attributes:
        whole: bytes of weights on the host that are alive, by what they are. most: the largest sum that was seen.
        on_device: the most bytes that each device had.
    """

    def __init__(self, devices):
        super().__init__(devices)
        self.before = {id(array): array for array in jax.live_arrays()}
        self.whole, self.most, self.on_device = {}, 0, {}

    def watch(self, weight):
        self.whole[id(weight)] = weight.nbytes
        weakref.finalize(weight, self.whole.pop, id(weight))
        self.most = max(self.most, sum(self.whole.values()))

    def look(self):
        sums = {}
        for array in jax.live_arrays():
            if id(array) in self.before:
                continue
            size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
            for device in array.sharding.device_set:
                sums[device] = sums.get(device, 0) + size
        for device, size in sums.items():
            self.on_device[device] = max(size, self.on_device.get(device, 0))

    def __call__(self, config, path, weight):
        if id(weight) not in self.whole:
            self.watch(weight)
        self.look()
        # A copy, because a CPU device may go on with the memory of the array that it is given.
        placed = super().__call__(config, path, weight.copy())
        self.look()
        return placed


def assert_no_more_at_once(opened, devices, allowed):
    """That only some bytes are whole on the host at once, and that no device ever has more than its part.

    Args:
        allowed: from the bytes of each weight, those on the host.
    """
    watched = Watched(devices)
    restore = orbax.checkpoint.Checkpointer.restore

    def restored(self, *args, **kwargs):
        tree = restore(self, *args, **kwargs)
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, np.ndarray):
                watched.watch(leaf)
        watched.look()
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax.checkpoint.Checkpointer, "restore", restored)
        config, params = opened.load(put=watched)
    sizes, parts = (
        [weight.num_bytes(config.dtype) for weight in all_weights(model_weights(model))]
        for model in (config, Shards(config, devices).local)
    )
    assert 0 < watched.most <= allowed(sizes) < sum(sizes) / 2
    assert watched.on_device == dict.fromkeys(devices, sum(parts))
    assert sum(parts) < 0.75 * sum(sizes)
    del params


def largest(sizes):
    return max(sizes)


@pytest.mark.parametrize("name", ["falcon_h1_gate_first_tied", "falcon_mamba_untied"])
def test_of_safetensors_one_weight_is_whole_at_once(name, devices):
    assert_no_more_at_once(open_model(folder_of(name)), devices[:2], largest)


@pytest.mark.parametrize("name", ["attention", "experts", "cut"])
@pytest.mark.parametrize("share", [0, 4])
def test_of_an_orbax_directory_a_group_of_weights_is_whole_at_once(
    name, share, devices, tmp_path, monkeypatch
):
    config, _ = DIVIDED[name]
    params = redrawn(config, seed=0)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    limit = total // share if share else 0
    monkeypatch.setattr(orbax_files, "GROUP_BYTES", limit)
    save_orbax(tmp_path, config, params)
    del params
    opened = open_model(tmp_path)
    assert_no_more_at_once(opened, devices[:2], lambda sizes: max(limit, *sizes))


@pytest.mark.parametrize("of_orbax", [False, True])
def test_of_a_model_with_a_cut_one_weight_is_whole_at_once(
    of_orbax, devices, tmp_path, monkeypatch
):
    monkeypatch.setattr(orbax_files, "GROUP_BYTES", 0)
    base = folder_of("falcon_h1_gate_first_tied")
    if of_orbax:
        save_orbax(tmp_path / "base", *load_model(base))
        base = tmp_path / "base"
    folder = make_cut(tmp_path / "cut", base, 1)
    assert_no_more_at_once(open_model(folder, exit_head=True), devices[:2], largest)


# --- what does not fit ------------------------------------------------------------------------------


def test_an_orbax_directory_of_another_shape_is_one_error(tmp_path):
    config, params = load_model(folder_of("qwen2_tied"))
    short = params | {"embed": params["embed"][:7]}
    save_orbax(tmp_path, config, short)
    shown = (
        rf"\['embed'\] of shape \(7, {config.width}\), model_config.json asks for "
        rf"\({config.vocab_size}, {config.width}\); save it again"
    )
    with pytest.raises(ValueError, match=shown):
        LLM(tmp_path, mesh="tp=2", quiet=True)


def test_a_cut_of_another_shape_or_base_is_one_error(tmp_path):
    folder = make_cut(tmp_path / "cut", folder_of("qwen2_tied"), 1)
    tensors = load_file(folder / WEIGHTS_FILE)
    rows, columns = tensors["cut.write"].shape
    save_file(tensors | {"cut.write": tensors["cut.write"][1:]}, folder / WEIGHTS_FILE)
    shown = rf"cut.write must have shape \({rows}, {columns}\), got \({rows - 1}, {columns}\)"
    with pytest.raises(ValueError, match=shown):
        LLM(folder, mesh="tp=2", quiet=True)
    save_file(tensors | {"base.norm": tensors["base.norm"] + 1}, folder / WEIGHTS_FILE)
    with pytest.raises(ValueError, match="beside another model than .* its norm differs"):
        LLM(folder, mesh="tp=2", quiet=True)


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
        (
            "tp=5",
            "tp=5 cannot divide .*num_heads of Attention .* multiple of the devices .* and 5; tp=2 or",
        ),
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

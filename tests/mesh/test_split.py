"""Which part of each weight a device has: by hand, and together with the others the whole."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from hybrid_jax.config import MLP, Attention, Mamba2, MoE
from hybrid_jax.config.formats import Scaled
from hybrid_jax.kinds.table import kind_of, model_weights
from hybrid_jax.mesh.split import Split, shard_config, splits
from tests.mesh.models import DIVIDED, HEADS
from tests.tiny_models import redrawn, tiny_model

CASES = [(name, count) for name, (_, counts) in DIVIDED.items() for count in counts]


def joined(split, array):
    """The parts of all devices, one after the other."""
    parts = [split.cut(array, index) for index in range(split.count)]
    return array if split.axis is None else np.concatenate(parts, split.axis)


def test_segments_are_cut_one_by_one():
    split = Split(count=2, axis=1, whole=(4, 2, 1), part=(2, 1, 1))
    array = np.arange(7)[None]
    assert split.cut(array, 0).tolist() == [[0, 1, 4, 6]]
    assert split.cut(array, 1).tolist() == [[2, 3, 5, 6]]
    assert joined(split, array).tolist() == [[0, 1, 4, 6, 2, 3, 5, 6]]


def test_fewer_heads_than_devices_are_repeated_in_runs():
    split = Split(count=6, axis=0, whole=(4,), part=(2,))  # two heads of two channels
    assert [split.cut(np.arange(4), i).tolist() for i in range(6)] == [[0, 1]] * 3 + [[2, 3]] * 3


def test_a_vocabulary_is_filled_up():
    split = Split(count=3, axis=0, whole=(5,), part=(2,), how="runs")
    assert [split.cut(np.arange(5), i).tolist() for i in range(3)] == [[0, 1], [2, 3], [4, 0]]
    more = Split(count=4, axis=0, whole=(5,), part=(2,), how="runs")
    assert more.cut(np.arange(5), 3).tolist() == [0, 0]


def test_hidden_units_are_filled_up_each_run_of_them_by_itself():
    split = Split(count=2, axis=1, whole=(3, 3), part=(2, 2), how="runs")  # gate and up
    array = np.array([[1, 2, 3, 4, 5, 6]])
    assert [split.cut(array, i).tolist() for i in range(2)] == [[[1, 2, 4, 5]], [[3, 0, 6, 0]]]
    assert split.undivided(joined(split, array)).tolist() == array.tolist()
    none = Split(count=4, axis=0, whole=(5,), part=(8,), how="runs")
    assert [none.cut(np.arange(5), i).sum() for i in range(4)] == [10, 0, 0, 0]


@pytest.mark.parametrize(
    ("width", "count", "part"), [(512, 2, 256), (512, 3, 176), (37, 2, 24), (5, 8, 8)]
)
def test_hidden_units_of_each_device_are_a_multiple_of_eight_or_an_equal_part(width, count, part):
    assert kind_of(MLP(width=width)).shard(MLP(width=width), count).width == part


def test_what_is_added_to_a_sum_is_on_the_first_device_alone():
    split = Split(count=3, axis=0, how="first")
    assert joined(split, np.array([3, 4])).tolist() == [3, 4, 0, 0, 0, 0]


@pytest.mark.parametrize(("name", "count"), CASES)
def test_parts_have_the_shapes_of_the_model_that_a_device_runs(name, count):
    config, _ = DIVIDED[name]
    params = jax.tree.map(np.asarray, redrawn(config, seed=1))
    wanted = model_weights(shard_config(config, count))
    tree, found = splits(config, count), []

    def check(split, array, weight):
        parts = [split.cut(array, index) for index in range(count)]
        found.append({part.shape for part in parts} == {weight.shape})
        assert np.array_equal(split.undivided(joined(split, array)), array)
        assert split.undivided_shape(joined(split, array).shape) == array.shape
        assert joined(split, array).size in (array.size, count * parts[0].size)
        if split.how == "parts" and split.axis is not None:  # nothing is left out
            assert set(array.ravel()) <= {x for part in parts for x in part.ravel()}

    jax.tree.map(check, tree, params, wanted, is_leaf=lambda x: isinstance(x, Split))
    assert found and all(found)


@pytest.mark.parametrize(
    ("spec", "count", "message"),
    [
        (Attention(num_heads=6, num_kv_heads=3, head_dim=4), 4, "num_heads .* got 6 and 4"),
        (Attention(num_heads=6, num_kv_heads=3, head_dim=4), 2, "num_kv_heads .* got 3 and 2"),
        (Mamba2(num_heads=6, head_dim=4, state_size=8), 4, "num_heads .* got 6 and 4"),
        (
            Mamba2(num_heads=6, head_dim=4, state_size=8, num_groups=3),
            2,
            "num_groups of Mamba2 layers must be a multiple .* or divide them, got 3 and 2",
        ),
        (
            Mamba2(num_heads=6, head_dim=4, state_size=8, norm_groups=3),
            2,
            "norm_groups .* got 3 and 2",
        ),
        (MoE(num_experts=5, top_k=1, width=4), 2, "num_experts of MoE layers .* got 5 and 2"),
    ],
)
def test_what_cannot_be_divided_is_named_with_its_numbers(spec, count, message):
    with pytest.raises(ValueError, match=message):
        kind_of(spec).shard(spec, count)


def test_a_kind_without_a_form_for_several_devices():
    spec = tiny_model("with_latent")[0].layers[1].mixers[0]
    with pytest.raises(
        NotImplementedError, match="LLM: Latent layers are not divided .* leave mesh"
    ):
        kind_of(spec).shard(spec, 2)


def test_a_model_that_cannot_be_divided():
    config, _ = DIVIDED["attention"]
    narrow = (("layers.0.mlp.up", Scaled(code="int8")),)
    with pytest.raises(
        NotImplementedError, match=r"layers.0.mlp.up is int8, a scale per column; leave mesh"
    ):
        shard_config(replace(config, matrices=narrow), 2)
    with pytest.raises(ValueError, match=f"num_heads of Attention layers .* got {HEADS} and 5"):
        shard_config(config, 5)
    assert shard_config(config, 1) is config
    second = shard_config(replace(config, draft=config), 2)
    assert second.draft is not None and second.draft.shards == second.shards == 2

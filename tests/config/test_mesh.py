"""Meshes as callers write them."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from hybrid_jax.config.mesh import MeshShape, devices_of, read_mesh


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        (None, (1, 1)),
        ("tp=4", (1, 4)),
        ("dp=2", (2, 1)),
        ("dp=2,tp=2", (2, 2)),
        (" tp = 3 , dp=12 ", (12, 3)),
        ("prefill=1,decode=2", (2, 1, 1)),
        ("tp=4, decode=1, prefill=3", (1, 4, 3)),
    ],
)
def test_a_mesh_in_words(mesh, shape):
    assert read_mesh(mesh) == MeshShape(*shape)
    assert devices_of(mesh) is None


def test_the_words_of_a_mesh_can_be_read():
    for shape in (*map(MeshShape, (2, 1, 4), (1, 3, 2)), MeshShape(1, 1, 2), MeshShape(3, 2, 1)):
        assert read_mesh(shape.words) == shape


@pytest.mark.parametrize(
    "mesh",
    ["", "2", "tp=0", "dp=0,tp=2", "tp=2,tp=2", "dp=2;tp=2", "pp=2", "tp=-1", "dp=2,", "tp=²"],
)
def test_other_words_are_named(mesh):
    message = (
        f"LLM: mesh must be like 'tp=4', 'dp=2', 'dp=2,tp=2' or 'prefill=1,decode=2', got {mesh!r}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        read_mesh(mesh)


@pytest.mark.parametrize(
    "mesh", ["prefill=1", "tp=2,decode=1", "prefill=1,decode=1,dp=2", "prefill=1,dp=2"]
)
def test_both_sides_are_named_and_no_replicas_beside_them(mesh):
    with pytest.raises(ValueError, match="must name both prefill and decode, .* and then no dp"):
        read_mesh(mesh)


def test_what_is_no_mesh():
    with pytest.raises(ValueError, match=r"or a jax.sharding.Mesh, got 4"):
        read_mesh(4)


def test_a_mesh_of_jax_with_other_axes():
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    found = type("Mesh", (), {"devices": (), "shape": mesh.shape})()
    with pytest.raises(ValueError, match="must be named 'dp' and 'tp', got 'x' in {'x': 2}"):
        read_mesh(found)


class Mesh:
    """A mesh of jax as far as it is read, over devices that are not there."""

    def __init__(self, sizes):
        count = int(np.prod(list(sizes.values())))
        self.devices = np.arange(count).reshape(tuple(sizes.values()))
        self.axis_names, self.shape = tuple(sizes), sizes


@pytest.mark.parametrize(
    ("sizes", "devices"),
    [
        ({"dp": 2, "tp": 3}, [[0, 1, 2], [3, 4, 5]]),
        ({"tp": 3, "dp": 2}, [[0, 2, 4], [1, 3, 5]]),
        ({"tp": 2, "x": 1}, [[0, 1]]),
        ({"x": 1, "dp": 3}, [[0], [1], [2]]),
        ({"x": 1}, [[0]]),
    ],
)
def test_the_devices_of_each_replica(sizes, devices):
    assert devices_of(Mesh(sizes)) == devices
    assert read_mesh(Mesh(sizes)) == MeshShape(dp=len(devices), tp=len(devices[0]))

"""Versions of Triton and jax-triton that cannot be used are named with the remedy; the order of pointers."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import jax_triton


@pytest.mark.parametrize(
    "triton, called, reason",
    [
        ("3.8.0", "0.4.1", None),
        ("3.6.0", "1.0", None),
        ("3.9.0", "0.4.1", "needs triton below 3.9, found 3.9.0: pip install 'triton<3.9'"),
        ("3.9rc1", "0.4.1", "needs triton below 3.9, found 3.9rc1: pip install 'triton<3.9'"),
        ("3.10.0rc1", "0.4.1", "needs triton below 3.9, found 3.10.0rc1: pip install 'triton<3.9'"),
        (
            *("3.8.0", "0.3.1"),
            "needs jax-triton 0.4 or newer, found 0.3.1: with Python 3.12 or newer, pip install 'hybrid_jax[triton]'",
        ),
    ],
)
def test_versions(triton, called, reason):
    assert jax_triton.why_versions(triton, called) == reason


def test_a_missing_package_is_named(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    jax_triton.why_unavailable.cache_clear()
    assert (
        jax_triton.why_unavailable()
        == "needs the package triton: with Python 3.12 or newer, pip install 'hybrid_jax[triton]'"
    )
    jax_triton.why_unavailable.cache_clear()


def test_what_is_in_place_comes_after_the_outputs(monkeypatch):
    """A GPU gives a kernel its inputs' pointers, then those of what it makes, in this order and as many as it takes."""
    given = {}

    def triton_call(*inputs, out_type, input_output_aliases, **_):
        given.update(out_type=out_type, aliases=input_output_aliases)
        return [like.shape for like in out_type]

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    arrays = [jnp.zeros(size) for size in (2, 3, 5)]
    outputs = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (7, 11)]
    made = jax_triton.call(None, *arrays, outputs=outputs, in_place=[0, 2], grid=(1,), num_warps=1)
    assert [like.shape for like in given["out_type"]] == [(7,), (11,), (2,), (5,)]
    assert given["aliases"] == {0: 2, 2: 3}
    assert made == ((2,), (5,), (7,), (11,))

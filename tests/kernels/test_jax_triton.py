"""Versions of Triton and jax-triton that cannot be used are named, with the remedy."""

from __future__ import annotations

import importlib.metadata

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

"""Compiling for an H200: skipped where the CUDA plugin of jax is not installed."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import importlib.util

import jax
import pytest

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
INSTALL = 'needs jax\'s CUDA plugin: make test-aot, or pip install "jax[cuda12-local]"'
REQUIRED = os.environ.get("HYBRID_JAX_AOT") == "required"  # a missing plugin is then an error


@pytest.fixture(scope="session", autouse=True)
def no_stored_programs():
    """A stored program comes without a report."""
    old = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", old)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = importlib.util.find_spec("jax_plugins") is not None
    if here and any(importlib.util.find_spec(name) for name in PLUGINS):
        return
    if REQUIRED:
        raise pytest.UsageError(f"tests/aot {INSTALL}")
    for item in items:
        if "/aot/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=INSTALL))

"""Settings of every test: CPU, strict dtypes, compiled programs kept between runs, fixtures all rooms use."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

from hybrid_jax.compile_cache import enable_compile_cache

# An implicit float32 + bfloat16 is an error. Rank promotion stays allowed: biases and norm weights
# [D] broadcast over [B, T, D] on purpose.
jax.config.update("jax_numpy_dtype_promotion", "strict")
enable_compile_cache("xla-tests")

# A busy machine is no failure, and a run of the tests says the same each time.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT


@pytest.fixture
def no_compile_cache():
    """Compiles from scratch inside the test: for those that inspect the compiler's own reports."""
    old = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_enable_compilation_cache", old)
    jax.clear_caches()

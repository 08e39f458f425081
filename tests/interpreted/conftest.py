"""Kernels written in Triton: carried out by its interpreter (`make test-triton`), and compiled where there is a GPU."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels import jax_triton


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = jax_triton.why_unavailable()
    if reason is None and jax.default_backend() != "gpu" and not jax_triton.interpreted():
        reason = "needs a GPU, or TRITON_INTERPRET=1: make test-triton"
    for item in items:
        if reason is not None and "/tests/interpreted/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))

"""RMS norms against their sums written out in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rmsnorm import gated_rmsnorm
from pallas_kernels.rmsnorm.xla import rms_norm

XLA = {"implementation": "xla"}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x.astype(np.float64)))


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    x, weight = draw(2, 5, 12), draw(12, seed=1)
    wide = x.astype(np.float64)
    want = weight * wide / np.sqrt((wide**2).sum(-1, keepdims=True) / 12 + 1e-3)
    np.testing.assert_allclose(rms_norm(x, jnp.asarray(weight), 1e-3), want, rtol=2e-6)


@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm_gates_first_and_norms_each_block_alone(groups):
    x, gate, weight = draw(2, 5, 12), draw(2, 5, 12, seed=1), draw(12, seed=2)
    wide = (x * silu(gate)).reshape(2, 5, groups, -1)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
    want = weight * normed.reshape(x.shape)
    got = gated_rmsnorm(x, gate, jnp.asarray(weight), eps=1e-3, groups=groups, **XLA)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_bfloat16_is_computed_wide_and_rounded_before_the_weight():
    x = jnp.asarray(draw(4, 64) * 100, jnp.bfloat16)
    weight = jnp.asarray(draw(64, seed=1), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == jnp.bfloat16
    want = jnp.asarray(normed, jnp.bfloat16) * weight
    assert np.mean(np.asarray(got == want)) > 0.99  # ties of the rounding aside
    gated = gated_rmsnorm(x.astype(jnp.float32), x, weight, eps=1e-5, groups=4, **XLA)
    assert gated.dtype == jnp.bfloat16

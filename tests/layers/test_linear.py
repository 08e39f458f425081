"""Products of activations and weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.layers.linear import linear


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lead", [(1,), (1, 1), (3, 1), (2, 5)])
def test_linear_is_the_product(dtype, lead):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((*lead, 24)), dtype)
    weight, bias = jnp.asarray(rng.standard_normal((24, 40)), dtype), jnp.ones(40, dtype)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64) + 1
    got = linear(x, weight, bias)
    assert got.dtype == x.dtype and got.shape == (*lead, 40)
    error = np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()
    assert error < {"float32": 1e-6, "bfloat16": 8e-3}[dtype]


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 widens the weights of every product"
)
@pytest.mark.parametrize("rows", [1, 4])
def test_bfloat16_weights_are_not_widened(rows):
    x, weight = jnp.ones((rows, 512), jnp.bfloat16), jnp.ones((512, 2048), jnp.bfloat16)
    text = jax.jit(linear).lower(x, weight).compile().as_text()
    assert "f32[512,2048]" not in text

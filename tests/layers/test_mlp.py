"""Feed-forward blocks and the matrix product under them, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.layers.mlp import mlp
from hybrid_jax.products.xla import linear


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def slow_mlp(params: dict, h: np.ndarray, kind: str) -> np.ndarray:
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    hidden = np.asarray(h, np.float64) @ p["up"] + p.get("up_bias", 0)
    if kind == "gated_silu":
        gate, up = hidden[..., : hidden.shape[-1] // 2], hidden[..., hidden.shape[-1] // 2 :]
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = np.maximum(hidden, 0) ** 2
    return hidden @ p["down"] + p.get("down_bias", 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["gated_silu", "relu2"])
def test_mlp_equals_its_equation_and_keeps_bfloat16(kind, bias):
    hidden = 14 if kind == "gated_silu" else 7
    params = {"up": draw(6, hidden), "down": draw(7, 6, seed=1)}
    if bias:
        params |= {"up_bias": draw(hidden, seed=2), "down_bias": draw(6, seed=3)}
    h = draw(2, 5, 6, seed=4)
    want = slow_mlp(params, h, kind)
    np.testing.assert_allclose(mlp(params, h, kind), want, rtol=1e-5, atol=1e-5)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, h))
    got = mlp(*half, kind)
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error < 2e-2


def test_linear_asks_for_the_highest_precision():
    jaxpr = str(jax.make_jaxpr(linear)(draw(2, 3), draw(3, 4)))
    assert "Precision.HIGHEST" in jaxpr or "HIGHEST" in jaxpr

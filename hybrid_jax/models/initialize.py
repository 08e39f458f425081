"""Random weights of the right shapes: for training from scratch, tests and studies."""

from __future__ import annotations

import math
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.kinds.kind import Weight, map_weights
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.products.operations import encoded


def random_params(config: ModelConfig, seed: int, dtype: str = "float32") -> dict:
    """Draws weights: matrices N(0, 1 / fan_in), outputs scaled down with depth, decay as published (arXiv 2405.21060).

    Args:
        config: the model.
        seed: of numpy's generator; the same seed gives the same weights everywhere.
        dtype: dtype of the weights, but for those that stay float32 (`Weight.float32`).
    """
    rng = np.random.default_rng(seed)
    depth = sum(len(layer.blocks) for layer in config.layers)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        std = scale / math.sqrt(shape[-2])
        return jnp.asarray(rng.standard_normal(shape, np.float32) * std, dtype)

    def made(weight: Weight) -> Any:
        numbers = draw(weight)
        return encoded(numbers, weight.format) if weight.is_matrix else numbers

    def draw(weight: Weight) -> jax.Array:
        kept = "float32" if weight.float32 else dtype
        match weight.draw:
            case "embedding":
                return normal(*weight.shape, scale=math.sqrt(weight.shape[0]) * 0.02)
            case "matrix" | "conv":
                return normal(*weight.shape)
            case "output":
                return normal(*weight.shape, scale=1 / math.sqrt(2 * depth))
            case "ones":
                return jnp.ones(weight.shape, kept)
            case "zeros":
                return jnp.zeros(weight.shape, kept)
            case "step_bias":  # step sizes of 0.001 to 0.1 before anything is added
                dt = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), weight.shape))
                return jnp.asarray(dt + np.log(-np.expm1(-dt)), kept)
            case "log_decay":
                return jnp.asarray(np.log(rng.uniform(1, 16, weight.shape)), kept)
            case draw:
                assert_never(draw)

    return map_weights(made, model_weights(config))
